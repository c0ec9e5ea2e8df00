"""status: for each stage what is done, what remains, what was rejected, and how many bytes it takes; and how far the
training run is.

Its cost grows with the number of shards: names, sizes and times are listed, and a few shards are opened.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.models.weights import WeightsError
from cache.runs.training_run import read_progress
from cache.sets import rejects, set_lookup
from cache.sets.caption_edits import read_edits
from cache.sets.plans import Plan
from cache.sets.set_lookup import current_plan
from cache.sets.table_checks import SetRecord
from cache.sets.trainset import SetError
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.files import Entry
from cache.store.store import Store
from schemas.cli.console import LOGS, NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.process_record import ProcessRecord
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.interruption import pause
from schemas.tables import TRAINED_ROLES
from schemas.text_format import format_duration
from stages.discovery.media_locations import spread_evenly
from stages.discovery.media_table import find_media_table
from stages.encoding import stage_registry
from stages.encoding.job_reports import (
    JobReport,
    count_states,
    format_rate,
    list_jobs,
    read_reports,
    sum_rates,
)
from stages.encoding.stage import EncodingStage
from stages.encoding.stage_state import MEMBER_NAMES, StageState
from stages.maintenance.rejected_items import report_rejects

MAX_OPENED_SHARDS = 32  # of each stage, for their libraries
LISTED_FOLDERS = ("media", "plans", *stage_registry.SHARD_KINDS, "sets", "damaged")
RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints")  # which the trainer writes before anything else
ENDED = ("ended", "stopped")  # jobs that are shown with --all only
MIXED = "MIXED"
NOTHING_RUNS = "nothing is at work now: no run, training or job"
MIN_PAUSE_FACTOR = 4  # building a report may take at most this fraction of the time: 1/4

TableRow = dict[str, Any]


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh, with rates, until all is done, training too; Ctrl-C quits.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="Between two refreshes of --watch.")
    ] = 5.0,
    rejects_too: Annotated[
        bool,
        typer.Option("--rejects", help="Show only the rejected items, by reason, with their remedies."),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Ended jobs and library versions, too; with --rejects every item of each reason."),
    ] = False,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Like --rejects; writes a line for each item, too.")
    ] = None,
) -> Report:
    if rejects_too or csv_file is not None:
        return report_rejects(config, options, everything, csv_file)
    everything = everything or options.json
    if watch and not options.dry_run:
        return refresh_until_done(lambda: build_report(config, options, everything), console, every)
    return build_report(config, options, everything)


def build_report(config: Config, options: Options, everything: bool = True) -> Report:
    """everything: ended jobs, library versions and the bytes under the root, too."""
    store = Store(config.root)
    listed = {top: store.list_files(top) for top in LISTED_FOLDERS}
    report = Report(program="status", dry_run=options.dry_run)
    datasets = [dataset.id for dataset in config.datasets if not dataset.disabled]
    tables = [find_media_table(store, name) for name in datasets]
    rejected_files = rejects.read_stage(store, "discover")
    listed_files = sum(len(table) for table in tables if table is not None)
    report.remaining = sum(table is None for table in tables)
    rejected_count = sum(len(rejected_files.get(name, [])) for name in datasets)
    rows = [_row("discover", "files", listed_files, report.remaining, rejected_count, listed["media"])]
    report.details |= {"stages": rows, "training": [read_progress(run).row() for run in config.expert_runs]}
    if edited := len(read_edits(store)):
        report.details["edited_captions"] = edited
    note = ProcessRecord.try_read(config.run_folder / LOGS / "run.json")
    if note is not None and note.is_running:
        report.details["run_goes_on"] = True
    report.next_steps += ["latentpress discover"] if report.remaining else []
    jobs: dict[str, list[JobReport]] = {}
    states: list[tuple[EncodingStage, StageState]] = []
    try:
        if not report.remaining:
            states += stage_registry.item_states(store, config)
            jobs |= _add_states(report, store, states, listed)
        plan = current_plan(store, config)
    except DamageError:
        raise
    except LatentpressError as error:
        return _stop_at(report, error)
    roles = plan.active.column("role")
    samples = pc.sum(pc.is_in(roles, value_set=pa.array(TRAINED_ROLES))).as_py() or 0
    rejected = rejects.read_stage(store, "bucket").get(f"{config.model.family}-{config.model.task}", [])
    rows.append(_row("bucket", "samples", samples, 0, len(rejected), listed["plans"]))
    try:
        of_plan = [(stage, stage.state(store, config, plan)) for stage in stage_registry.required_stages(config)]
    except WeightsError as error:
        return _stop_at(report, error)
    jobs |= _add_states(report, store, of_plan, listed)
    states += of_plan
    for column in ("units", "jobs", "items_per_second", "left"):
        for row in rows if any(column in row for row in rows) else ():
            row.setdefault(column, "")
    if not everything:
        jobs = {stage: [job for job in reports if job.state not in ENDED] for stage, reports in jobs.items()}
    report.details |= list_jobs(jobs, for_people=not options.json)
    report.details["training_set"] = _describe_training_set(store, config, plan)
    versions = _library_versions(store, states, listed)
    if shown := [row for row in versions if everything or MIXED in row["libraries"]]:
        report.details["made_with"] = shown
    if everything:
        report.details["under_root_mib"] = {
            top: _mib(entries) for top, entries in listed.items() if entries or top in LISTED_FOLDERS[:4]
        }
    output = Path(config.output)
    folders = list(output.iterdir()) if output.is_dir() else []
    runs = sorted(path.name for path in folders if any((path / name).exists() for name in RUN_FILES))
    report.details["runs"] = runs or "none yet"
    return report


def _stop_at(report: Report, error: LatentpressError) -> Report:
    """The report as far as it goes if a plan, a media table or a checkpoint's files are not there."""
    if isinstance(error, WeightsError):
        report.details["checkpoint"] = error.message
    report.next_steps = [step for step in report.next_steps if step != "latentpress discover"] + [error.next_step]
    report.remaining = report.remaining or 1
    return report


def _add_states(
    report: Report,
    store: Store,
    states: Sequence[tuple[EncodingStage, StageState]],
    listed: Mapping[str, Sequence[Entry]],
) -> dict[str, list[JobReport]]:
    """Add a row for each stage; returns the reports of its jobs."""
    jobs = read_reports(store, {stage.name: state.fingerprint for stage, state in states}, time.time())
    for stage, state in states:
        row = _stage_row(stage, state, listed[stage.kind], jobs[stage.name])
        report.details["stages"].append(row)
        if row["remaining"]:
            report.next_steps.append(f"latentpress {stage.name}")
        report.remaining += row["remaining"]
        report.done += row["done"]
    return jobs


def _row(stage: str, what: str, done: int, remaining: int, rejected: int, entries: Sequence[Entry]) -> TableRow:
    counts = {"done": done, "remaining": remaining, "rejected": rejected}
    return {"stage": stage, "what": what, **counts, "mib": _mib(entries)}


def _stage_row(stage: EncodingStage, state: StageState, listed: Sequence[Entry], jobs: Sequence[JobReport]) -> TableRow:
    todo = {unit.unit_id for unit in state.remaining_units()}
    remaining = sum(state.counts[unit] for unit in todo)
    rejected = sum(len(rows) for unit, rows in state.rejects_by_unit.items() if unit not in todo)
    entries = [entry for entry in listed if entry.name.startswith(f"{state.fingerprint}/")]
    what, done = MEMBER_NAMES[stage.member_kind], len(state.wanted_ids) - remaining - rejected
    row = _row(stage.name, what, done, remaining, rejected, entries)
    row["units"] = f"{len(state.units) - len(todo)} of {len(state.units)}"
    if jobs:
        row["jobs"] = count_states(jobs)
    if remaining and (rate := sum_rates(jobs)):
        row |= {"items_per_second": format_rate(rate), "left": format_duration(remaining / rate)}
    return row


def _describe_training_set(store: Store, config: Config, plan: Plan) -> str:
    """The set that this configuration makes, and whether it is of the current plan; or why there is none."""
    try:
        name = set_lookup.find_configured_id(store, config)
    except SetError as error:
        return f"none yet: {error.message}: latentpress index"
    made_of = store.read_record(f"sets/{name}/set.json", SetRecord).generation
    return f"sets/{name}" + ("" if made_of == plan.name else f", of the older plan {made_of}: latentpress index")


def _library_versions(
    store: Store, states: Sequence[tuple[EncodingStage, StageState]], listed: Mapping[str, Sequence[Entry]]
) -> list[TableRow]:
    """List for each stage the libraries and hardware that made the plan's shards, those that differ marked as MIXED:
    bytes may then differ within one configuration. Of many shards some are opened, from the oldest to the newest, since
    versions change in time."""
    readers = ReaderPool(store)
    rows = []
    for stage, state in states:
        modified = {f"{stage.kind}/{entry.name}": entry.modified for entry in listed[stage.kind]}
        paths = sorted(state.done.values(), key=lambda path: (modified.get(path, 0.0), path))
        opened = spread_evenly(pa.array(paths, pa.string()), MAX_OPENED_SHARDS)
        versions, damaged = defaultdict[str, set[str]](set), list[str]()
        for path in opened:
            try:
                for key, value in _flatten(readers.meta(path).provenance):
                    versions[key].add(value)
            except DamageError:
                damaged.append(f"{path} can't be read: latentpress verify")
        mixed = [f"{key} {' | '.join(sorted(values))}" for key, values in sorted(versions.items()) if len(values) > 1]
        same = [f"{key} {value}" for key, (value, *more) in sorted(versions.items()) if not more]
        parts = [f"{MIXED}: {', '.join(mixed)}"] if mixed else []
        parts += [", ".join(same)] if same else []
        parts += damaged + ([f"of {len(opened)} of {len(paths)} shards"] if len(opened) < len(paths) else [])
        rows.append({"stage": stage.name, "libraries": "; ".join(parts) or "none yet"})
    readers.close()
    return rows


def _flatten(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in provenance.items():
        yield from _flatten(value) if isinstance(value, Mapping) else [(key, str(value))]


def _mib(entries: Sequence[Entry]) -> float:
    return round(sum(entry.size for entry in entries) / 2**20, 2)


def refresh_until_done(build_report: Callable[[], Report], console: Console, every: float) -> Report:
    """Show a new report every `every` seconds, less often if building one takes long, until nothing remains, training
    is finished and no `run` goes on. Ctrl-C ends with exit code 0."""
    report = Report(program="status")
    try:
        with console.live_display() as show:
            while True:
                started = time.monotonic()
                report = build_report()
                stages, training = (report.details.get(key, []) for key in ("stages", "training"))
                lines = []
                for row in stages:
                    line = f"{row['stage']}: {row['done']} {row['what']} done, {row['remaining']} remaining"
                    line += f", {row['rejected']} rejected" if row["rejected"] else ""
                    lines.append(line + (f", jobs: {row['jobs']}" if row.get("jobs") else ""))
                lines += [f"train: {row['state']}, step {row['step']}" for row in training]
                running = any(row["state"] == "running" for row in training) or report.details.get("run_goes_on", False)
                if not running and not any("running" in row.get("jobs", "") for row in stages):
                    lines.append(NOTHING_RUNS)
                show(dict(zip(lines, lines, strict=True)), report.summary())
                if not report.remaining and not running and all(row["state"] == "finished" for row in training):
                    return report
                took = time.monotonic() - started
                pause(max(every - took, took * (MIN_PAUSE_FACTOR - 1)))
    except KeyboardInterrupt:
        report.details["stopped"] = f"watching, with {report.remaining} items remaining"
        report.remaining = 0
        return report


app = make_app(
    "status",
    "Per stage: done, remaining, rejected, bytes.",
    run,
    examples=["--watch", "--rejects", "--csv rejects.csv"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()
