"""The server of `latentpress ui`: listens, and answers requests until a signal stops it."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

import h11
import uvicorn
from starlette.responses import RedirectResponse
from starlette.routing import Mount
from uvicorn.protocols.http.h11_impl import H11Protocol

from schemas.errors import USAGE, LatentpressError
from schemas.interruption import StopHandler
from stages.pages.ui import captions_page, documents, flow_page, pictures_page, queue_page, records, settings_page
from stages.pages.ui.app import build_app, get, serve_file
from stages.pages.ui.guard import Guard, Token, list_names, make_login_route
from stages.pages.ui.places import Places, make_folders_route
from stages.pages.ui.projects import BASE, PROJECTS_PATH, Projects, make_overview_page
from stages.pages.ui.proposals import Proposals, make_import_page, make_new_project_page, make_proposal_routes

#: The pages of a project, in the order of the navigation.
PAGES = (
    flow_page.PAGE,
    pictures_page.PAGE,
    queue_page.PAGE,
    settings_page.PAGE,
    captions_page.PAGE,
    *records.PAGES,
    *documents.PAGES,
)
MAX_REQUESTS = 200  # at the same time
MAX_CONNECTIONS = 50  # at the same time, from one address
REQUEST_S = 20.0  # longest time in which a request has to arrive completely
CLOSE_S = 2  # seconds that requests have to end when the server stops


class CannotListen(LatentpressError):
    """Raised if an address is in use, or is not an address of this machine."""

    exit_code = USAGE


def open_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        step = "choose another --port (0: any free port) or --host; another `latentpress ui` may use this port"
        raise CannotListen(f"can't listen at {host}, port {port}: {error.strerror or error}", step) from error


def build_guarded_app(
    projects: Projects,
    places: Places,
    proposals: Proposals,
    host: str,
    port: int,
    token: Token | None,
    more_names: Sequence[str] = (),
) -> Guard:
    cookie = f"latentpress-ui-{port}"
    extra = [
        serve_file("/style.css", "style.css"),
        serve_file("/script.js", "ui.js"),
        serve_file("/charts.js", "charts.js"),
        documents.route(projects.sites),
    ]
    extra += [make_login_route(token, cookie)] if token else []
    extra += [make_folders_route(places), *make_proposal_routes(projects, proposals)]
    pages = (
        make_overview_page(projects),
        make_new_project_page(projects, places, proposals),
        make_import_page(projects, places, proposals),
    )
    app = build_app(pages, extra=[*extra, Mount(f"{BASE}/{{name}}", app=projects.answer)])
    if projects.top is None:
        app.router.routes.append(get("/", lambda request: RedirectResponse(PROJECTS_PATH, 303)))
    else:
        app.router.routes.append(Mount("", app=projects.top.app))
    return Guard(app, list_names(host, more_names), token, cookie)


class _Server(uvicorn.Server):
    """A server that does not install signal handlers: the program handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """A connection that is closed when a request takes longer than REQUEST_S to arrive. If an address has more than
    MAX_CONNECTIONS, a new connection replaces its oldest connection that waits for a request, so that it can't lock
    itself out. If there are MAX_REQUESTS connections, a new connection replaces the oldest waiting one of all
    addresses."""

    _ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_limit()
        connections = [connection for connection in self.connections if isinstance(connection, _Protocol)]
        same_address = [connection for connection in connections if _address(connection) == _address(self)]
        crowd = connections if len(connections) >= MAX_REQUESTS else []
        crowd = same_address if len(same_address) > MAX_CONNECTIONS else crowd
        if waiting := [(connection._ending.when(), connection) for connection in crowd if connection._ending]:
            _, oldest = min(waiting, key=lambda pair: pair[0])
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._ending is not None:
            self._ending.cancel()

    def _set_limit(self) -> None:
        """Start the timer while a request is awaited or received, and cancel it while the request is answered."""
        is_coming = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_coming and self._ending is None:
            self._ending = self.loop.call_later(REQUEST_S, self.transport.abort)
        elif not is_coming and self._ending is not None:
            self._ending.cancel()
            self._ending = None


def _address(connection: _Protocol) -> str:
    return connection.client[0] if connection.client else ""


def make_server(app: Guard) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=_Protocol,
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
    """Answer requests until a signal stops the server, and return the signal's name. Programs that the page started
    continue to run."""

    def stop() -> None:
        server.should_exit = True

    stop_handler = StopHandler(None, stop)
    with stop_handler.stop_on_signals(), listener:
        server.run(sockets=[listener])
    return stop_handler.reason
