"""A server of S3 (moto's) on loopback, which counts requests and answers some of them as a store in trouble would."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from tests.background import served
from tests.processes import other_forkserver

BUCKET = "store"
_TIMES = "<RequestTime>20150830T123600Z</RequestTime><ServerTime>2015-08-30T14:36:05Z</ServerTime>"
ERRORS = {
    "throttled": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "no bucket": ("404 Not Found", "NoSuchBucket", "The specified bucket does not exist"),
    "skewed": ("403 Forbidden", "RequestTimeTooSkewed", f"It is too large.</Message>{_TIMES}<Message>"),
    "broken": ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
}


def _half(body: bytes) -> bytes:
    return body[: len(body) // 2]


BODY_FAULTS: dict[str, Callable[[bytes], bytes]] = {
    **dict.fromkeys(("cut", "short"), _half),
    "long": lambda body: body + body,
    "damaged": lambda body: bytes(255 - byte if at % 64 == 0 else byte for at, byte in enumerate(body)),
}


@dataclass(frozen=True)
class Request:
    """operation: its name in S3's API. key: key or prefix of the objects."""

    operation: str
    key: str


class S3Server:
    """`answer(request)` names the fault of a request; "" lets it pass. Faults: one of ERRORS, "cut" (the connection
    ends in the middle of the body), "short" (half of the body, as if that were all), "long" (more than all), "damaged"
    (some bytes are others), "dropped" (no answer) or "lost" (it is done, and there is no answer). Operations have their
    names in S3's API."""

    def __init__(self, app: Callable) -> None:
        self._app, self.url = app, ""
        self.reset()

    def reset(self) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], str] = lambda request: ""

    def counts(self) -> Counter[str]:
        return Counter(request.operation for request in self.requests)

    def fail(self, kind: str, times: int, *operations: str, key: str = "") -> None:
        """The next `times` requests of these operations (default: all), about keys that hold `key`, go wrong."""
        left = [kind] * times

        def answer(request: Request) -> str:
            wanted = (not operations or request.operation in operations) and key in request.key
            return left.pop() if wanted and left else ""

        self.answer = answer

    @property
    def backend(self) -> Any:
        """moto's objects, for what is not a request that counts."""
        from moto.s3.models import s3_backends

        return s3_backends["123456789012"]["aws"]

    def make_bucket(self, name: str) -> None:
        self.backend.create_bucket(name, "us-east-1")

    def put(self, key: str, data: bytes = b"", bucket: str = BUCKET) -> None:
        self.backend.put_object(bucket, key, data)

    def get(self, key: str, bucket: str = BUCKET) -> bytes:
        return self.backend.get_object(bucket, key).value

    def clear(self) -> None:
        self.backend.reset()

    def __call__(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        request = _describe(environ)
        self.requests.append(request)
        trouble = self.answer(request)
        if request.operation.startswith("Head") and trouble in BODY_FAULTS:  # its answer has no body
            trouble = ""
        if trouble == "dropped":
            raise ConnectionError
        if trouble in ERRORS:
            status, code, message = ERRORS[trouble]
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [] if request.operation.startswith("Head") else [body]
        if not trouble:
            return self._app(environ, start_response)
        started: list[Any] = []
        body = b"".join(self._app(environ, lambda *args: started.extend(args)))
        if trouble == "lost":
            raise ConnectionError
        headers = [(name, value) for name, value in started[1] if name.lower() != "content-length"]
        kept = BODY_FAULTS.get(trouble, bytes)(body)
        start_response(started[0], [*headers, ("Content-Length", str(len(body if trouble == "cut" else kept)))])
        return _cut(kept) if trouble == "cut" else [kept]


def _cut(kept: bytes) -> Iterator[bytes]:
    yield kept
    raise ConnectionError


def _describe(environ: dict[str, Any]) -> Request:
    method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    _, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    if method == "GET" and not key:
        operation = "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
        return Request(operation, query.get("prefix", [""])[0])
    special = {
        ("POST", "uploads"): "CreateMultipartUpload",
        ("POST", "uploadId"): "CompleteMultipartUpload",
        ("PUT", "uploadId"): "UploadPart",
        ("DELETE", "uploadId"): "AbortMultipartUpload",
        ("GET", "uploadId"): "ListParts",
    }
    for (verb, name), operation in special.items():
        if method == verb and name in query:
            return Request(operation, key)
    what = "Object" if key else "Bucket"
    return Request(method.capitalize() + what, key)


@contextmanager
def serve_s3(address: str = "127.0.0.1") -> Iterator[S3Server]:
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def log(self, *args: Any) -> None:
            pass

        def connection_dropped(self, *args: Any) -> None:
            self.close_connection = True

    app = S3Server(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server(address, 0, app, threaded=True, request_handler=Quiet)
    app.url = f"http://{address}:{server.port}"
    with served(server):
        yield app


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """The server with an empty bucket BUCKET; programs, also in other processes, find it by the environment."""
    environment = {
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-not-a-real-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "NO_PROXY": "*",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3_server.make_bucket(BUCKET)
    s3_server.reset()
    with other_forkserver():
        yield s3_server
    s3_server.reset()
    s3_server.clear()
