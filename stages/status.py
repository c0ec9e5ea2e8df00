"""status: for each stage what is done, what remains, what was set aside, and how many bytes lie where.

What it costs grows with the number of shards, of which names, sizes and times are listed, and a few are opened.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
import typer

from cache import rejects, set_pointers
from cache.damage import DamageError
from cache.files import Entry
from cache.plans import Plan
from cache.shard_io import ReaderPool
from cache.store import Store
from cache.trainset import SetError
from cache.weights import WeightsError
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from stages.discovery.media_table import find_media_table
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage, StageState, refuse_partition
from stages.maintenance import live_status, reject_report
from stages.planning.plan_lookup import current_plan

MAX_OPENED_SHARDS = 32  # shards of each stage of which the libraries are looked up
LISTED_FOLDERS = ("media", "plans", *stage_registry.SHARD_KINDS, "sets", "damaged")

RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints")  # what the trainer writes before anything else

TableRow = dict[str, Any]


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, with rates, until nothing remains or Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="Between two looks of --watch.")
    ] = 5.0,
    rejects_too: Annotated[
        bool, typer.Option("--rejects", help="List every item that was set aside instead, with reason and remedy.")
    ] = False,
) -> Report:
    refuse_partition(options, "status")
    if rejects_too:
        return reject_report.report_rejects(config, options)
    if watch and not options.dry_run:
        return live_status.refresh_until_done(lambda: build_report(config, options), console, every)
    return build_report(config, options)


def build_report(config: Config, options: Options) -> Report:
    """How things stand now."""
    store = Store(config.root)
    listed = {top: store.list_files(top) for top in LISTED_FOLDERS}
    report = Report(program="status", dry_run=options.dry_run)
    rows = [_discover_row(store, config, _mib(listed["media"]))]
    report.remaining = rows[0]["remaining"]
    report.next_steps += ["latentpress discover"] if report.remaining else []
    try:
        plan = current_plan(store, config)
    except LatentpressError as error:
        report.next_steps = [error.next_step]
        report.details["stages"] = rows
        report.remaining = report.remaining or 1
        return report
    rows.append(_bucket_row(store, config, plan, _mib(listed["plans"])))
    try:
        works = [(stage, stage.state(store, config, plan)) for stage in stage_registry.required_stages(config)]
    except WeightsError as error:
        report.details = {"stages": rows, "checkpoint": str(error)}
        report.next_steps = [error.next_step]
        report.remaining = report.remaining or 1
        return report
    for stage, work in works:
        row = _stage_row(stage, work, listed[stage.kind])
        rows.append(row)
        if row["remaining"]:
            report.next_steps.append(f"latentpress {stage.name}")
        report.remaining += row["remaining"]
        report.done += row["done"]
    for column in ("items_per_second", "left") if report.remaining else ():
        for row in rows:
            row.setdefault(column, "")
    report.details["stages"] = rows
    report.details["training_set"] = _describe_training_set(store, config, plan)
    report.details["made_with"] = _library_versions(store, works, listed)
    report.details["under_root_mib"] = {
        top: _mib(entries) for top, entries in listed.items() if entries or top in LISTED_FOLDERS[:4]
    }
    report.details["runs"] = _list_runs(config)
    return report


def _discover_row(store: Store, config: Config, mib: float) -> TableRow:
    datasets = [dataset for dataset in config.datasets if not dataset.disabled]
    whole = [find_media_table(store, dataset.id) for dataset in datasets]
    remaining = sum(table is None for table in whole)
    aside = rejects.read_stage(store, "discover")
    return {
        "stage": "discover",
        "what": "files",
        "done": sum(len(table) for table in whole if table is not None),
        "remaining": remaining,
        "set_aside": sum(len(aside.get(dataset.id, [])) for dataset in datasets),
        "mib": mib,
    }


def _bucket_row(store: Store, config: Config, plan: Plan, mib: float) -> TableRow:
    aside = rejects.read_stage(store, "bucket").get(f"{config.model.family}-{config.model.task}", [])
    roles = plan.active.column("role")
    samples = len(roles) - (pc.sum(pc.equal(roles, VALIDATION)).as_py() or 0)
    return {
        "stage": "bucket",
        "what": "samples",
        "done": samples,
        "remaining": 0,
        "set_aside": len(aside),
        "mib": mib,
    }


def _stage_row(stage: EncodingStage, work: StageState, listed: Sequence[Entry]) -> TableRow:
    todo = {unit.unit_id for unit in work.todo}
    remaining = sum(work.counts[unit] for unit in todo)
    aside = sum(len(rows) for unit, rows in work.rejects_by_unit.items() if unit not in todo)
    entries = [entry for entry in listed if entry.name.startswith(f"{work.fingerprint}/")]
    row = {
        "stage": stage.name,
        "what": "texts" if stage.member_kind == "text" else "samples",
        "done": len(work.wanted_ids) - remaining - aside,
        "remaining": remaining,
        "set_aside": aside,
        "mib": _mib(entries),
    }
    if remaining:
        row |= live_status.estimate_rate(_published_counts(work, entries), remaining, time.time())
    return row


def _published_counts(work: StageState, entries: Sequence[Entry]) -> list[tuple[float, int]]:
    """(time, members) of the plan's shards that are there."""
    written = {entry.name: entry.modified for entry in entries}
    shards = ((path.partition("/")[2], unit) for unit, path in work.done.items() if unit in work.counts)
    return [(written[name], work.counts[unit]) for name, unit in shards if name in written]


def _describe_training_set(store: Store, config: Config, plan: Plan) -> str:
    """The set that this configuration makes, and whether it is of the plan in force; or why there is none."""
    try:
        name = set_pointers.find_configured_id(store, config)
    except SetError as error:
        return f"none yet: {error.message}: latentpress index"
    made_of = store.read_json(f"sets/{name}/set.json")["generation"]
    return f"sets/{name}" + ("" if made_of == plan.name else f", of the older plan {made_of}: latentpress index")


def _library_versions(
    store: Store, works: Sequence[tuple[EncodingStage, StageState]], listed: Mapping[str, Sequence[Entry]]
) -> list[TableRow]:
    """For each stage what the plan's shards say of the libraries and the machine that made them, and MIXED before what
    differs among them: their bytes may, though the configuration is one.

    Of many shards some are opened, from the oldest to the newest, since versions change in time.
    """
    readers = ReaderPool(store)
    told = []
    for stage, work in works:
        written = {f"{stage.kind}/{entry.name}": entry.modified for entry in listed[stage.kind]}
        paths = [path for _, path in sorted((written.get(path, 0.0), path) for path in work.done.values())]
        told.append({"stage": stage.name, "libraries": _describe_provenance(readers, paths)})
    readers.close()
    return told


def _describe_provenance(readers: ReaderPool, paths: Sequence[str]) -> str:
    found: dict[str, set[str]] = {}
    damaged = []
    opened = _spread_evenly(paths)
    for path in opened:
        try:
            for key, value in _flatten(readers.meta(path).provenance):
                found.setdefault(key, set()).add(value)
        except DamageError:
            damaged.append(f"{path} can't be read: latentpress verify")
    mixed = [f"{key} {' | '.join(sorted(values))}" for key, values in sorted(found.items()) if len(values) > 1]
    alike = [f"{key} {value}" for key, (value, *more) in sorted(found.items()) if not more]
    parts = [f"MIXED: {', '.join(mixed)}"] if mixed else []
    parts += [", ".join(alike)] if alike else []
    parts += damaged + ([f"of {len(opened)} of {len(paths)} shards"] if len(opened) < len(paths) else [])
    return "; ".join(parts) or "none yet"


def _flatten(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in provenance.items():
        if isinstance(value, Mapping):
            yield from _flatten(value)
        else:
            yield key, str(value)


def _spread_evenly(paths: Sequence[str]) -> list[str]:
    """At most MAX_OPENED_SHARDS of them, the first and the last among them."""
    if len(paths) <= MAX_OPENED_SHARDS:
        return list(paths)
    return [paths[number * (len(paths) - 1) // (MAX_OPENED_SHARDS - 1)] for number in range(MAX_OPENED_SHARDS)]


def _list_runs(config: Config) -> list[str]:
    output = Path(config.output)
    if not output.is_dir():
        return []
    return sorted(path.name for path in output.iterdir() if any((path / name).exists() for name in RUN_FILES))


def _mib(entries: Sequence[Entry]) -> float:
    return round(sum(entry.size for entry in entries) / 2**20, 2)


app = make_app("status", "Per stage: done, remaining, set aside, bytes.", run, examples=["--watch", "--rejects"])

if __name__ == "__main__":
    app()
