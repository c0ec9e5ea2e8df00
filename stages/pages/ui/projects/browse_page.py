"""Folders below those that may be browsed: a page of its own, from which a path is taken over into a form."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from stages.pages.ui.app import get, render
from stages.pages.ui.projects.places import Listing, NotPermitted, Places

PATH = "/folders"


def list_asked(places: Places, request: Request) -> tuple[Listing, NotPermitted | None]:
    """The folder that a request asks for, or the only root, or all of them; and why it is another one."""
    asked = request.query_params.get("at", "")
    if not asked and len(places.roots) == 1:
        asked = str(places.roots[0])
    try:
        return (places.list_folder(asked) if asked else places.list_roots()), None
    except NotPermitted as error:
        return places.list_roots(), error


def make_route(places: Places) -> BaseRoute:
    def show(request: Request) -> Response:
        listing, problem = list_asked(places, request)
        return render(request, "projects/folders.html", title="Folders", listing=listing, problem=problem)

    return get(PATH, show)
