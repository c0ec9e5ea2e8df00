"""The first page: the stages as a flow, with their buttons; what runs is drawn again every two seconds."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import LatentpressError
from stages.pages.ui.app import Form, Page, action, fragment, get, render, site_of
from stages.pages.ui.cards import build_cards, build_run_card
from stages.pages.ui.child_programs import Refused
from stages.pages.ui.jobs import JOBS
from stages.pages.ui.site import Site

DONE_WORDS = {
    "start": "{} was started",
    "stop": "{} was told to stop; it keeps what is done",
    "restart": "{} starts again as soon as it has stopped",
    "kill": "{} was killed",
}


def show(request: Request) -> Response:
    return render(request, "flow.html", title="Stages", **_content(site_of(request)))


def show_cards(request: Request) -> Response:
    return fragment("cards.html", **_content(site_of(request)))


def _content(site: Site) -> dict[str, Any]:
    config, status = site.config(), site.status()
    problem = status if isinstance(status, LatentpressError) else None
    steps = build_cards(config, site.programs, status)
    whole = build_run_card(site.programs, steps, status is not None and problem is None)
    return {"whole": whole, "steps": steps, "problem": problem, "reading": status is None}


def act(request: Request, form: Form) -> str:
    site, name, verb = site_of(request), request.path_params["job"], request.path_params["verb"]
    if name not in JOBS or verb not in DONE_WORDS:
        raise HTTPException(404, f"there is no {verb} of {name}")
    site.config()
    if site.config_error is not None and verb in ("start", "restart"):
        raise Refused(f"the configuration is not valid: {site.config_error.message}", "correct it first")
    getattr(site.programs, verb)(name)
    return DONE_WORDS[verb].format(name)


PAGE = Page("Stages", "/", (get("/", show), get("/cards", show_cards), action("/jobs/{job}/{verb}", act)))
