"""The first page: what the run needs next, with one button; its result or its failure; progress, newest pictures, loss,
memory and disk space. Below: the stages, folded, with their buttons. Running jobs are drawn again every two seconds."""

from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cache.runs.requests import REQUESTS, ask_trainer
from cache.runs.training_run import METRICS_FILE, RunProgress, is_running, read_progress, spread
from cache.store.files import find_free_space
from schemas.cli.report import Report
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import format_bytes
from stages.pages.card_load import read_cards
from stages.pages.pictures import list_samples
from stages.pages.result_files import list_results
from stages.pages.ui.app import Form, Page, Site, action, get, render, site_of
from stages.pages.ui.child_programs import JOBS, NEED_OPTIONS, STAGES, Refused
from stages.pages.ui.job_cards import (
    ACTIVE_STATES,
    Card,
    build_cards,
    build_run_card,
    find_failure,
)
from stages.pages.ui.pictures_page import make_row

MAX_ROWS, MAX_STEPS = 4, 5  # rows and columns of pictures
MEMORY = ("device_memory_gib", "host_memory_gib")
LABELS = {
    "step": "step",
    "left": "time left",
    "samples_per_second": "samples per second",
    "waiting_for_data": "waiting for data",
    "loss": "loss",
    "eval_loss": "eval loss",
    "last_checkpoint": "last checkpoint",
}
#: Stage -> participle after its count.
COUNTED = {"discover": "found", "bucket": "planned", "encode-text": "encoded", "encode-latents": "encoded"}
DONE_WORDS = {
    "start": "{} was started",
    "retry": "{} was started, and tries rejected items again",
    "stop": "{} is stopping; it keeps its finished work",
    "restart": "{} starts again as soon as it has stopped",
    "kill": "{} was killed",
}


def summarize_run(site: Site, config: Config, progress: RunProgress, counts: Sequence[str]) -> dict[str, Any]:
    """Values for the top of the page. counts: texts with the results of the stages before training."""
    row = progress.row()
    facts = {label: row[key] for key, label in LABELS.items() if row[key]}
    if progress.state == "not started":
        facts = {"ready": ", ".join(counts) or "nothing yet", "steps": str(progress.steps)}
    charts, last, _ = site.metrics.draw(config.run_folder / METRICS_FILE)
    resources = {f"peak {key.removesuffix('_gib').replace('_', ' ')}": f"{last[key]:.1f} GiB"
             for key in MEMORY if isinstance(last.get(key), int | float)}  # fmt: skip
    free = {name: find_free_space(folder) for name, folder in (("the cache", config.root), ("results", config.output))}
    resources |= {f"free for {name}": format_bytes(count) for name, count in free.items() if count is not None}
    resources |= read_cards()
    files = list_samples(config, config.run_folder)
    steps = spread(sorted({step for steps in files.values() for step in steps}), MAX_STEPS)
    steps_by_name = {name: [step for step in steps if step in paths] or [max(paths)] for name, paths in files.items()}
    rows = [make_row(site, config, name, files[name], steps_by_name[name]) for name in list(steps_by_name)[:MAX_ROWS]]
    note = "Pictures appear after the first validation."
    if not config.validation.prompts:
        note = "No pictures are made, because validation.prompts is empty."
    pictures = {"rows": rows, "left_out": len(files) - len(rows), "no_pictures": "" if rows else note}
    return {"state": progress.state, "facts": facts, "resources": resources, "charts": charts, **pictures}


def describe_result(site: Site, config: Config) -> dict[str, Any]:
    """Values for the result of a finished run."""
    files = [(name, path, format_bytes(path.stat().st_size)) for name, path in list_results(config).items()]
    best = site.metrics.draw(config.run_folder / METRICS_FILE)[2]
    return {"files": files, "folder": config.result_folder, "best": best, "config": config}


def download(request: Request) -> Response:
    name = request.path_params["name"]
    path = list_results(site_of(request).config()).get(name)
    if path is None:
        raise HTTPException(404, "the file does not exist")
    return FileResponse(path, media_type="application/octet-stream", filename=name)


def ask(request: Request, form: Form) -> str:
    """Ask the trainer for a sample, a checkpoint or its end, after the current step."""
    name, folder = request.path_params["request"], site_of(request).config().run_folder
    if name not in REQUESTS:
        raise HTTPException(404, f"the trainer does not have the action {name!r}")
    if not is_running(folder):
        raise Refused("training is not running", "start it first")
    ask_trainer(folder, name)
    return f"training was asked for a {name}, which follows the current step"


def find_first_steps(config: Config) -> dict[str, Any]:
    """Facts for the first steps of a new project. datasets: id -> folder of media; missing: ids of datasets whose
    folder does not exist; has_prompts: whether there are validation prompts, so that training makes pictures."""
    datasets = (dataset for dataset in config.datasets if not dataset.disabled)
    folders = {dataset.id: dataset.root for dataset in datasets if dataset.resolved_source == "folder"}
    missing_names = {name for name, folder in folders.items() if not Path(folder).is_dir()}
    has_prompts = bool(config.validation.prompts or config.validation.prompts_file)
    return {"datasets": folders, "missing": missing_names, "has_prompts": has_prompts}


def show(request: Request) -> Response:
    site = site_of(request)
    config, status = site.config(), site.status()
    problem = status if isinstance(status, LatentpressError) else None
    progress = read_progress(config)
    steps = build_cards(config, site.programs, status, progress)
    run_card = build_run_card(site.programs, steps, status is not None and problem is None, config)
    if progress.state == "running" and run_card.state not in ACTIVE_STATES:  # without `run`, or by the queue
        remark = next((f"train, {card.remark}" for card in chain.from_iterable(steps) if card.name == "train"), "")
        run_card.state, run_card.remark, run_card.actions = "running", remark, []
    failure, cards = find_failure(config, site.programs), [run_card, *chain.from_iterable(steps)]
    if run_card.state in ACTIVE_STATES:  # another attempt has begun
        failure = None
    for card in cards:
        if failure is not None and card.state in ("to do", "failed") and card.name in (failure.program, "run"):
            card.state, card.remark = "failed", failure.message
    before = takewhile(lambda card: card.name != "train", chain.from_iterable(steps))
    counted = [card for card in before if card.count and not card.count.startswith("0 ")]
    counts = [f"{card.count} {COUNTED.get(card.name, 'ready')}" for card in counted]
    content: dict[str, Any] = {"first": find_first_steps(config) if _is_empty(progress, status, run_card) else None}
    content |= {"run_card": run_card, "steps": steps, "problem": problem, "reading": status is None, "cards": cards[1:]}
    content |= {"failure": failure, "result": describe_result(site, config) if progress.state == "finished" else None}
    return render(request, "flow.html", title="Run", summary=summarize_run(site, config, progress, counts), **content)


def _is_empty(progress: RunProgress, status: Report | LatentpressError | None, run_card: Card) -> bool:
    """Whether the project does not have any results, and `run` can be started and was not tried."""
    if progress.state != "not started" or run_card.actions != ["start"] or run_card.remark:
        return False
    rows = status.details["stages"] if isinstance(status, Report) else [{"done": 1}]
    return not any(row["done"] or row["rejected"] for row in rows)


def act(request: Request, form: Form) -> str:
    site, name, verb = site_of(request), request.path_params["job"], request.path_params["verb"]
    is_other = (verb == "retry" and name not in STAGES) or (name in NEED_OPTIONS and verb not in ("stop", "kill"))
    if name not in JOBS or verb not in DONE_WORDS or is_other:
        raise HTTPException(404, f"{name} does not have the action {verb!r}")
    site.config()
    if site.config_error is not None and verb in ("start", "retry", "restart"):
        raise Refused(f"the settings are not valid: {site.config_error.message}", "correct it first")
    getattr(site.programs, verb)(name)
    return DONE_WORDS[verb].format(name)


PAGE = Page(
    "Run",
    "/",
    (
        get("/", show),
        get("/result/{name}", download),
        action("/training/{request}", ask),
        action("/jobs/{job}/{verb}", act),
    ),
)
