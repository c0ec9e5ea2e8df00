"""A receiver of apprise's JSON messages on loopback, which answers as a test wants it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.background import served

SECRET = "s3cret-t0ken-of-the-hook"


@dataclass
class WebhookServer:
    """url: in the form of apprise. answer(number of the request, from 1) -> status, or "cut" or "hang". received: the
    messages: "title", "message", and "attachments" with "base64"."""

    url: str = ""
    answer: Callable[[int], int | str] = lambda number: 204
    received: list[dict[str, Any]] = field(default_factory=list)
    released: bool = False  # requests that hang end

    def texts(self) -> list[str]:
        return [each["message"] for each in self.received]


@contextmanager
def serve_webhook() -> Iterator[WebhookServer]:
    app = WebhookServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            app.received.append(json.loads(content))
            answer = app.answer(len(app.received))
            if answer == "hang":
                while not app.released:
                    time.sleep(0.02)
            if isinstance(answer, str):
                self.close_connection = True
                return
            self.send_response(answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    app.url = f"json://127.0.0.1:{server.server_port}/hooks/{SECRET}"
    with served(server):
        try:
            yield app
        finally:
            app.released = True
