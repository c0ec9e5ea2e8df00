"""Servers on loopback that media are offered at, and pictures."""

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from cache.store.buckets import Buckets
from tests.background import answered
from tests.s3_server import S3Server

PASSWORD = "password-within-a-url"
NO_PROXY = "*"


@pytest.fixture
def media(s3: S3Server) -> S3Server:
    """The server with an empty bucket `media`."""
    Buckets.clear_instance_cache()
    s3.make_bucket("media")
    return s3


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


class Ranged(BaseHTTPRequestHandler):
    """Serves `content` with ranges, or (`ranges` off) whole whatever is asked for; to one user only, if `user`."""

    content, ranges, length, authorization = b"", True, True, ""
    served: int = 0

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        cls = type(self)
        if cls.authorization and self.headers.get("Authorization") != cls.authorization:
            self.send_error(403)
            return
        data, requested_range = cls.content, self.headers.get("Range")
        if requested_range and cls.ranges:
            first, _, last = requested_range.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{len(cls.content)}")
        else:
            self.send_response(200)
        if cls.length:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"' + hashlib.sha1(cls.content).hexdigest() + '"')
        self.end_headers()
        if body:
            cls.served += len(data)
            self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Ranged]]]:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("NO_PROXY", NO_PROXY)
    handler = type("Handler", (Ranged,), {})
    with answered(handler) as url:
        yield url.removeprefix("http://"), handler


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """serve(folder) -> host and port of a web server that shows it, without ranges."""
    monkeypatch.setenv("NO_PROXY", NO_PROXY)
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(answered(partial(Quiet, directory=str(folder)))).removeprefix(
            "http://"
        )


@pytest.fixture(scope="session")
def photo() -> Callable[..., bytes]:
    """photo(number, size=(64, 64)) -> a JPEG like no other."""

    def make(number: int, size: tuple[int, int] = (64, 64)) -> bytes:
        colors = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(colors).resize(size, Image.Resampling.BICUBIC).save(out, "JPEG")
        return out.getvalue()

    return make
