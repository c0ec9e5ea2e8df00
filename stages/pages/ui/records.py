"""The pages of logs and of rejected items.

Logs are shown of programs that were started from the page, and of watchers that `run` starts during training: the end
of each log, followed as it grows. Rejected items are listed by stage and reason, with the remedy, and can be searched.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from cache.runs.training_run import is_running
from schemas.cli.console import LOGS
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable, shorten
from stages.maintenance.rejected_items import CSV_COLUMNS, RejectedItem, group_by_reason
from stages.pages.thumbnails import MAX_THUMBNAILS, can_have_thumbnail, thumbnail_id
from stages.pages.ui.app import Page, Site, get, parse_first_item, render, site_of
from stages.pages.ui.child_programs import JOBS
from stages.pages.ui.job_cards import build_job_card

WATCHER_PREFIX = "watcher-"  # prefix of a watcher's name in addresses
REJECTED_PATH = "/rejected"
MAX_SHOWN = 200  # items on one page
PIECE_BYTES = 64 << 10  # bytes of a log in one answer
MAX_LINE = 2000  # characters
_TERMINAL = re.compile(  # terminal commands: colors, moves of the cursor, titles
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)


def show_logs(request: Request) -> Response:
    programs = site_of(request).programs
    name = request.path_params.get("job")
    if name is None:
        listed = [(job, programs.last_start(job)) for job in JOBS if programs.logs(job)]
        return render(request, "logs.html", title="Logs", jobs=listed, watchers=_list_watchers(site_of(request)))
    logs = [path.name for path in _logs(request)]
    if not logs:
        raise HTTPException(404, f"{name} was not started yet")
    log = find_log(request)
    text, start, end = read_piece(log, None, _has_ended(request))
    content: dict[str, Any] = {"job": name, "logs": logs, "log_name": log.name, "text": text}
    return render(request, "log.html", title=f"Log of {name}", cut=start, end=end, **content)


def tail(request: Request) -> Response:
    """Answer with the lines that were added to a log since the offset `from`."""
    offset_text = request.query_params.get("from", "")
    log, ended = find_log(request), _has_ended(request)
    offset = int(offset_text) if re.fullmatch("[0-9]{1,18}", offset_text, re.ASCII) else None
    text, start, end = read_piece(log, offset, ended)
    return JSONResponse({"text": text, "cut": offset is not None and start > offset, "end": end, "ended": ended})


def _has_ended(request: Request) -> bool:
    site, name = site_of(request), request.path_params["job"]
    if name.startswith(WATCHER_PREFIX):
        return not is_running(site.config().run_folder)
    last = site.programs.last_start(name)
    return last is None or not last.is_running


def _list_watchers(site: Site) -> list[str]:
    return sorted(path.stem for path in (site.config().run_folder / LOGS).glob("*.log"))


def _logs(request: Request) -> list[Path]:
    """The logs of the requested job, newest first, without links to files outside of the output folder."""
    site, name = site_of(request), request.path_params["job"]
    if name.startswith(WATCHER_PREFIX) and (watcher := name.removeprefix(WATCHER_PREFIX)) in _list_watchers(site):
        logs = [site.config().run_folder / LOGS / f"{watcher}.log"]
    elif name in JOBS:
        logs = site.programs.logs(name)
    else:
        raise HTTPException(404, "the program does not exist")
    output = site.output.resolve()
    return [path for path in logs if path.resolve().is_relative_to(output)]


def find_log(request: Request) -> Path:
    """The log that the request names, by default the newest log. Answers 404 if it does not exist."""
    logs = _logs(request)
    name = request.query_params.get("file") or (logs[0].name if logs else "")
    for path in logs:
        if path.name == name:
            return path
    raise HTTPException(404, "the log does not exist any more")


def read_piece(path: Path, offset: int | None, has_ended: bool) -> tuple[str, int, int]:
    """Read whole lines of a log from `offset`, or its last lines if `offset` is None: (text, offset of the first byte,
    offset after the last byte).

    Reads at most PIECE_BYTES; if a log grew by more, only its end is read. has_ended: whether the program has ended, so
    that a last line without a line break is whole."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = size - PIECE_BYTES if offset is None else max(min(offset, size), size - PIECE_BYTES)
        file.seek(max(0, start))
        raw = file.read(PIECE_BYTES)
    start = max(0, start)
    if start and start != offset:  # in the middle of a line
        cut = raw.find(b"\n") + 1
        raw, start = raw[cut:], start + cut
    line_bytes = len(raw) if has_ended or len(raw) == PIECE_BYTES else raw.rfind(b"\n") + 1
    return clean_lines(raw[:line_bytes]), start, start + line_bytes


def clean_lines(raw: bytes) -> str:
    """Decode lines, without terminal commands. For a line with carriage returns, only the text after the last one is
    kept."""
    text = _TERMINAL.sub("", raw.decode("utf-8", "replace"))
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(shorten(escape_unprintable(line.replace("\t", "    ")), MAX_LINE) for line in lines)


def show_rejected(request: Request) -> Response:
    query = {name: request.query_params.get(name, "") for name in ("words", "stage", "reason")}
    items: Sequence[RejectedItem] = ()
    error: LatentpressError | None = None
    try:
        items = site_of(request).list_rejects()
    except LatentpressError as problem:
        error = problem
    matches = find_items(items, **query)
    site = site_of(request)
    thumbnails = site.thumbnails.list_known()
    card = build_job_card("thumbnails", "thumbnails of the items that can be read", site.programs)
    has_new = any(
        can_have_thumbnail(item.path) and thumbnail_id(item) not in thumbnails for item in items[:MAX_THUMBNAILS]
    )
    start = parse_first_item(request.query_params, len(matches))
    return render(
        request,
        "rejected.html",
        title="Rejected",
        error=error,
        total=len(items),
        count=len(matches),
        groups=group_by_reason(matches[start : start + MAX_SHOWN]),
        start=start,
        end=min(start + MAX_SHOWN, len(matches)),
        step=MAX_SHOWN,
        stages=list(dict.fromkeys(item.stage for item in items)),
        reasons=sorted({item.reason for item in items}),
        query=query,
        card=card,
        is_due=has_new and site.programs.may_begin("thumbnails"),
        thumbnails={item: thumbnails.get(thumbnail_id(item), False) for item in matches[start : start + MAX_SHOWN]},
        stage_cards={stage: build_job_card(stage, "", site.programs) for stage in {item.stage for item in matches}},
        thumbnail_id=thumbnail_id,
    )


def show_thumbnail(request: Request) -> Response:
    path = site_of(request).thumbnails.find(request.path_params["name"])
    if path is None:
        raise HTTPException(404, "the thumbnail does not exist")
    return FileResponse(path, media_type="image/webp")


def find_items(items: Iterable[RejectedItem], words: str, stage: str, reason: str) -> list[RejectedItem]:
    """Find the items that contain each of the words (case-insensitive). stage, reason: stage and reason of the items;
    "" for any."""
    search_words = words.casefold().split()
    matches = [item for item in items if stage in ("", item.stage) and reason in ("", item.reason)]
    if not search_words:
        return matches
    texts = ("\n".join(getattr(item, column) for column in CSV_COLUMNS).casefold() for item in matches)
    return [item for item, text in zip(matches, texts, strict=True) if all(word in text for word in search_words)]


PAGES = (
    Page(
        "Rejected",
        REJECTED_PATH,
        (get(REJECTED_PATH, show_rejected), get("/thumbnails/{name}.webp", show_thumbnail)),
    ),
    Page("Logs", "/logs", (get("/logs", show_logs), get("/logs/{job}", show_logs), get("/logs/{job}/tail", tail))),
)
