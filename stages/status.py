"""status: for each stage what is done, what remains, what was set aside, and how many bytes lie where."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from cache import rejects
from cache.generations import Generation
from cache.shard import Readers
from cache.store import Store
from schemas.config import VALIDATION, Config
from schemas.console import Console, Options, Report, program
from schemas.errors import LatentpressError
from stages import encode_latents, encode_text
from stages.index import pointer
from stages.mediatable import whole_table
from stages.plan import current_plan
from stages.stage import Work, refuse_shard

Row = dict[str, Any]


def run(config: Config, options: Options, console: Console) -> Report:
    refuse_shard(options, "status")
    store = Store(config.root)
    report = Report(program="status", dry_run=options.dry_run)
    rows = [_discover(store, config)]
    report.remaining = rows[0]["remaining"]
    report.next_steps += ["latentpress discover"] if report.remaining else []
    try:
        plan = current_plan(store, config)
    except LatentpressError as error:
        report.next_steps = [error.next_step]
        report.details["stages"] = rows
        report.remaining = report.remaining or 1
        return report
    rows.append(_bucket(store, config, plan))
    works = {stage.STAGE.name: stage.STAGE.work(store, config, plan) for stage in (encode_text, encode_latents)}
    for name, work in works.items():
        row = _encoding(store, name, work)
        rows.append(row)
        if row["remaining"]:
            report.next_steps.append(f"latentpress {name}")
        report.remaining += row["remaining"]
        report.done += row["done"]
    report.details["stages"] = rows
    report.details["training set"] = _training_set(store, config, plan)
    report.details["libraries of the shards"] = _libraries(store, works.values())
    report.details["MiB under root"] = {
        kind: _mib(store, kind) for kind in ("media", "plans", "text", "latents", "sets")
    }
    report.details["runs"] = _runs(config)
    return report


def _discover(store: Store, config: Config) -> Row:
    datasets = [dataset for dataset in config.datasets if not dataset.disabled]
    whole = [whole_table(store, dataset.id) for dataset in datasets]
    remaining = sum(table is None for table in whole)
    aside = rejects.read(store, "discover")
    return {
        "stage": "discover",
        "what": "files",
        "done": sum(len(table) for table in whole if table is not None),
        "remaining": remaining,
        "set aside": sum(len(aside.get(dataset.id, [])) for dataset in datasets),
        "MiB": _mib(store, "media"),
    }


def _bucket(store: Store, config: Config, plan: Generation) -> Row:
    aside = rejects.read(store, "bucket").get(f"{config.model.family}-{config.model.task}", [])
    roles = plan.active.column("role")
    samples = len(roles) - (pc.sum(pc.equal(roles, VALIDATION)).as_py() or 0)
    return {
        "stage": "bucket",
        "what": "samples",
        "done": samples,
        "remaining": 0,
        "set aside": len(aside),
        "MiB": _mib(store, "plans"),
    }


def _encoding(store: Store, stage: str, work: Work) -> Row:
    kind = "text" if stage == "encode-text" else "latents"
    todo = {unit.unit_id for unit in work.todo}
    remaining = sum(work.counts[unit] for unit in todo)
    aside = sum(len(rows) for unit, rows in work.lists.items() if unit not in todo)
    return {
        "stage": stage,
        "what": "texts" if kind == "text" else "samples",
        "done": len(work.wanted) - remaining - aside,
        "remaining": remaining,
        "set aside": aside,
        "MiB": _mib(store, f"{kind}/{work.fingerprint}"),
    }


def _training_set(store: Store, config: Config, plan: Generation) -> str:
    """The newest set of this family and task, and whether it is of the plan in force."""
    rel = pointer(config.model.family, config.model.task)
    if not store.exists(rel):
        return "none yet: latentpress index"
    name = json.loads(store.read_bytes(rel))["id"]
    if not store.exists(f"sets/{name}/set.json"):
        return f"sets/{name}, which is not there: latentpress index"
    made_of = json.loads(store.read_bytes(f"sets/{name}/set.json"))["generation"]
    return f"sets/{name}" + ("" if made_of == plan.name else f", of the older plan {made_of}: latentpress index")


def _libraries(store: Store, works: Iterable[Work]) -> str:
    """The versions that the plan's shards were made with; more than one set of them is worth a look."""
    readers = Readers(store)
    found = set()
    for work in works:
        for path in work.done.values():
            libraries = readers.meta(path).provenance["libraries"]
            found.add(", ".join(f"{name} {version}" for name, version in sorted(libraries.items())))
    if len(found) > 1:
        return "MIXED: " + " | ".join(sorted(found))
    return next(iter(found), "none yet")


def _runs(config: Config) -> list[str]:
    output = Path(config.output)
    return sorted(path.name for path in output.iterdir() if path.is_dir()) if output.is_dir() else []


def _mib(store: Store, prefix: str) -> float:
    return round(sum(_sizes(store, prefix)) / 2**20, 2)


def _sizes(store: Store, prefix: str) -> Iterable[int]:
    return (store.size(f"{prefix}/{name}") for name in store.names(prefix))


app = program("status", "Per stage: done, remaining, set aside, bytes.", run)

if __name__ == "__main__":
    app()
