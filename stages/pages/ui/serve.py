"""Listens, and answers until it is told to stop."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from schemas.cli.interruption import StopHandler
from schemas.errors import USAGE, LatentpressError
from stages.pages.ui import config_page, document_pages, documents, flow_page, log_page, set_aside_page
from stages.pages.ui.app import build_app
from stages.pages.ui.guard import Guard, Token, list_names
from stages.pages.ui.login import login_routes
from stages.pages.ui.site import Site

#: In the order of the navigation.
PAGES = (
    flow_page.PAGE,
    config_page.PAGE,
    set_aside_page.PAGE,
    log_page.PAGE,
    document_pages.PLAN,
    document_pages.PREVIEW,
    document_pages.REPORT,
)
MAX_REQUESTS = 200  # at a time
CLOSE_S = 2  # that requests have to end


class CannotListen(LatentpressError):
    """The address is taken, or is none of this machine's."""

    exit_code = USAGE


def open_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        step = "choose another --port (0: a free one) or --host; another page of `latentpress ui` may be there already"
        raise CannotListen(f"can't listen at {host}, port {port}: {error.strerror or error}", step) from error


def guarded_app(site: Site, host: str, port: int, token: Token | None, more_names: Sequence[str]) -> Guard:
    cookie = f"latentpress-ui-{port}"
    extra = [*documents.ROUTES, *(login_routes(token, cookie) if token else ())]
    return Guard(build_app(site, PAGES, extra), list_names(host, more_names), token, cookie)


class _Server(uvicorn.Server):
    """Leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Guard) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        limit_concurrency=MAX_REQUESTS,
        timeout_graceful_shutdown=CLOSE_S,
        proxy_headers=False,
    )
    return _Server(config)


def answer_until_stopped(server: uvicorn.Server, listener: socket.socket) -> str:
    """What stopped it: a signal. Programs that it started go on."""

    def stop() -> None:
        server.should_exit = True

    stop_handler = StopHandler(None, stop)
    with stop_handler.stop_on_signals(), listener:
        server.run(sockets=[listener])
    return stop_handler.reason
