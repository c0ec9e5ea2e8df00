"""status: for each stage what is done, what remains, what was set aside, and how many bytes lie where.

What it costs grows with the number of shards, of which names, sizes and times are listed, and a few are opened.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
import typer

from cache import current, rejects
from cache.damage import DamageError
from cache.files import Entry
from cache.generations import Generation
from cache.shard_io import Readers
from cache.store import Store
from cache.trainset import SetError
from cache.weights import WeightsError
from schemas.config.pipeline import VALIDATION, Config
from schemas.console import Console, Options, Report, program
from schemas.errors import LatentpressError
from stages import encoders, rejected, watching
from stages.mediatable import whole_table
from stages.plan import current_plan
from stages.stage import EncodingStage, Work, refuse_shard

OPENED = 32  # shards of each stage of which the libraries are looked up
SHOWN = ("media", "plans", *encoders.KINDS, "sets", "damaged")

OF_RUNS = ("config.yaml", "metrics.jsonl", "checkpoints")  # what the trainer writes before anything else

Row = dict[str, Any]


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
    refuse_shard(options, "status")
    if rejects_too:
        return rejected.report(config, options)
    if watch and not options.dry_run:
        return watching.until_done(lambda: look(config, options), console, every)
    return look(config, options)


def look(config: Config, options: Options) -> Report:
    """How things stand now."""
    store = Store(config.root)
    listed = {top: store.entries(top) for top in SHOWN}
    report = Report(program="status", dry_run=options.dry_run)
    rows = [_discover(store, config, _mib(listed["media"]))]
    report.remaining = rows[0]["remaining"]
    report.next_steps += ["latentpress discover"] if report.remaining else []
    try:
        plan = current_plan(store, config)
    except LatentpressError as error:
        report.next_steps = [error.next_step]
        report.details["stages"] = rows
        report.remaining = report.remaining or 1
        return report
    rows.append(_bucket(store, config, plan, _mib(listed["plans"])))
    try:
        works = [(stage, stage.work(store, config, plan)) for stage in encoders.wanted(config)]
    except WeightsError as error:
        report.details = {"stages": rows, "checkpoint": str(error)}
        report.next_steps = [error.next_step]
        report.remaining = report.remaining or 1
        return report
    for stage, work in works:
        row = _encoding(stage, work, listed[stage.kind])
        rows.append(row)
        if row["remaining"]:
            report.next_steps.append(f"latentpress {stage.name}")
        report.remaining += row["remaining"]
        report.done += row["done"]
    for column in ("items_per_second", "left") if report.remaining else ():
        for row in rows:
            row.setdefault(column, "")
    report.details["stages"] = rows
    report.details["training_set"] = _training_set(store, config, plan)
    report.details["made_with"] = _made_with(store, works, listed)
    report.details["under_root_mib"] = {
        top: _mib(entries) for top, entries in listed.items() if entries or top in SHOWN[:4]
    }
    report.details["runs"] = _runs(config)
    return report


def _discover(store: Store, config: Config, mib: float) -> Row:
    datasets = [dataset for dataset in config.datasets if not dataset.disabled]
    whole = [whole_table(store, dataset.id) for dataset in datasets]
    remaining = sum(table is None for table in whole)
    aside = rejects.read(store, "discover")
    return {
        "stage": "discover",
        "what": "files",
        "done": sum(len(table) for table in whole if table is not None),
        "remaining": remaining,
        "set_aside": sum(len(aside.get(dataset.id, [])) for dataset in datasets),
        "mib": mib,
    }


def _bucket(store: Store, config: Config, plan: Generation, mib: float) -> Row:
    aside = rejects.read(store, "bucket").get(f"{config.model.family}-{config.model.task}", [])
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


def _encoding(stage: EncodingStage, work: Work, listed: Sequence[Entry]) -> Row:
    todo = {unit.unit_id for unit in work.todo}
    remaining = sum(work.counts[unit] for unit in todo)
    aside = sum(len(rows) for unit, rows in work.lists.items() if unit not in todo)
    entries = [entry for entry in listed if entry.name.startswith(f"{work.fingerprint}/")]
    row = {
        "stage": stage.name,
        "what": "texts" if stage.of == "text" else "samples",
        "done": len(work.wanted) - remaining - aside,
        "remaining": remaining,
        "set_aside": aside,
        "mib": _mib(entries),
    }
    if remaining:
        row |= watching.pace(_published(work, entries), remaining, time.time())
    return row


def _published(work: Work, entries: Sequence[Entry]) -> list[tuple[float, int]]:
    """(time, members) of the plan's shards that are there."""
    written = {entry.name: entry.modified for entry in entries}
    shards = ((path.partition("/")[2], unit) for unit, path in work.done.items() if unit in work.counts)
    return [(written[name], work.counts[unit]) for name, unit in shards if name in written]


def _training_set(store: Store, config: Config, plan: Generation) -> str:
    """The set that this configuration makes, and whether it is of the plan in force; or why there is none."""
    try:
        name = current.find(store, config)
    except SetError as error:
        return f"none yet: {error.message}: latentpress index"
    made_of = store.read_json(f"sets/{name}/set.json")["generation"]
    return f"sets/{name}" + ("" if made_of == plan.name else f", of the older plan {made_of}: latentpress index")


def _made_with(
    store: Store, works: Sequence[tuple[EncodingStage, Work]], listed: Mapping[str, Sequence[Entry]]
) -> list[Row]:
    """For each stage what the plan's shards say of the libraries and the machine that made them, and MIXED before what
    differs among them: their bytes may, though the configuration is one.

    Of many shards some are opened, from the oldest to the newest, since versions change in time.
    """
    readers = Readers(store)
    told = []
    for stage, work in works:
        written = {f"{stage.kind}/{entry.name}": entry.modified for entry in listed[stage.kind]}
        paths = [path for _, path in sorted((written.get(path, 0.0), path) for path in work.done.values())]
        told.append({"stage": stage.name, "libraries": _told(readers, paths)})
    readers.close()
    return told


def _told(readers: Readers, paths: Sequence[str]) -> str:
    found: dict[str, set[str]] = {}
    damaged = []
    opened = _spread(paths)
    for path in opened:
        try:
            for key, value in _flat(readers.meta(path).provenance):
                found.setdefault(key, set()).add(value)
        except DamageError:
            damaged.append(f"{path} can't be read: latentpress verify")
    mixed = [f"{key} {' | '.join(sorted(values))}" for key, values in sorted(found.items()) if len(values) > 1]
    alike = [f"{key} {value}" for key, (value, *more) in sorted(found.items()) if not more]
    parts = [f"MIXED: {', '.join(mixed)}"] if mixed else []
    parts += [", ".join(alike)] if alike else []
    parts += damaged + ([f"of {len(opened)} of {len(paths)} shards"] if len(opened) < len(paths) else [])
    return "; ".join(parts) or "none yet"


def _flat(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in provenance.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, str(value)


def _spread(paths: Sequence[str]) -> list[str]:
    """At most OPENED of them, the first and the last among them."""
    if len(paths) <= OPENED:
        return list(paths)
    return [paths[number * (len(paths) - 1) // (OPENED - 1)] for number in range(OPENED)]


def _runs(config: Config) -> list[str]:
    output = Path(config.output)
    if not output.is_dir():
        return []
    return sorted(path.name for path in output.iterdir() if any((path / name).exists() for name in OF_RUNS))


def _mib(entries: Sequence[Entry]) -> float:
    return round(sum(entry.size for entry in entries) / 2**20, 2)


app = program("status", "Per stage: done, remaining, set aside, bytes.", run, examples=["--watch", "--rejects"])

if __name__ == "__main__":
    app()
