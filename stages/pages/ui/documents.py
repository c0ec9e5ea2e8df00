"""The documents that programs made (report, plan, preview): shown in a frame, and loaded again when they change. No
other files are served, except the pictures and clips under the output folder.

Documents show untrusted names and captions, and a report has a script. So a document is shown in a sandbox: the browser
gives it a separate origin, from which nothing of this site can be read or changed, and its policy allows no request. A
document in a sandbox does not send a cookie, so the files that it embeds are found by a key in the address. The key
opens only documents.
"""

import hmac
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute

from cache.runs.training_run import METRICS_FILE
from cache.runs.validations import hash_results, read_mark
from schemas.cli.report import Report
from stages.pages.ui.app import DOCUMENTS, Page, Site, get, read_version, render, site_of
from stages.pages.ui.child_programs import STAGES
from stages.pages.ui.job_cards import ACTIVE_STATES, build_cards, build_job_card

MAX_LISTED = 50
#: Job -> title of its page, and description of the document.
KINDS = {
    "preview-plan": ("Plan", "the samples of the plan, before they are encoded"),
    "preview": ("Preview", "encoded samples next to their originals"),
    "report": ("Report", "one page of the run: curves, samples, data, costs, settings"),
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; connect-src 'none'; frame-src 'none'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)


def list_documents(site: Site, job: str) -> dict[str, Path]:
    """Find the documents of a job: name under the output folder -> path. The report of the configuration's run is
    first; plans and previews are sorted by time, newest first."""
    if job == "report":
        first = site.config().run_folder / "report.html"
        paths = [first, *site.output.glob("report.html"), *site.output.glob("*/report.html")]
        paths = [path for path in dict.fromkeys(paths) if path.is_file()]
    else:
        pattern = "plan-*.html" if job == "preview-plan" else "latents-*.html"
        paths = [path for path in (site.output / "preview").glob(pattern) if path.is_file()]
        paths.sort(key=lambda path: -path.stat().st_mtime)
    return {path.relative_to(site.output).as_posix(): path for path in paths[:MAX_LISTED]}


def _show(request: Request, job: str) -> Response:
    site, (title, description) = site_of(request), KINDS[job]
    documents = list_documents(site, job)
    requested_name = request.query_params.get("page", "")
    document_name = requested_name if requested_name in documents else next(iter(documents), "")
    path = documents.get(document_name)
    card = build_job_card(job, description, site.programs)
    if not documents and job == "preview-plan" and (stage := _find_first_stage(site)):
        card = build_job_card(stage, STAGES[stage], site.programs)
    return render(
        request,
        "document.html",
        title=title,
        card=card,
        names=list(documents),
        document_name=document_name,
        url=f"{DOCUMENTS}{site.document_key}/{quote(document_name)}",
        made_at=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime)) if path else "",
        version=read_version(path),
        is_old=job == "report" and path is not None and _is_old(path),
        is_due=not documents and _is_due(site, job),
    )


def _find_first_stage(site: Site) -> str:
    """The first stage without results that the plan needs; "" if it has them, or this is not known."""
    if not isinstance(status := site.status(), Report):
        return ""
    done_counts = {row["stage"]: row["done"] for row in status.details["stages"]}
    return next((stage for stage in ("discover", "bucket") if not done_counts.get(stage)), "")


def _is_old(report: Path) -> bool:
    """Whether a run's report was made before its newest results."""
    return (report.parent / METRICS_FILE).exists() and read_mark(report).source != hash_results([report.parent])


def _is_due(site: Site, job: str) -> bool:
    """Whether a document can be made now, because the results that it shows exist. A preview, for which an autoencoder
    decodes latents, is not due for clips or while other programs run."""
    config = site.config()
    if site.config_error is not None or not site.programs.may_begin(job):
        return False
    if job == "report":
        return (config.run_folder / METRICS_FILE).exists()
    status = site.status()
    if not isinstance(status, Report):
        return False
    done_counts = {row["stage"]: row["done"] for row in status.details["stages"]}
    if job == "preview-plan":
        return done_counts.get("bucket", 0) > 0
    at_work = any(card.state in ACTIVE_STATES for step in build_cards(config, site.programs, status) for card in step)
    return done_counts.get("encode-latents", 0) > 0 and not (at_work or config.model.family_spec.video)


def find_document(output: Path, name: str) -> Path | None:
    """Find a file under the output folder; None if it is not a file, is hidden, has a type that is not served, or leads
    out of the folder by ".." or a link."""
    try:
        folder = output.resolve(strict=True)
        path = (folder / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
    if not path.is_relative_to(folder) or not path.is_file() or path.suffix.lower() not in TYPES:
        return None
    return None if any(part.startswith(".") for part in path.relative_to(folder).parts) else path


def route(list_sites: Callable[[], Iterable[Site]]) -> BaseRoute:
    """The route of the documents of all projects; the key in the address identifies the project."""

    def serve(request: Request) -> Response:
        key = request.path_params["key"].encode("utf-8", "replace")
        sites = [site for site in list_sites() if hmac.compare_digest(key, site.document_key.encode())]
        path = find_document(sites[0].output, request.path_params["name"]) if sites else None
        if path is None:
            raise HTTPException(404, "the document does not exist")
        headers = {"content-security-policy": POLICY, "cross-origin-resource-policy": "cross-origin"}
        if "version" in request.query_params and path.suffix.lower() != ".html":
            headers["cache-control"] = "private, max-age=86400"
        return FileResponse(path, media_type=TYPES[path.suffix.lower()], headers=headers)

    return get(DOCUMENTS + "{key}/{name:path}", serve)


PAGES = tuple(
    Page(title, f"/{title.lower()}", (get(f"/{title.lower()}", partial(_show, job=job)),))
    for job, (title, _) in KINDS.items()
)
