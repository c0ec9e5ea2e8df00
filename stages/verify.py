"""verify: read every shard and table completely, compare them with their checksums and plans, and repair damage.

Several shards are checked at once, in threads: reading, hashing and searching for NaN all release Python's lock.
"""

import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from math import ceil
from time import sleep
from typing import Annotated, Any

import typer

from cache.sets.caption_edits import FOLDER as EDITS
from cache.sets.plans import list_plans
from cache.shards import shard
from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.store import STALE_S, Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.encoding import cores
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import bucket, index
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage
from stages.maintenance import checks
from stages.maintenance.checks import DamageByPath, UnmappedStore

MAX_WORKERS = 8  # by default: a disk is faster with a few requests at once, not with many
SETTLE_S = 2.0  # seconds before a missing shard is looked for again
MIB = 1 << 20


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move damaged shards and plans to damaged/ under the root, and make them and damaged sets again where "
            "this configuration needs them.",
        ),
    ] = False,
) -> Report:
    store = UnmappedStore(config.root)
    present = checks.list_shards(store)
    report = Report(program="verify", dry_run=options.dry_run)
    report.details = {"shards": len(present), "mib": round(sum(present.values()) / MIB, 2)}
    if options.dry_run:
        report.remaining = len(present)
        return report
    if removed := store.remove_stale_temps(STALE_S):
        console.log(f"removed {len(removed)} temporary files that killed processes left")
    report.details["tables"], damaged_tables = checks.find_damaged_tables(store)
    for rel in [rel for rel in damaged_tables if repair and rel.startswith(f"{EDITS}/")]:
        moved = checks.move_to_damaged(store, rel)
        console.warn(f"{rel} is kept as {moved}: the edits of captions in the table before it count")
        report.details.setdefault("moved_tables", []).append(moved)
        del damaged_tables[rel]
    if damaged_tables and repair:  # plans before shards, which are compared with them
        _repair_tables(config, options, console, damaged_tables, "plans")
    damaged_shards, report.failed = check_shards(store, present, options.workers, console)
    report.done = len(present) - len(report.failed) - len(damaged_shards)
    missing = checks.find_missing_shards(store, present)
    if not all(store.exists(rel) for rel in missing):  # a stage that replaces a tar removes the old one first
        sleep(SETTLE_S)
    damaged_shards |= {
        rel: [DamageError(store.path(rel), f"it is missing, and the training set sets/{name} needs it")]
        for rel, name in missing.items()
        if not store.exists(rel)
    }
    if damaged_shards and repair and not _is_copy(store):  # its other rows can still be read
        damaged_shards = _repair_shards(store, config, options, console, damaged_shards, report)
    if damaged_tables and repair:
        _repair_tables(config, options, console, damaged_tables, "sets")
        report.details["damaged_tables"] = sorted(damaged_tables)
        _, damaged_tables = checks.find_damaged_tables(store)
    for rel, damages in sorted((damaged_shards | damaged_tables).items()):
        for damage in damages:
            message = damage.reason if damage.row is None else f"row {damage.row} ({damage.id}): {damage.reason}"
            row = {"path": rel, "row": damage.row, "item": damage.id, "reason": "damaged", "message": message}
            report.damage.append(row)
    commands = checks.rebuild_commands(damaged_tables)
    if damaged_shards and _is_copy(store):
        again = f"latentpress export --to {shlex.quote(store.url)}"
        commands = [f"{again}   # from the root of the set: it replaces damaged shards; or copy the set again"]
    elif damaged_shards or "damaged_shards" in report.details:
        commands = [line for line in commands if line != "latentpress index"]
        commands += [*([] if repair else ["latentpress verify --repair"]), "latentpress index"]
    report.next_steps += [line for line in commands if line not in report.next_steps]
    return report


def _is_copy(store: Store) -> bool:
    """Whether the root is a copy that `export` made: it has a set and no plan, so no stage makes its shards again."""
    return not list_plans(store) and bool(store.list_names("sets"))


def check_shards(
    store: Store, present: dict[str, int], workers: int | None, console: Console
) -> tuple[DamageByPath, list[dict[str, Any]]]:
    """Check the shards in `present`, path -> bytes, in `workers` threads (None: one for each processor, at most 8).

    Returns the damage, and rows about shards that the disk or its permissions kept from being read.
    """
    checker, damaged, unread = checks.ShardChecker(store), DamageByPath(), list[dict[str, Any]]()

    def check(rel: str) -> list[DamageError]:
        # Twice, as a stage may just have replaced a tar and its sidecar.
        return checker.check(rel) and checker.check(rel)

    with (
        ThreadPoolExecutor(workers or min(MAX_WORKERS, cores()), "verify") as pool,
        console.progress(ceil(sum(present.values()) / MIB), "verify", "MiB") as progress,
    ):
        read_bytes = 0
        shards = {pool.submit(check, rel): rel for rel in present}
        try:
            for future in as_completed(shards):
                rel = shards[future]
                try:
                    if damage := future.result():
                        damaged[rel] = damage
                except StoreError as error:
                    unread.append({"path": rel, "reason": "unread", "message": str(error)})
                progress.advance(ceil((read_bytes + present[rel]) / MIB) - ceil(read_bytes / MIB))
                read_bytes += present[rel]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return damaged, unread


def _repair_shards(
    store: Store, config: Config, options: Options, console: Console, damaged: DamageByPath, report: Report
) -> DamageByPath:
    """Move the damaged shards away and encode their units again; returns the damage that remains."""
    left, moved = dict(damaged), list[dict[str, str]]()

    def move(rel: str, then: str) -> None:
        there = checks.move_to_damaged(store, rel) if store.exists(rel) else ""
        moved.append({"shard": rel, "moved_to": there, "then": then})

    others = set(damaged)
    for stage in (*stage_registry.item_stages(config), *stage_registry.required_stages(config)):
        try:
            state = stage.state(store, config, stage.find_plan(store, config))
        except LatentpressError as error:  # no plan, weights, or what comes before
            console.warn(f"{stage.name} can't encode anything again: {error.message}")
            continue
        folder = f"{stage.kind}/{state.fingerprint}/"
        names = {rel: shard.unit_name(rel.removeprefix(folder)) for rel in sorted(damaged) if rel.startswith(folder)}
        units = {unit.unit_id for unit in state.units} & {*names.values()}
        own = [rel for rel, name in names.items() if name in units]
        others -= {*own}
        for rel in own:
            move(rel, stage.name)
        if own:
            _encode_units(stage, units, config, options, console, report)
            done = shard.find_done_units(store, folder.rstrip("/"))
            left = {rel: found for rel, found in left.items() if rel not in own or names[rel] not in done}
    for rel in sorted(others):
        move(rel, "not encoded again: no unit of this configuration")
    report.details |= {"damaged_shards": moved, "encoded_again": len(damaged) - len(left)}
    return left


def _repair_tables(config: Config, options: Options, console: Console, damaged: Iterable[str], top: str) -> None:
    """Run the program that writes the damaged tables under `top`, "plans" or "sets": it makes those of this
    configuration again."""
    program: Callable[..., Report] = bucket.run if top == "plans" else index.run
    if not any(path.startswith(f"{top}/") for path in damaged):
        return
    try:
        program(config, replace(options, workers=None), console)
    except LatentpressError as error:
        console.warn(f"{top} can't be made again: {error.message}")


def _encode_units(
    stage: EncodingStage, units: set[str], config: Config, options: Options, console: Console, report: Report
) -> None:
    """Run the stage on these units alone."""
    console.log(f"{stage.name}: {len(units)} units again")
    try:
        encoded = replace(stage, only_units=frozenset(units)).run(config, replace(options, workers=None), console)
    except LatentpressError as error:
        report.failed.append({"item": stage.name, "reason": "failed", "message": error.message})
        report.next_steps.append(f"latentpress {stage.name}")
        return
    report.failed += encoded.failed
    report.rejects += encoded.rejects
    report.remaining += encoded.remaining


app = make_app(
    "verify",
    "Read every shard and table: structure, checksums, agreement with the plan, NaN.\n\n"
    "With --repair exit code 4 means that some damage remains: shards of other configurations are only moved away.",
    run,
    examples=["--repair", "--workers 4 --json"],
)

if __name__ == "__main__":
    app()
