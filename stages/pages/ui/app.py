"""The web application: pages, and the functions that their handlers share.

A page is a module with a `PAGE`: its place in the navigation and its routes. Handlers are ordinary functions that run
in threads. Handlers that change something are made by `action`, so that they work with and without a script.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from cache.runs.training_run import read_metrics, run_at_work
from cache.runs.validations import best_steps
from cache.store.store import Store
from schemas.cli.console import Options, Report
from schemas.config.loading import ConfigError, load_config
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import split_lines
from stages.maintenance.rejected_items import RejectedItem, list_rejected_items
from stages.pages.charts import Chart, build_charts
from stages.pages.html import TEMPLATES, render_template
from stages.pages.thumbnails import ThumbnailFiles
from stages.pages.ui.child_programs import ChildPrograms

MAX_FORM_BYTES = 4 << 20
DOCUMENTS = "/documents/"  # files under the output folder: their addresses contain a separate key
Form = Mapping[str, str]
Value = TypeVar("Value")
Handler = Callable[[Request], Response]
LOCAL_S, REMOTE_S = 2.0, 30.0  # seconds between two listings of the root: of a folder, of an object store
FIRST_WAIT_S = 3.0  # longest time that the first page waits for the first status
MIN_PAUSE_FACTOR = 3  # listing takes at most a quarter of the time
DRAWING_PAUSE_FACTOR = 50  # reading metrics and drawing take at most 2 % of the time


class MetricsHistory:
    """The losses of a metrics.jsonl as charts. Reading and drawing take at most 2 % of the time."""

    def __init__(self) -> None:
        self._path, self._next_draw_s = Path(), 0.0
        self._drawing: tuple[list[Chart], Mapping[str, Any], Sequence[Mapping[str, Any]]] = ([], {}, ())

    def draw(self, path: Path) -> tuple[list[Chart], Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        """Returns (charts with curves, metrics of the last step, best steps). For a long run, they may be some time
        old."""
        began = time.monotonic()
        if self._path != path or began > self._next_draw_s:
            lines = read_metrics(path)
            charts = [chart for chart in build_charts([("", lines)], ("loss", "eval")) if chart.curves]
            last: Mapping[str, Any] = next((line for line in reversed(lines) if "loss" in line), {})
            self._path, self._drawing = path, (charts, last, best_steps(path.parent))
            ended = time.monotonic()
            self._next_draw_s = ended + (ended - began) * DRAWING_PAUSE_FACTOR
        return self._drawing


class Listing(Generic[Value]):
    """The result of `make` for a root. While `read` is called, it is made again in the background, which takes at most
    a quarter of the time."""

    def __init__(self, root: str, make: Callable[[Config], Value]) -> None:
        self._make, self._is_remote, self._lock = make, "://" in root, threading.Lock()
        self._value: Value | LatentpressError | None = None
        self._thread: threading.Thread | None = None
        self._made_s, self._took_s = -math.inf, 0.0

    def read(self, config: Config, wait_s: float | None = None) -> Value | LatentpressError | None:
        """Returns the newest result, or the error that `make` raised. wait_s: longest time to wait for the first
        result, by default without a limit; None is returned if it does not exist by then."""
        with self._lock:
            pause_s = max(REMOTE_S if self._is_remote else LOCAL_S, self._took_s * MIN_PAUSE_FACTOR)
            if self._thread is None and time.monotonic() - self._made_s > pause_s:
                self._thread = threading.Thread(target=self._build, args=(config,), daemon=True)
                self._thread.start()
            thread, is_first = self._thread, self._value is None
        if is_first and thread is not None:
            thread.join(wait_s)
        return self._value

    def _build(self, config: Config) -> None:
        began = time.monotonic()
        value: Value | LatentpressError
        try:
            value = self._make(config)
        except LatentpressError as error:
            value = error
        except Exception as error:  # the page has to show the error: nobody sees this thread's traceback
            value = LatentpressError(f"status failed: {error!r}", "run `latentpress status` to see the whole error")
        with self._lock:
            self._value, self._thread, self._made_s = value, None, time.monotonic()
            self._took_s = self._made_s - began


class Site:
    """A project. build_status: function that makes the report of `latentpress status`. base: prefix of the paths of the
    project's pages."""

    def __init__(
        self, config: Config, options: Options, build_status: Callable[[Config], Report], base: str = ""
    ) -> None:
        self.base = base
        self.options, self._config, self._version = options, run_at_work(config), read_version(options.config)
        self.output, self.root = Path(config.output), config.root
        argv = Options(options.config.absolute(), options.overrides, device=options.device, workers=options.workers)
        self.programs = ChildPrograms(self.output, argv.argv())
        self.document_key = secrets.token_urlsafe(16)  # in the addresses of documents
        self.config_error: LatentpressError | None = None
        self.metrics, self.thumbnails = MetricsHistory(), ThumbnailFiles(self.output)
        self._lock, self._status = threading.Lock(), Listing(self.root, build_status)
        self._rejects = Listing(self.root, lambda config: list_rejected_items(Store(config.root), config))

    def config(self) -> Config:
        """The current configuration, read again if the file has changed. If the file is not valid, the last valid
        configuration is returned, and `config_error` has the error."""
        with self._lock:
            version = read_version(self.options.config)
            if version != self._version:
                self._version, self.config_error = version, None
                try:
                    config = load_config(self.options.config, self.options.overrides)
                    if (Path(config.output), config.root) == (self.output, self.root):
                        self._config = run_at_work(config)
                    else:
                        message = f"{self.options.config} has a different root or output than this page"
                        self.config_error = ConfigError([message], "start `latentpress ui` again to show them")
                except LatentpressError as error:
                    self.config_error = error
            return self._config

    def status(self, wait_s: float = FIRST_WAIT_S) -> Report | LatentpressError | None:
        """The newest status, or the error that was raised. wait_s: longest time to wait for the first status; None is
        returned if it does not exist by then."""
        return self._status.read(self.config(), wait_s)

    def list_rejects(self) -> Sequence[RejectedItem]:
        """List the rejected items. Raises the errors of `list_rejected_items`."""
        rejects = self._rejects.read(self.config())
        if isinstance(rejects, LatentpressError):
            raise rejects
        return rejects or ()

    def make_address(self, path: Path) -> str:
        """The address of a file under the output folder. It changes when the file is written again."""
        name = quote(path.relative_to(self.output).as_posix())
        return f"{DOCUMENTS}{self.document_key}/{name}?version={read_version(path)}"


def read_version(path: Path | None) -> str:
    """An identifier of a file's content, which changes when the file is written again; "" if the file does not
    exist."""
    with suppress(OSError):
        if path is not None:
            about = path.stat()
            return f"{about.st_mtime_ns:x}-{about.st_size:x}-{about.st_ino:x}"
    return ""


@dataclass(frozen=True)
class Page:
    """A page. title: name in the navigation. path: address that the navigation links to."""

    title: str
    path: str
    routes: tuple[BaseRoute, ...]


@dataclass(frozen=True)
class Moved:
    """The address of the page that an action made, to which the browser is sent. The action's form is sent without the
    script (data-plain)."""

    address: str


def build_app(pages: Sequence[Page], site: Site | None = None, extra: Sequence[BaseRoute] = ()) -> Starlette:
    """Make the application with the pages of a project, or with the pages outside of projects if `site` is None. extra:
    further routes."""
    routes = [route for page in pages for route in page.routes]
    app = Starlette(routes=[*routes, *extra], exception_handlers={HTTPException: _explain_http})
    app.state.site, app.state.pages = site, tuple(pages)
    return app


def site_of(request: Request) -> Site:
    site = request.app.state.site
    assert site is not None  # only pages of a project call this function
    return site


def get(path: str, handler: Handler) -> Route:
    """A route that shows something."""
    return Route(path, handler, methods=["GET"])


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Answer with a page made from templates/, in which every value is escaped."""
    site: Site | None = request.app.state.site
    base = _base(request)
    common = {"pages": request.app.state.pages, "path": request.url.path.removeprefix(base), "base": base}
    common |= {"run": "", "config_path": "", "config_error": None}
    if site is not None:
        common["run"] = site.config().run_name
        common |= {"config_path": str(site.options.config), "config_error": site.config_error}
    return fragment(template, status, **{**common, **values})


def _base(request: Request) -> str:
    """The prefix of the paths in the page's navigation."""
    site: Site | None = request.app.state.site
    return "" if site is None else site.base


def fragment(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Answer with a part of a page, with which the script replaces the previous version of this part."""
    return HTMLResponse(b"".join(render_template(template, **values)), status)


def serve_file(path: str, name: str) -> Route:
    """A route to a stylesheet or script of templates/."""
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return get(path, lambda request: PlainTextResponse((TEMPLATES / name).read_text(), media_type=kind))


def action(
    path: str,
    act: Callable[[Request, Form], str | Moved],
    return_path: str = "/",
    again: Callable[[Request, Form, LatentpressError], Response] | None = None,
) -> Route:
    """A route that changes something. act: function that gets the request and the form's fields; it returns a message
    about the change, or the address of a new page. return_path: path to which a browser without a script is sent
    afterwards. An error is shown with its next step. again: function that shows the form again, with an error."""

    async def handle(request: Request) -> Response:
        form = await read_form(request)
        as_json = "application/json" in request.headers.get("accept", "")
        try:
            result = await run_in_threadpool(act, request, form)
        except LatentpressError as error:
            refusal = {"error": error.message, "next_step": error.next_step}
            if as_json:
                return JSONResponse(refusal, 409)
            if again is not None:
                return await run_in_threadpool(again, request, form, error)
            values = {"title": "Refused", "back": _base(request) + return_path, **refusal}
            return await run_in_threadpool(render, request, "refused.html", 409, **values)
        if isinstance(result, Moved):
            return RedirectResponse(result.address, 303)
        return JSONResponse({"message": result}) if as_json else RedirectResponse(_base(request) + return_path, 303)

    return Route(path, handle, methods=["POST"])


async def read_form(request: Request) -> Form:
    """The fields of an ordinary form. If a name occurs more than once, its last value is used."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_FORM_BYTES:
                raise HTTPException(413, f"a form may have at most {MAX_FORM_BYTES} bytes")
    except ClientDisconnect as error:
        raise HTTPException(400, "the form was not received completely") from error
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=10_000)
    except ValueError as error:
        raise HTTPException(400, "the request is not a form") from error
    return {name: values[-1] for name, values in fields.items()}


def parse_first_item(query: Mapping[str, str], count: int) -> int:
    """The index of the first item on a page of a list with `count` items: the query parameter "first", or 0."""
    first = query.get("first", "")
    return min(int(first), count) if first.isdecimal() and len(first) < 10 else 0


def lines_of(form: Form, name: str) -> list[str]:
    """The lines of a field, without empty lines."""
    return split_lines(form.get(name, ""))


def _explain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}.\n", error.status_code)
