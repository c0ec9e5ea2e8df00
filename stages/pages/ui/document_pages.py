"""The report of the run, and the pages of the plan and of the preview: shown in a frame, and again when they change."""

import time
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cache.runs.training_run import METRICS_FILE
from schemas.cli.report import Report
from stages.pages.ui.app import Page, fragment, get, render, site_of
from stages.pages.ui.cards import AT_WORK, build_cards, build_job_card
from stages.pages.ui.documents import document_url, version
from stages.pages.ui.site import Site

MOST_LISTED = 50
WHAT = {
    "report": "one page of the run: curves, samples, data, costs, settings",
    "preview-plan": "what would be encoded, before it is",
    "preview": "what was encoded, beside the originals",
}


def list_documents(site: Site, job: str) -> list[Path]:
    """Of the configuration's run, or of its plans, the newest first."""
    if job == "report":
        own = site.config().run_folder / "report.html"
        found = [own, *site.output.glob("report.html"), *site.output.glob("*/report.html")]
        return [path for path in dict.fromkeys(found) if path.is_file()][:MOST_LISTED]
    pattern = "plan-*.html" if job == "preview-plan" else "latents-*.html"
    pages = [path for path in (site.output / "preview").glob(pattern) if path.is_file()]
    return sorted(pages, key=lambda path: -path.stat().st_mtime)[:MOST_LISTED]


def _show(request: Request, job: str) -> Response:
    site = site_of(request)
    found = list_documents(site, job)
    names = [path.relative_to(site.output).as_posix() for path in found]
    wanted = request.query_params.get("page", "")
    chosen = found[names.index(wanted)] if wanted in names else found[0] if found else None
    return render(
        request,
        "document.html",
        title={"report": "Report", "preview-plan": "Plan", "preview": "Preview"}[job],
        card=build_job_card(job, WHAT[job], site.programs),
        names=names,
        chosen=chosen.relative_to(site.output).as_posix() if chosen else "",
        url=document_url(site, chosen) if chosen else "",
        made=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(chosen.stat().st_mtime)) if chosen else "",
        version=version(chosen) if chosen else "",
        is_due=not found and _is_due(site, job),
    )


def _is_due(site: Site, job: str) -> bool:
    """Whether what a page shows is there, so that it can be made now; not of clips or beside other programs where an
    autoencoder has to decode it, and not again where it was stopped or has failed."""
    start, config = site.programs.last_start(job), site.config()
    if site.config_error is not None or (start is not None and start.exit_code != 0):
        return False
    if job == "report":
        return (config.run_folder / METRICS_FILE).exists()
    status = site.status()
    if not isinstance(status, Report):
        return False
    done = {row["stage"]: row["done"] for row in status.details["stages"]}
    if job == "preview-plan":
        return done.get("bucket", 0) > 0
    at_work = any(card.state in AT_WORK for step in build_cards(config, site.programs, status) for card in step)
    return done.get("encode-latents", 0) > 0 and not (at_work or config.model.family_spec.video)


def _show_card(request: Request, job: str) -> Response:
    site = site_of(request)
    return fragment(
        "job_card.html", card=build_job_card(job, WHAT[job], site.programs), made=bool(list_documents(site, job))
    )


def _show_version(request: Request, job: str) -> Response:
    """Of the shown document, or of the one that there is now."""
    site = site_of(request)
    found = list_documents(site, job)
    names = [path.relative_to(site.output).as_posix() for path in found]
    wanted = request.query_params.get("page") or (names[0] if names else "")
    return JSONResponse({"version": version(found[names.index(wanted)]) if wanted in names else ""})


def _page(title: str, job: str) -> Page:
    path = f"/{title.lower()}"
    handlers = {"": _show, "/card": _show_card, "/version": _show_version}
    return Page(title, path, tuple(get(path + more, partial(show, job=job)) for more, show in handlers.items()))


PLAN, PREVIEW, REPORT = _page("Plan", "preview-plan"), _page("Preview", "preview"), _page("Report", "report")
