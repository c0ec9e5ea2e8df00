"""A stand-in for the part of the Hugging Face Hub that takes models, on loopback: repositories, uploads, commits."""

import base64
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.background import answered

TOKEN = "hf_s3cretTokenOfTheHub"
LIMIT = 1000  # bytes of a file that a commit holds itself


@dataclass
class Repository:
    private: bool
    head: str = "0" * 40
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@dataclass
class ModelHub:
    """answer(method, path) -> a status instead of the answer, "cut", or 0. xet: the folder of hf_xet's local store;
    None: large files come by LFS. stored: large files by their SHA-256."""

    url: str = ""
    xet: Path | None = None
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    answer: Callable[[str, str], int | str] = lambda method, path: 0

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        about = {"url": f"{self.url}/{name}", "name": name, "id": name}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo"} | about
        private = asked.get("private", asked.get("visibility") == "private")
        self.repositories[name] = Repository(bool(private))
        return 200, about

    def commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        repository = self.repositories[name]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", repository.head) != repository.head:
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.stored.get(value["oid"], b"")
                assert value["size"] > LIMIT and (self.xet or repository.files[value["path"]])
        repository.messages.append(header["summary"])
        repository.head = hashlib.sha1(repository.head.encode()).hexdigest()
        return 200, {"success": True, "commitOid": repository.head, "commitUrl": f"{self.url}/{name}/commit/x"}

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.stored[found[1]] = body
            return 200, {}
        found = re.match(r"(?:/api/models)?/([^/]+/[^/.]+)(.*)", path)
        if found is None or found[1] not in self.repositories:
            return 404, {"error": "Repository not found"}
        name, rest = found[1], found[2]
        repository = self.repositories[name]
        if not rest:
            return 200, {"id": name, "modelId": name, "private": repository.private, "sha": repository.head}
        if rest.startswith("/preupload/"):
            modes = [
                {"path": it["path"], "uploadMode": "lfs" if it["size"] > LIMIT else "regular", "shouldIgnore": False}
                for it in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if rest == ".git/info/lfs/objects/batch":
            asked = json.loads(body)["objects"]
            rows = [
                {**it, "actions": {"upload": {"href": f"{self.url}/lfs/{it['oid']}", "header": {}}}} for it in asked
            ]
            return 200, {"transfer": "basic", "objects": rows}
        if "/xet-write-token/" in rest:
            return 200, {"accessToken": "t", "exp": int(time.time()) + 3600, "casUrl": f"local://{self.xet}"}
        if rest.startswith("/commit/"):
            return self.commit(name, [json.loads(line) for line in body.splitlines()])
        return 404, {"error": "not found"}


@contextmanager
def serve_models() -> Iterator[ModelHub]:
    app = ModelHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            app.requests.append(f"{self.command} {path}")
            app.tokens.add(self.headers.get("Authorization"))
            wanted = app.answer(self.command, path)
            if wanted == "cut":
                self.close_connection = True
                return
            status, content = app.reply(self.command, path, body) if not wanted else (int(wanted), {"error": "no"})
            reply, headers = json.dumps(content).encode(), {}
            if status == 404 and "Repository" in content.get("error", ""):
                headers["X-Error-Code"] = "RepoNotFound"
            if "casUrl" in content:
                headers |= {"X-Xet-Cas-Url": content["casUrl"], "X-Xet-Access-Token": "t"}
                headers["X-Xet-Token-Expiration"] = str(content["exp"])
            self.send_response(status)
            for key, value in {
                **headers,
                "Content-Type": "application/json",
                "Content-Length": str(len(reply)),
            }.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_PUT = handle_request

    with answered(Handler) as app.url:
        yield app


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, token: str) -> None:
    """In place of the real one, in this process and in those that it starts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    for name, value in {"HF_ENDPOINT": url, "HF_TOKEN": token, "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """The hub without a repository; large files come by LFS. Its token is in the environment."""
    from huggingface_hub import constants

    with serve_models() as hub:
        use_hub(monkeypatch, hub.url, TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf-home/token"))
        yield hub


def branch_that_moves(folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], Path]:
    """A repository in a local cache, offline, with the files of a folder: what a fingerprint says of its weights, and
    the file that says which commit the branch is at."""
    repo, weights = (
        hub / "models--someone--a-branch-that-moves",
        {"repo": "someone/a-branch-that-moves", "commit": "a" * 40},
    )
    shutil.copytree(folder, repo / "snapshots" / weights["commit"])
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(weights["commit"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return weights, repo / "refs" / "main"
