"""status: shows the finished, remaining and rejected items and the size of each stage, and the progress of training.

The cost grows with the number of shards: names, sizes and times are listed, and a few shards are opened.
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

MAX_OPENED_SHARDS = 32  # shards per stage that are opened to read their library versions
LISTED_FOLDERS = ("media", "plans", *stage_registry.SHARD_KINDS, "sets", "damaged")
RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints")  # the first files that the trainer writes
ENDED = ("ended", "stopped")  # states of jobs that are shown only with --all
MIXED = "MIXED"
NOTHING_RUNS = "no run, training or job is active"
MIN_PAUSE_FACTOR = 4  # building reports takes at most 1/4 of the time

TableRow = dict[str, Any]


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until all stages and training are finished; Ctrl-C quits.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="With --watch: seconds between refreshes.")
    ] = 5.0,
    only_rejects: Annotated[
        bool,
        typer.Option("--rejects", help="Show only rejected items, by reason, with the remedy."),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also show ended jobs and library versions; with --rejects show all items."),
    ] = False,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Like --rejects, and also write all rejected items to a CSV file."),
    ] = None,
) -> Report:
    if only_rejects or csv_file is not None:
        return report_rejects(config, options, everything, csv_file)
    everything = everything or options.json
    if watch and not options.dry_run:
        return refresh_until_done(lambda: build_report(config, options, everything), console, every)
    return build_report(config, options, everything)


def build_report(config: Config, options: Options, everything: bool = True) -> Report:
    """Make the report. everything: whether it includes ended jobs, library versions and sizes of the root's folders."""
    store = Store(config.root)
    entries = {top: store.list_files(top) for top in LISTED_FOLDERS}
    report = Report(program="status", dry_run=options.dry_run)
    datasets = [dataset.id for dataset in config.datasets if not dataset.disabled]
    tables = [find_media_table(store, name) for name in datasets]
    rejected_files = rejects.read_stage(store, "discover")
    files = sum(len(table) for table in tables if table is not None)
    report.remaining = sum(table is None for table in tables)
    rejected_count = sum(len(rejected_files.get(name, [])) for name in datasets)
    rows = [_row("discover", "files", files, report.remaining, rejected_count, entries["media"])]
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
            jobs |= _add_states(report, store, states, entries)
        plan = current_plan(store, config)
    except DamageError:
        raise
    except LatentpressError as error:
        return _stop_at(report, error)
    roles = plan.active.column("role")
    samples = pc.sum(pc.is_in(roles, value_set=pa.array(TRAINED_ROLES))).as_py() or 0
    rejected = rejects.read_stage(store, "bucket").get(f"{config.model.family}-{config.model.task}", [])
    rows.append(_row("bucket", "samples", samples, 0, len(rejected), entries["plans"]))
    try:
        sample_states = [(stage, stage.state(store, config, plan)) for stage in stage_registry.required_stages(config)]
    except WeightsError as error:
        return _stop_at(report, error)
    jobs |= _add_states(report, store, sample_states, entries)
    states += sample_states
    for column in ("units", "jobs", "items_per_second", "left"):
        for row in rows if any(column in row for row in rows) else ():
            row.setdefault(column, "")
    if not everything:
        jobs = {stage: [job for job in reports if job.state not in ENDED] for stage, reports in jobs.items()}
    report.details |= list_jobs(jobs, for_people=not options.json)
    report.details["training_set"] = _describe_training_set(store, config, plan)
    versions = _library_versions(store, states, entries)
    if version_rows := [row for row in versions if everything or MIXED in row["libraries"]]:
        report.details["made_with"] = version_rows
    if everything:
        report.details["under_root_mib"] = {
            top: _mib(files) for top, files in entries.items() if files or top in LISTED_FOLDERS[:4]
        }
    output = Path(config.output)
    folders = list(output.iterdir()) if output.is_dir() else []
    runs = sorted(path.name for path in folders if any((path / name).exists() for name in RUN_FILES))
    report.details["runs"] = runs or "none yet"
    return report


def _stop_at(report: Report, error: LatentpressError) -> Report:
    """Complete the report if a plan, a media table or a file of the checkpoint is missing."""
    if isinstance(error, WeightsError):
        report.details["checkpoint"] = error.message
    report.next_steps = [step for step in report.next_steps if step != "latentpress discover"] + [error.next_step]
    report.remaining = report.remaining or 1
    return report


def _add_states(
    report: Report,
    store: Store,
    states: Sequence[tuple[EncodingStage, StageState]],
    entries: Mapping[str, Sequence[Entry]],
) -> dict[str, list[JobReport]]:
    """Add a row for each stage. Returns stage -> reports of its jobs."""
    jobs = read_reports(store, {stage.name: state.fingerprint for stage, state in states}, time.time())
    for stage, state in states:
        row = _stage_row(stage, state, entries[stage.kind], jobs[stage.name])
        report.details["stages"].append(row)
        if row["remaining"]:
            report.next_steps.append(f"latentpress {stage.name}")
        report.remaining += row["remaining"]
        report.done += row["done"]
    return jobs


def _row(stage: str, noun: str, encoded: int, remaining: int, rejected: int, entries: Sequence[Entry]) -> TableRow:
    counts = {"done": encoded, "remaining": remaining, "rejected": rejected}
    return {"stage": stage, "what": noun, **counts, "mib": _mib(entries)}


def _stage_row(
    stage: EncodingStage, state: StageState, entries: Sequence[Entry], jobs: Sequence[JobReport]
) -> TableRow:
    todo = {unit.unit_id for unit in state.remaining_units()}
    remaining = sum(state.counts[unit] for unit in todo)
    rejected = sum(len(rows) for unit, rows in state.rejects_by_unit.items() if unit not in todo)
    cache_entries = [entry for entry in entries if entry.name.startswith(f"{state.fingerprint}/")]
    noun, encoded = MEMBER_NAMES[stage.member_kind], len(state.wanted_ids) - remaining - rejected
    row = _row(stage.name, noun, encoded, remaining, rejected, cache_entries)
    row["units"] = f"{len(state.units) - len(todo)} of {len(state.units)}"
    if jobs:
        row["jobs"] = count_states(jobs)
    if remaining and (rate := sum_rates(jobs)):
        row |= {"items_per_second": format_rate(rate), "left": format_duration(remaining / rate)}
    return row


def _describe_training_set(store: Store, config: Config, plan: Plan) -> str:
    """Describe the set of this configuration: whether it exists, and whether it was made of the current plan."""
    try:
        name = set_lookup.find_configured_id(store, config)
    except SetError as error:
        return f"none yet: {error.message}: latentpress index"
    generation = store.read_record(f"sets/{name}/set.json", SetRecord).generation
    return f"sets/{name}" + ("" if generation == plan.name else f", of the older plan {generation}: latentpress index")


def _library_versions(
    store: Store, states: Sequence[tuple[EncodingStage, StageState]], entries: Mapping[str, Sequence[Entry]]
) -> list[TableRow]:
    """List the libraries and hardware that made the plan's shards, for each stage. Differences are marked as MIXED,
    because bytes may then differ within one configuration. If there are many shards, only some are opened, evenly from
    the oldest to the newest, since versions change over time."""
    readers = ReaderPool(store)
    rows = []
    for stage, state in states:
        modified = {f"{stage.kind}/{entry.name}": entry.modified for entry in entries[stage.kind]}
        paths = sorted(state.shard_paths.values(), key=lambda path: (modified.get(path, 0.0), path))
        opened_paths = spread_evenly(pa.array(paths, pa.string()), MAX_OPENED_SHARDS)
        versions, damage_notes = defaultdict[str, set[str]](set), list[str]()
        for path in opened_paths:
            try:
                for key, value in _flatten(readers.meta(path).provenance):
                    versions[key].add(value)
            except DamageError:
                damage_notes.append(f"{path} cannot be read: latentpress verify")
        sorted_versions = sorted(versions.items())
        mixed_versions = [f"{key} {' | '.join(sorted(values))}" for key, values in sorted_versions if len(values) > 1]
        equal_versions = [f"{key} {value}" for key, (value, *more) in sorted_versions if not more]
        notes = [f"{MIXED}: {', '.join(mixed_versions)}"] if mixed_versions else []
        notes += [", ".join(equal_versions)] if equal_versions else []
        notes += damage_notes
        notes += [f"from {len(opened_paths)} of {len(paths)} shards"] if len(opened_paths) < len(paths) else []
        rows.append({"stage": stage.name, "libraries": "; ".join(notes) or "none yet"})
    readers.close()
    return rows


def _flatten(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in provenance.items():
        yield from _flatten(value) if isinstance(value, Mapping) else [(key, str(value))]


def _mib(entries: Sequence[Entry]) -> float:
    return round(sum(entry.size for entry in entries) / 2**20, 2)


def refresh_until_done(build_report: Callable[[], Report], console: Console, every: float) -> Report:
    """Show a new report every `every` seconds, or less often if building a report takes long. Returns the last report
    when no work remains, training is finished and no `run` is active, or after Ctrl-C, with exit code 0."""
    report = Report(program="status")
    try:
        with console.live_display() as show:
            while True:
                start_time = time.monotonic()
                report = build_report()
                stages, training = (report.details.get(key, []) for key in ("stages", "training"))
                lines = []
                for row in stages:
                    line = f"{row['stage']}: {row['done']} {row['what']} done, {row['remaining']} remaining"
                    line += f", {row['rejected']} rejected" if row["rejected"] else ""
                    lines.append(line + (f", jobs: {row['jobs']}" if row.get("jobs") else ""))
                lines += [f"train: {row['state']}, step {row['step']}" for row in training]
                is_running = report.details.get("run_goes_on", False)
                is_running = is_running or any(row["state"] == "running" for row in training)
                if not is_running and not any("running" in row.get("jobs", "") for row in stages):
                    lines.append(NOTHING_RUNS)
                show(dict(zip(lines, lines, strict=True)), report.summary())
                if not report.remaining and not is_running and all(row["state"] == "finished" for row in training):
                    return report
                duration = time.monotonic() - start_time
                pause(max(every - duration, duration * (MIN_PAUSE_FACTOR - 1)))
    except KeyboardInterrupt:
        report.details["stopped"] = f"watching, with {report.remaining} items remaining"
        report.remaining = 0
        return report


app = make_app(
    "status",
    "Show the finished, remaining and rejected items and the size of each stage, and the progress of training.",
    run,
    examples=["--watch", "--rejects", "--csv rejects.csv"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()
