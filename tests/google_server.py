"""A Google Cloud Storage server on loopback (gcp-storage-emulator's) that counts requests, lists by the page, and
answers some requests as a store in trouble would."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.background import answered
from tests.processes import forget_forkserver
from tests.store_requests import RecordedRequests, Request

BUCKET = "store"
ERRORS = {
    "throttled": (429, "The object exceeded the rate limit for object mutation operations."),
    "broken": (503, "We encountered an internal error. Please try again."),
    "denied": (403, "me@example.com does not have storage.objects.list access."),
    "expired": (401, "The request has expired credentials."),
}


class GoogleServer(RecordedRequests):
    """Operations: list, info, read, insert (at once), begin (a resumable upload), part, copy, delete. What goes wrong:
    one of ERRORS, "cut" (the connection ends in the middle of the body), "short" (half of it, as if that were all),
    "damaged" (a byte differs) or "dropped" (no answer). page: the most objects of a listing."""

    def __init__(self, storage: Any) -> None:
        super().__init__()
        self.storage, self.page = storage, 1000

    def reset(self) -> None:
        super().reset()
        self.page = 1000

    def present_target(self, target: str) -> str:
        """Of a read of an older generation another target: the emulator has only the last, and sends it."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if "generation" in query and "media" in query.values():
            bucket, key = url.path.split("/")[5], _describe("GET", target).key
            if self.storage.get_file_obj(bucket, key)["generation"] != query["generation"]:
                return target.replace("/o/", "/o/replaced-")
        return target

    def one_page(self, target: str, listing: str) -> str:
        """Of the emulator's listing, which has all objects, the page that was asked for."""
        query = parse_qs(urlsplit(target).query)
        rows, start = json.loads(listing)["items"], int(query.get("pageToken", ["0"])[0])
        size = min(int(query["maxResults"][0]), self.page)
        more = {"nextPageToken": str(start + size)} if start + size < len(rows) else {}
        return json.dumps({"items": rows[start : start + size], **more})


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
                self.path = app.present_target(self.path)
                _Router(self).handle(method)

    class _Response(emulator.Response):
        def close(self) -> None:
            handler, content = self._handler, self._content
            if "maxResults=" in handler.path and isinstance(content, str) and content:
                self._content = app.one_page(handler.path, content)
            if handler.trouble not in ("cut", "short", "damaged"):
                return super().close()
            body = content.encode() if isinstance(content, str) else content
            sent = bytes([255 - body[0]]) + body[1:] if handler.trouble == "damaged" else body[: len(body) // 2]
            handler.send_response(self.status.value)
            handler.send_header("Content-Length", str(len(body if handler.trouble == "cut" else sent)))
            handler.end_headers()
            handler.wfile.write(sent)
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
    monkeypatch.setattr("cache.store.files.spool_folder", lambda: tmp_path / "scratch")
    forget_forkserver()
    GCSFileSystem.clear_instance_cache()
    google_server.reset()
    google_server.storage.create_bucket(BUCKET, {"name": BUCKET})
    yield google_server
    google_server.reset()
    google_server.storage.wipe(False)
    GCSFileSystem.clear_instance_cache()
