"""The web application: pages, and what each of their handlers uses.

A page is a module with a `PAGE`: its place in the navigation and its routes. Handlers are ordinary functions in
threads; those that change something are made by `action`, so that the answer is alike with and without a script.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from schemas.errors import LatentpressError
from stages.pages.html import TEMPLATES, render_template
from stages.pages.ui.site import Site

MAX_FORM_BYTES = 4 << 20

Form = Mapping[str, str]
Handler = Callable[[Request], Response]


@dataclass(frozen=True)
class Page:
    """title: in the navigation. path: where it leads."""

    title: str
    path: str
    routes: tuple[BaseRoute, ...]


def build_app(site: Site, pages: Sequence[Page], extra: Sequence[BaseRoute] = ()) -> Starlette:
    routes = [route for page in pages for route in page.routes]
    files = [serve_file("/style.css", "style.css"), serve_file("/script.js", "ui.js")]
    app = Starlette(routes=[*routes, *extra, *files], exception_handlers={HTTPException: _explain_http})
    app.state.site, app.state.pages = site, tuple(pages)
    return app


def site_of(request: Request) -> Site:
    return request.app.state.site


def get(path: str, handler: Handler) -> Route:
    """A route that shows something."""
    return Route(path, handler, methods=["GET"])


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page of templates/: every value is escaped."""
    site = site_of(request)
    config = site.config()
    common = {
        "pages": request.app.state.pages,
        "path": request.url.path,
        "run": config.train.run,
        "config_path": str(site.options.config),
        "config_error": site.config_error,
    }
    return fragment(template, status, **{**common, **values})


def fragment(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A part of a page, which the script puts in the place of the one before."""
    return HTMLResponse(b"".join(render_template(template, **values)), status)


def serve_file(path: str, name: str) -> Route:
    """A route to a stylesheet or script of templates/."""
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return get(path, lambda request: PlainTextResponse((TEMPLATES / name).read_text(), media_type=kind))


def action(path: str, act: Callable[[Request, Form], str], back: str = "/") -> Route:
    """A route that changes something. act: what it does with the form's fields; returns what it did, in words. An error
    is shown with its next step. Afterwards a browser without a script is sent to `back`."""

    async def handle(request: Request) -> Response:
        form = await read_form(request)
        as_json = "application/json" in request.headers.get("accept", "")
        try:
            message = await run_in_threadpool(act, request, form)
        except LatentpressError as error:
            refusal = {"error": error.message, "next_step": error.next_step}
            if as_json:
                return JSONResponse(refusal, 409)
            return await run_in_threadpool(render, request, "refused.html", 409, title="Refused", back=back, **refusal)
        return JSONResponse({"message": message}) if as_json else RedirectResponse(back, 303)

    return Route(path, handle, methods=["POST"])


async def read_form(request: Request) -> Form:
    """The fields of an ordinary form, of which the last of a name counts."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_FORM_BYTES:
                raise HTTPException(413, f"a form may have {MAX_FORM_BYTES} bytes")
    except ClientDisconnect as error:
        raise HTTPException(400, "the form did not come whole") from error
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=10_000)
    except ValueError as error:
        raise HTTPException(400, "this is no form") from error
    return {name: values[-1] for name, values in fields.items()}


def _explain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}.\n", error.status_code)
