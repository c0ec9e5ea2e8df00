"""Threads and programs beside a test."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer

LIMIT_S = 240.0


def until(happened: Callable[[], object], what: str = "it") -> None:
    """Return once it has happened. what: named where it does not."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < LIMIT_S, f"{what} did not happen within {LIMIT_S:g} s"
        time.sleep(0.02)


@contextmanager
def served(server: BaseServer) -> Iterator[None]:
    """Requests are answered until the block ends; then the server is closed."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def answered(handler: Callable[..., BaseHTTPRequestHandler], address: str = "127.0.0.1") -> Iterator[str]:
    """HTTP requests are answered by `handler` until the block ends: the URL of a free port."""
    server = ThreadingHTTPServer((address, 0), handler)
    with served(server):
        yield f"http://{address}:{server.server_port}"


@contextmanager
def repeated(call: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Calls again and again until the block ends, `pause_s` seconds after each call."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(pause_s):
            call()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
