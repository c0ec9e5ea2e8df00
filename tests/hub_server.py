"""A stand-in for the part of the Hugging Face Hub that serves buckets, on loopback. Bytes are stored by hf_xet itself,
into a folder (its local store); the stand-in has the hub's HTTP interface, as huggingface_hub asks it."""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.background import answered
from tests.processes import forget_forkserver

BUCKET = "me/store"
#: In place of a status: half of the answer, and then the connection is closed; half, as if that were all.
CUT, SHORT = -1, -2


def now() -> str:
    return datetime.now(UTC).strftime("%FT%TZ")


class HubServer:
    """answer(method, path) -> the HTTP status that a request gets instead of its answer, 0 to let it pass, or CUT or
    SHORT. retry_after: seconds that a 429 asks to wait."""

    def __init__(self, place: Path) -> None:
        self.place, self.page, self.url = place, 1000, ""
        self.files: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.retry_after = 0
        self.answer: Callable[[str, str], int] = lambda method, path: 0

    def entry(self, path: str) -> dict[str, Any]:
        added = self.files[path]
        return {"type": "file", "path": path, "size": added["size"], "xetHash": added["xetHash"], "uploadedAt": now()}

    def content(self, added: dict[str, Any]) -> bytes:
        from hf_xet import XetFileInfo, XetSession

        with tempfile.TemporaryDirectory() as folder:
            group = XetSession().new_file_download_group(
                token_refresh_url=f"{self.url}/api/buckets/{BUCKET}/xet-read-token", token_refresh_headers={}
            )
            with group:
                group.start_download_file(XetFileInfo(added["xetHash"]), f"{folder}/a")
            return Path(folder, "a").read_bytes()


class HubHandler(BaseHTTPRequestHandler):
    app: HubServer
    protocol_version = "HTTP/1.1"
    is_cut = is_short = False

    def log_message(self, *args: Any) -> None:
        pass

    def send(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        body = body[: len(body) // 2] if self.is_short else body
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.is_cut else body)
        self.close_connection |= self.is_cut

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if not self.refused():
            if "/xet-" in path:
                token = {"accessToken": "t", "exp": int(time.time()) + 3600, "casUrl": f"local://{self.app.place}"}
                names = {"X_Xet_Cas_Url": token["casUrl"], "X_Xet_Access_Token": "t"}
                self.send(token, **names, X_Xet_Token_Expiration=str(token["exp"]))
            elif found := re.fullmatch(f"/api/buckets/{BUCKET}/tree(?:/(.*))?", path):
                self.list(found[1] or "", int(parse_qs(url.query).get("cursor", ["0"])[0]))
            elif path == f"/api/buckets/{BUCKET}":
                about = {"id": BUCKET, "private": True, "createdAt": now(), "size": 0, "totalFiles": 0}
                self.send(about)
            elif (key := path.removeprefix(f"/buckets/{BUCKET}/resolve/")) in self.app.files:
                content, wanted = self.app.files[key]["content"], self.headers["Range"]
                if wanted is None:
                    self.send(content)
                else:
                    first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                    self.send(content[first : last + 1], 206)
            else:
                missing = "EntryNotFound" if BUCKET in path else "RepoNotFound"
                self.send({"error": "not found"}, 404, X_Error_Code=missing)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.refused():
            return
        if self.path == f"/api/buckets/{BUCKET}/paths-info":
            self.send([self.app.entry(path) for path in json.loads(body)["paths"] if path in self.app.files])
        elif self.path == f"/api/buckets/{BUCKET}/batch":
            for line in body.splitlines():
                asked = json.loads(line)
                if asked["type"] == "deleteFile":
                    self.app.files.pop(asked["path"], None)
                else:
                    content = self.app.content(asked)
                    self.app.files[asked["path"]] = {**asked, "content": content, "size": len(content)}
            self.send({"success": True, "failed": []})
        else:
            self.send({"error": "not found"}, 404, X_Error_Code="RepoNotFound")

    def refused(self) -> bool:
        self.app.requests.append(f"{self.command} {self.path}")
        code = self.app.answer(self.command, self.path)
        self.is_cut, self.is_short = code == CUT, code == SHORT
        if code > 0:
            wait = {"Retry_After": str(self.app.retry_after)} if code == 429 else {}
            self.send({"error": "as the test wants it"}, code, **wait)
        return code > 0

    def list(self, prefix: str, start: int) -> None:
        names = sorted(path for path in self.app.files if not prefix or path.startswith(f"{prefix}/"))
        more = {}
        if start + self.app.page < len(names):
            there = self.path.partition("?")[0]
            more["Link"] = f'<{self.app.url}{there}?recursive=true&cursor={start + self.app.page}>; rel="next"'
        self.send([self.app.entry(path) for path in names[start : start + self.app.page]], **more)


@contextmanager
def serve_hub(place: Path) -> Iterator[HubServer]:
    class Handler(HubHandler):
        app = HubServer(place)

    with answered(Handler) as Handler.app.url:
        yield Handler.app


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, token: str) -> None:
    """In place of the real one, in this process and in those that it starts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    for name, value in {"HF_ENDPOINT": url, "HF_TOKEN": token, "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub with the empty bucket BUCKET; other processes find it by the environment, which huggingface_hub reads
    when it is imported."""
    pytest.importorskip("hf_xet")
    from huggingface_hub import HfFileSystem

    (tmp_path / "hub").mkdir()
    with serve_hub(tmp_path / "hub") as server:
        use_hub(monkeypatch, server.url, "hf_test")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr("cache.store.files.spool_folder", lambda: tmp_path / "scratch")
        forget_forkserver()
        HfFileSystem.clear_instance_cache()
        yield server
        HfFileSystem.clear_instance_cache()
