"""A receiver of webhooks on loopback, which answers as a test wants it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.background import served

SECRET = "s3cret-t0ken-of-the-hook"


@dataclass
class Received:
    """A request. document: its JSON, of a multipart request that of payload_json. files: name -> (type, bytes)."""

    path: str
    headers: dict[str, str]
    document: Any
    files: dict[str, tuple[str, bytes]]
    size: int


@dataclass
class WebhookServer:
    """answer(number of the request, from 1) -> status, or "cut" or "hang"; headers: of every answer."""

    url: str = ""
    answer: Callable[[int], int | str] = lambda number: 204
    headers: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    released: bool = False  # those that hang end

    def events(self) -> list[tuple[str, int]]:
        return [(each.document["event"], each.document["step"]) for each in self.received]


def _parse(headers: dict[str, str], content: bytes) -> tuple[Any, dict[str, tuple[str, bytes]]]:
    kind = headers["content-type"]
    if not kind.startswith("multipart/form-data"):
        return json.loads(content), {}
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + content)
    document, files = None, {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        if name == "payload_json":
            document = json.loads(part.get_payload(decode=True))
        else:
            assert name == f"files[{len(files)}]"
            files[str(part.get_filename())] = (part.get_content_type(), part.get_payload(decode=True))
    return document, files


@contextmanager
def serve_webhook() -> Iterator[WebhookServer]:
    app = WebhookServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            app.received.append(Received(self.path, headers, *_parse(headers, content), len(content)))
            answer = app.answer(len(app.received))
            if answer == "hang":
                while not app.released:
                    time.sleep(0.02)
            if isinstance(answer, str):
                self.close_connection = True
                return
            self.send_response(answer)
            for name, value in {**app.headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    app.url = f"http://127.0.0.1:{server.server_port}/hooks/{SECRET}?token={SECRET}"
    with served(server):
        try:
            yield app
        finally:
            app.released = True
