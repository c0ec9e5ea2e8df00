"""The queue of runs: runs are added with the page's configuration, and shown in order with their results. The program
`latentpress queue run` runs them, and continues when the page ends; the page stops it through the queue's file."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.runs.run_queue import QueueEntry, QueueState
from cache.runs.training_run import METRICS_FILE, read_last_metrics
from schemas.config.loading import parse_config, read_text
from schemas.errors import LatentpressError
from schemas.text_format import format_duration
from stages.pages.ui.app import Form, Page, Site, action, get, lines_of, render, site_of
from stages.pages.ui.child_programs import Refused
from stages.pages.ui.job_cards import build_job_card
from stages.pages.ui.settings_page import why_not_read

PATH = "/queue"
STATES = {"waiting": "to do", "finished": "done"}  # state of an entry -> state of a card, if their names differ


def show(request: Request) -> Response:
    site = site_of(request)
    problem, state = None, QueueState()
    try:
        state = site.programs.queue.read()
    except LatentpressError as error:
        problem = error
    return render(
        request,
        "queue.html",
        title="Queue",
        problem=problem,
        rows=[_row(entry, position, state) for position, entry in enumerate(state.entries)],
        is_on=state.is_on,
        worker=site.programs.queue.worker(),
        unfinished=len(state.unfinished),
        can_clear=len(state.unfinished) < len(state.entries),
        last=build_job_card("queue", "", site.programs),
        overrides=site.options.overrides,
    )


def _row(entry: QueueEntry, position: int, state: QueueState) -> dict[str, Any]:
    """A row of the queue: entry; css, the state of a card; facts, the entry's progress; actions, the actions of its
    buttons."""
    verbs = ["up"] if position else []
    verbs += ["down"] if position < len(state.entries) - 1 else []
    verbs += ["again"] if entry not in state.unfinished else []
    facts = ""
    if entry.state == "running":
        lines = [line for line in read_last_metrics(Path(entry.folder) / METRICS_FILE) if "loss" in line]
        facts = f"step {lines[-1]['step']}" if lines else "before its first step"
        if lines and lines[-1].get("seconds_left"):
            facts += f", {format_duration(lines[-1]['seconds_left'])} left"
    elif entry.ended is not None and entry.began is not None:
        facts = f"took {format_duration(max(0.0, entry.ended - entry.began))}"
    return {"entry": entry, "css": STATES.get(entry.state, entry.state), "facts": facts, "actions": [*verbs, "remove"]}


def add(request: Request, form: Form) -> str:
    """Add the page's current configuration to the queue, with the form's overrides."""
    site = site_of(request)
    overrides = lines_of(form, "overrides")
    if name := form.get("run", "").strip():
        overrides.append(f"train.run={name}")
    path, overrides = site.options.config.absolute(), [*site.options.overrides, *overrides]
    config = parse_config(read_text(path), path, overrides, lambda file: why_not_read(site, file))
    if (Path(config.output), config.root) != (site.output, site.root):
        raise Refused(
            "a run of this queue must have the page's root and output", "leave root and output out of the settings"
        )
    entry = site.programs.queue.add(path, overrides, config.run_folder)
    return f"{entry.run} was added as entry {entry.id}"


def act(request: Request, form: Form) -> str:
    queue, number, verb = site_of(request).programs.queue, request.path_params["number"], request.path_params["verb"]
    if verb in ("up", "down"):
        queue.move(number, -1 if verb == "up" else 1)
        return f"entry {number} was moved {verb}"
    if verb == "again":
        queue.retry(number)
        return f"entry {number} waits again"
    if verb != "remove":
        raise HTTPException(404, f"an entry does not have the action {verb!r}")
    state = queue.read().find(number).state
    queue.remove([number])
    return f"entry {number} was removed" + ("; its run is being stopped" if state == "running" else "")


def switch(request: Request, form: Form) -> str:
    """Start or stop `latentpress queue run`, or remove the entries that have ended."""
    site, verb = site_of(request), request.path_params["verb"]
    if verb == "clear":
        return f"{site.programs.queue.clear()} entries were removed"
    if verb == "stop":
        site.programs.queue.switch(False)
        return "the queue is stopping; the run keeps its finished work, and is the first to continue"
    if verb != "start":
        raise HTTPException(404, f"the queue does not have the action {verb!r}")
    site.programs.start("queue")
    return "the queue was started"


def resume_queue(site: Site) -> bool:
    """Start the queue if it is switched on but no program runs it, for example after the machine went down. Returns
    whether it was started."""
    with suppress(LatentpressError):  # the page shows the error, or another page was faster
        state = site.programs.queue.read()
        if state.is_on and state.unfinished and site.programs.queue.worker() is None:
            site.programs.start("queue")
            return True
    return False


PAGE = Page(
    "Queue",
    PATH,
    (
        get(PATH, show),
        action(f"{PATH}/add", add, PATH),
        action(PATH + "/{number:int}/{verb}", act, PATH),
        action(PATH + "/{verb}", switch, PATH),
    ),
)
