"""Threads beside a test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import BaseServer


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
