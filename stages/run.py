"""run: all stages in order, each in its own process, so that only one model is loaded at a time.

Each stage skips finished work. The first stage that fails ends the run. Watchers (stages/follow/watchers.py) run during
training, and `report` runs at the end.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from cache.runs.training_run import (
    METRICS_FILE,
    OutputLocked,
    StageRun,
    append_stage,
    clear_failure,
    is_running,
    read_failure,
    read_progress,
    record_failure,
)
from cache.runs.validations import hash_results, read_mark
from cache.sets.set_lookup import NoPlan
from cache.sets.trainset import SetNotFound
from cache.store.files import check_writable
from schemas.cli.console import LOGS, Console, Options, Report, make_app
from schemas.cli.process_record import record_program, recording_programs
from schemas.cli.report import for_each_expert
from schemas.cli.starting import install_command
from schemas.config.encoding import StageName
from schemas.config.pipeline import Config
from schemas.errors import DAMAGE, INCOMPLETE, OK, UsageError
from schemas.interruption import MaxTimeOption, StopHandler
from schemas.libraries import require_libraries
from schemas.text_format import describe_exit, shown_path
from stages.discovery.media_table import OtherSettings
from stages.encoding.item_plans import NoFeatures
from stages.encoding.made_items import NoCaptions, NoMasks
from stages.engines.stage_processes import StageFailed, StageProcesses, find_folders, remove_unfinished, sort_results
from stages.follow.watchers import Watchers, check_models

#: Error of a stage whose input is missing or was made for an earlier configuration -> the stage that makes this input.
REMAKING_STAGES: dict[str, StageName] = {
    OtherSettings.__name__: "discover",
    NoFeatures.__name__: "features",
    NoCaptions.__name__: "caption",
    NoMasks.__name__: "masks",
    NoPlan.__name__: "bucket",
    SetNotFound.__name__: "index",
}
MAX_RESTARTS = 3  # how often earlier stages are repeated because the configuration was edited between two stages
STOPPED_S = 10.0  # time limit of the report after a stop: schedulers wait 30 s before they kill


@for_each_expert(in_order=True)
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    max_time: MaxTimeOption = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exclude samples whose media were missing during encoding.")
    ] = False,
) -> Report:
    if (ranks := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
        raise UsageError(
            f"`latentpress run` was started by a launcher for {ranks} ranks (WORLD_SIZE), but must run only once",
            "Run the stages up to index (stages.order) without the launcher, then `latentpress train` with it.",
        )
    check_models(config)
    require_libraries(config, "train" in config.stage_order)
    order = config.stage_order
    folder = config.run_folder
    note = nullcontext() if options.dry_run else record_program("run", folder / LOGS)
    processes = StageProcesses({"index": ["--allow-missing"]} if allow_missing else {})
    stop_handler = StopHandler(max_time, processes.stop)
    watchers = Watchers(config, options, console, stop_handler)
    if not options.dry_run and "train" in order and is_running(folder):
        raise OutputLocked(folder)
    notes = nullcontext() if options.dry_run else recording_programs(folder / LOGS)
    with console.keep_log(None if options.dry_run else folder), stop_handler.stop_on_signals(), note, notes, watchers:
        if not options.dry_run:
            check_writable(folder)
            clear_failure(folder)
            remove_unfinished(folder)
            watchers.start()
        try:
            report = _run_stages(order, config, options, console, processes, stop_handler, watchers)
        except StageFailed as failed:
            if not options.dry_run and read_failure(folder) is None:  # training records its own failure
                record_failure(folder, failed.stage, failed.reason, failed.advice)
            if (folder / METRICS_FILE).exists() and (page := _make_report(options, console, processes)):
                console.log(f"report of the finished part: {shown_path(page)}")
            raise
        if not options.dry_run and (page := _find_report(folder, report, options, console, processes, stop_handler)):
            report.details["report"] = page
        if not (options.dry_run or stop_handler.reason):
            if config.hub.repo and "train" in order and not report.remaining:
                _push(report, options, console, processes)
            for row in report.details["stages"]:
                if row["remaining"] and read_failure(folder) is None:
                    reason = f"{row['remaining']} items remain"
                    record_failure(folder, row["stage"], reason, *report.next_steps[:1])
    if not options.dry_run:
        report.details = sort_results(report.details | find_folders(folder))
        if report.rejects:
            report.next_steps.append("latentpress status --rejects   # list rejects by reason")
    if watchers.failed:
        report.details["watchers_that_failed"] = watchers.failed
    if stop_handler.reason:
        report.details.setdefault("stopped", f"by {stop_handler.reason}; finished work is kept")
        report.remaining = max(report.remaining, 1)
        report.next_steps = ["latentpress run"]
    return report


def _run_stages(
    order: Sequence[StageName],
    config: Config,
    options: Options,
    console: Console,
    processes: StageProcesses,
    stop_handler: StopHandler,
    watchers: Watchers,
) -> Report:
    report = Report(program="run", what="stages", dry_run=options.dry_run)
    rows: list[dict] = report.details.setdefault("stages", [])
    if "train" in order and read_progress(config).state != "finished":
        console.log("--- checks")
        code, document = processes.run("checks", options)
        if code != OK and not stop_handler.reason:
            raise StageFailed("checks", code, document)
    queue, restarts = deque(() if stop_handler.reason else order), 0
    while queue:
        stage, start_time = queue.popleft(), time.monotonic()
        console.log(f"--- {stage}")
        watchers.start(stage)
        code, document = processes.run(stage, options)
        watchers.finish(stage)
        if stop_handler.reason and (not document or "error" in document):  # stopped before it made a report
            if message := document.get("error", {}).get("message"):
                report.details["stopped"] = f"by {stop_handler.reason}; {stage}: {message}"
            break
        seconds = round(time.monotonic() - start_time, 1)
        is_failed = "error" in document or code not in (OK, INCOMPLETE, DAMAGE)
        maker = REMAKING_STAGES.get(document.get("error", {}).get("type"))
        if is_failed and restarts < MAX_RESTARTS and maker in order:
            restarts += 1
            console.log("the configuration or its prompts file was edited during the run: repeating the stages")
            queue.extendleft(reversed(order[: order.index(stage) + 1]))
            continue
        if not options.dry_run and (is_failed or document["done"]):
            stage_start, count = round(time.time() - seconds, 1), document.get("done", 0)
            row = StageRun(stage=stage, began=stage_start, seconds=seconds, failed=is_failed, done=count)
            append_stage(config.run_folder, row)
        if is_failed:
            raise StageFailed(stage, code, document)
        rows.append(
            {"stage": stage, "seconds": seconds} | {key: document[key] for key in ("done", "skipped", "remaining")}
        )
        rows[-1]["rejected"] = len(document["rejects"]) + document["more_rejects"]
        report.remaining += bool(document["remaining"])
        report.done += bool(document["done"]) and not document["remaining"]
        report.skipped += not document["done"] and not document["remaining"]
        items = {row.get("item") for row in report.rejects}  # index also lists the rejects of the encoding stages
        report.rejects += [row for row in document["rejects"] if row.get("item") not in items]
        report.more_rejects += document["more_rejects"]
        if stage == "score":  # its list has validation prompts that are too long for CLIP
            report.truncated += document["truncated"]
        else:  # index lists all truncated texts, encode-text only new ones
            report.truncated = document["truncated"] or report.truncated
        report.failed += document["failed"]
        report.damage += document["damage"]
        if not options.dry_run:
            kind = config.train.adapter.type
            _add_details(report, kind, stage, document["details"], stop_handler)
        if code != OK:  # the next steps of earlier stages are not enough
            report.next_steps.clear()
        for step in document["next_steps"]:  # `run` also has the option --allow-missing
            command = step.replace("latentpress index", "latentpress run", 1) if "--allow-missing" in step else step
            report.next_steps.append(command)
        if code != OK or stop_handler.reason:
            break
        if options.dry_run and document["remaining"]:
            console.log(f"{stage} has remaining work; the next stages depend on its result")
            break
    return report


def _add_details(
    report: Report, kind: str, stage: StageName, details: Mapping[str, Any], stop_handler: StopHandler
) -> None:
    """Add the results of a stage, and why it stopped. kind: value of train.adapter.type."""
    if stop_handler.reason and "stopped" in details:
        consequence = details["stopped"].partition("; ")[2]
        report.details["stopped"] = f"by {stop_handler.reason}; {stage}: {consequence}"
    if stage == "train" and "saved" in details:
        report.details["model" if kind == "full" else "adapter"] = details["saved"]
        names = ("best_steps", "nothing_held_out", "numbers", "tensorboard", "wandb")
        report.details |= {name: details[name] for name in names if name in details}
    elif stage == "decode" and "contact_sheet" in details:
        report.details["pictures"] = details["samples"]
        report.details["contact_sheet"] = details["contact_sheet"]
    elif stage == "score" and "best_steps" in details:
        report.details |= {name: details[name] for name in ("scores", "best_steps")}


def _find_report(
    folder: Path,
    report: Report,
    options: Options,
    console: Console,
    processes: StageProcesses,
    stop_handler: StopHandler,
) -> str:
    """Update the run's page if its results have changed. Returns its path, or "" if it does not exist. If `run` was
    stopped, the update is canceled after STOPPED_S."""
    page = folder / "report.html"
    if report.done or report.remaining or read_mark(page).source != hash_results([folder]):
        if not stop_handler.reason:
            _make_report(options, console, processes)
        elif (page.parent / METRICS_FILE).exists():
            new_processes = StageProcesses({})  # `processes` does not start a stage after a stop
            timer = threading.Timer(STOPPED_S, new_processes.stop)
            timer.start()
            _make_report(options, console, new_processes)
            timer.cancel()
    return str(page) if page.exists() else ""


def _make_report(options: Options, console: Console, processes: StageProcesses) -> str:
    if find_spec("jinja2") is None:
        console.log(f"the report needs jinja2, which is not installed: {install_command('report')}")
        return ""
    console.log("--- report")
    _, document = processes.run("report", options)
    return document.get("details", {}).get("page", "")


def _push(report: Report, options: Options, console: Console, processes: StageProcesses) -> None:
    """Upload the result. If the upload fails, it is added to the remaining work."""
    console.log("--- push")
    code, document = processes.run("push", options)
    if code == OK:
        report.details["hub"] = document["details"]["url"]
    else:
        message = document.get("error", {}).get("message", f"push {describe_exit(code)}; see its output above")
        report.failed.append({"item": "push", "reason": "not-uploaded", "message": message})
        report.remaining, report.next_steps = report.remaining + 1, [*report.next_steps, "latentpress push"]


app = make_app("run", "Run all stages in order, each in its own process. Finished work is skipped.", run)

if __name__ == "__main__":
    app()
