"""A Google Cloud Storage server on loopback (gcp-storage-emulator's) that counts requests, lists by the page, and
answers some requests as a store in trouble would."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.background import answered
from tests.processes import forget_forkserver

BUCKET = "store"
ERRORS = {
    "throttled": (429, "The object exceeded the rate limit for object mutation operations."),
    "broken": (503, "We encountered an internal error. Please try again."),
    "denied": (403, "me@example.com does not have storage.objects.list access."),
    "expired": (401, "The request has expired credentials."),
}


@dataclass(frozen=True)
class Request:
    """What was asked: list, info, read, insert (at once), begin (a resumable upload), part, copy or delete; the
    object's name or prefix."""

    operation: str
    key: str


class GoogleServer:
    """`answer(request)` names what goes wrong with a request: one of ERRORS, "cut" (the connection ends in the middle
    of the body) or "dropped" (no answer); "" lets it pass. page: the most objects of a listing."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.requests: list[Request] = []
        self.answer: Callable[[Request], str] = lambda request: ""
        self.url, self.page = "", 1000

    def reset(self) -> None:
        self.requests, self.answer, self.page = [], lambda request: "", 1000

    def counts(self) -> Counter[str]:
        return Counter(request.operation for request in self.requests)

    def fail(self, kind: str, times: int, *operations: str, key: str = "") -> None:
        """The next `times` requests of these operations (default: all), about keys that hold `key`, go wrong."""
        left = [kind] * times

        def answer(request: Request) -> str:
            wanted = (not operations or request.operation in operations) and key in request.key
            return left.pop() if wanted and left else ""

        self.answer = answer


def _describe(method: str, target: str) -> Request:
    url = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    if url.path.startswith("/upload/"):
        if "upload_id" in query:
            return Request("part", query.get("name", ""))
        return Request("begin" if query.get("uploadType") == "resumable" else "insert", query.get("name", ""))
    found = re.fullmatch(r"(?:/download)?/storage/v1/b/[^/]+(?:/o(?:/([^/]+)(/.*)?)?)?", url.path)
    key = unquote(found[1] or "") if found else ""
    if method == "DELETE":
        return Request("delete", key)
    if found and found[2]:
        return Request("copy", key)
    if not key:
        return Request("list", query.get("prefix", ""))
    return Request("read" if query.get("alt") == "media" else "info", key)


@contextmanager
def serve_google(address: str = "127.0.0.1") -> Iterator[GoogleServer]:
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    from gcp_storage_emulator.storage import Storage

    app, lock = GoogleServer(Storage(use_memory_fs=True)), threading.Lock()

    class Handler(emulator.RequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            request = _describe(self.command, self.path)
            app.requests.append(request)
            self.trouble = app.answer(request)
            return True

        def do_GET(self) -> None:
            self.handle_one("GET")

        def do_POST(self) -> None:
            self.handle_one("POST")

        def do_DELETE(self) -> None:
            self.handle_one("DELETE")

        def handle_one(self, method: str) -> None:
            if self.trouble == "dropped":
                self.close_connection = True
                return
            if self.trouble in ERRORS:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code, message = ERRORS[self.trouble]
                body = json.dumps({"error": {"code": code, "message": message}}).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            with lock:
                self.path = self.current_generation(self.path)
                _Router(self).handle(method)

        def current_generation(self, target: str) -> str:
            """Of a read of an older generation another target: the emulator has only the last, and sends it."""
            query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
            key = _describe("GET", target).key
            if "generation" in query and "media" in query.values():
                bucket = urlsplit(target).path.split("/")[5]
                if app.storage.get_file_obj(bucket, key)["generation"] != query["generation"]:
                    return target.replace("/o/", "/o/replaced-")
            return target

    class _Response(emulator.Response):
        def close(self) -> None:
            handler, content = self._handler, self._content
            query = parse_qs(urlsplit(handler.path).query)
            if "maxResults" in query and isinstance(content, str) and content:
                found, start = json.loads(content), int(query.get("pageToken", ["0"])[0])
                size = min(int(query["maxResults"][0]), app.page)
                rows = found["items"]
                page = {"items": rows[start : start + size]}
                page |= {"nextPageToken": str(start + size)} if start + size < len(rows) else {}
                self._content = json.dumps(page)
            if handler.trouble != "cut":
                return super().close()
            body = content.encode() if isinstance(content, str) else content
            handler.send_response(self.status.value)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2])
            handler.close_connection = True

    class _Router(emulator.Router):
        def handle(self, method: str) -> None:
            emulator.Response, kept = _Response, emulator.Response
            try:
                super().handle(method)
            finally:
                emulator.Response = kept

    with answered(partial(Handler, app.storage), address) as app.url:
        yield app


@pytest.fixture(scope="session")
def google_server() -> Iterator[GoogleServer]:
    with serve_google() as server:
        yield server


@pytest.fixture
def google(google_server: GoogleServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GoogleServer]:
    """The server with an empty bucket BUCKET; programs, also in other processes, find it by the environment."""
    from gcsfs.core import GCSFileSystem

    environment = {"STORAGE_EMULATOR_HOST": google_server.url, "NO_GCE_CHECK": "true", "NO_PROXY": "*"}
    environment |= {"GOOGLE_APPLICATION_CREDENTIALS": "", "CLOUDSDK_CONFIG": str(tmp_path / "none")}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cache.store.spool_folder", lambda: tmp_path / "scratch")
    forget_forkserver()
    GCSFileSystem.clear_instance_cache()
    google_server.reset()
    google_server.storage.create_bucket(BUCKET, {"name": BUCKET})
    yield google_server
    google_server.reset()
    google_server.storage.wipe(False)
    GCSFileSystem.clear_instance_cache()
