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

MAX_WORKERS = 8  # default limit: a few requests at the same time make a disk faster, many do not
SETTLE_S = 2.0  # seconds before a missing shard is searched for again
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
            help="Move damaged shards and plans to damaged/ under the root. Make them, and damaged sets, again if this "
            "configuration needs them.",
        ),
    ] = False,
) -> Report:
    store = UnmappedStore(config.root)
    shard_sizes = checks.list_shards(store)
    report = Report(program="verify", dry_run=options.dry_run)
    report.details = {"shards": len(shard_sizes), "mib": round(sum(shard_sizes.values()) / MIB, 2)}
    if options.dry_run:
        report.remaining = len(shard_sizes)
        return report
    if removed_files := store.remove_stale_temps(STALE_S):
        console.log(f"removed {len(removed_files)} temporary files of killed processes")
    report.details["tables"], damaged_tables = checks.find_damaged_tables(store)
    for rel in [rel for rel in damaged_tables if repair and rel.startswith(f"{EDITS}/")]:
        target = checks.move_to_damaged(store, rel)
        console.warn(f"{rel} was moved to {target}: the caption edits of the previous table are used")
        report.details.setdefault("moved_tables", []).append(target)
        del damaged_tables[rel]
    if damaged_tables and repair:  # plans first, because shards are compared with plans
        _repair_tables(config, options, console, damaged_tables, "plans")
    damaged_shards, report.failed = check_shards(store, shard_sizes, options.workers, console)
    report.done = len(shard_sizes) - len(report.failed) - len(damaged_shards)
    missing = checks.find_missing_shards(store, shard_sizes)
    if not all(store.exists(rel) for rel in missing):  # a stage that replaces a tar removes the old one first
        sleep(SETTLE_S)
    damaged_shards |= {
        rel: [DamageError(store.path(rel), f"missing, but the training set sets/{name} needs it")]
        for rel, name in missing.items()
        if not store.exists(rel)
    }
    if damaged_shards and repair and not _is_copy(store):  # undamaged rows of a copy's shard can still be read
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
        command = f"latentpress export --to {shlex.quote(store.url)}"
        commands = [f"{command}   # with the root of the original set; or copy the set again"]
    elif damaged_shards or "damaged_shards" in report.details:
        commands = [line for line in commands if line != "latentpress index"]
        commands += [*([] if repair else ["latentpress verify --repair"]), "latentpress index"]
    report.next_steps += [line for line in commands if line not in report.next_steps]
    return report


def _is_copy(store: Store) -> bool:
    """Whether the root is a copy that `export` made. It has a set but no plan, so stages cannot make its shards."""
    return not list_plans(store) and bool(store.list_names("sets"))


def check_shards(
    store: Store, shard_sizes: dict[str, int], workers: int | None, console: Console
) -> tuple[DamageByPath, list[dict[str, Any]]]:
    """Check shards. Returns (damage, rows about shards that cannot be read because of the disk or permissions).

    shard_sizes: path -> size in bytes. workers: number of threads; None: one per core, at most 8.
    """
    checker, damaged, unread = checks.ShardChecker(store), DamageByPath(), list[dict[str, Any]]()

    def check(rel: str) -> list[DamageError]:
        # A second check, because a stage may have replaced a tar and its sidecar during the first one.
        return checker.check(rel) and checker.check(rel)

    with (
        ThreadPoolExecutor(workers or min(MAX_WORKERS, cores()), "verify") as pool,
        console.progress(ceil(sum(shard_sizes.values()) / MIB), "verify", "MiB") as progress,
    ):
        read_bytes = 0
        shards = {pool.submit(check, rel): rel for rel in shard_sizes}
        try:
            for future in as_completed(shards):
                rel = shards[future]
                try:
                    if damage := future.result():
                        damaged[rel] = damage
                except StoreError as error:
                    unread.append({"path": rel, "reason": "unread", "message": str(error)})
                progress.advance(ceil((read_bytes + shard_sizes[rel]) / MIB) - ceil(read_bytes / MIB))
                read_bytes += shard_sizes[rel]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return damaged, unread


def _repair_shards(
    store: Store, config: Config, options: Options, console: Console, damaged: DamageByPath, report: Report
) -> DamageByPath:
    """Move the damaged shards to damaged/, and encode their units again. Returns the remaining damage."""
    remaining, moves = dict(damaged), list[dict[str, str]]()

    def move(rel: str, next_action: str) -> None:
        target = checks.move_to_damaged(store, rel) if store.exists(rel) else ""
        moves.append({"shard": rel, "moved_to": target, "then": next_action})

    unused_shards = set(damaged)  # shards that this configuration does not use
    for stage in (*stage_registry.item_stages(config), *stage_registry.required_stages(config)):
        try:
            state = stage.state(store, config, stage.find_plan(store, config))
        except LatentpressError as error:  # no plan or weights, or an earlier stage has not run
            console.warn(f"{stage.name} cannot encode damaged shards again: {error.message}")
            continue
        folder = f"{stage.kind}/{state.fingerprint}/"
        names = {rel: shard.unit_name(rel.removeprefix(folder)) for rel in sorted(damaged) if rel.startswith(folder)}
        units = {unit.unit_id for unit in state.units} & {*names.values()}
        shards = [rel for rel, name in names.items() if name in units]
        unused_shards -= {*shards}
        for rel in shards:
            move(rel, stage.name)
        if shards:
            _encode_units(stage, units, config, options, console, report)
            encoded_units = shard.find_done_units(store, folder.rstrip("/"))
            remaining = {
                rel: errors for rel, errors in remaining.items() if rel not in shards or names[rel] not in encoded_units
            }
    for rel in sorted(unused_shards):
        move(rel, "not encoded again: not a unit of this configuration")
    report.details |= {"damaged_shards": moves, "encoded_again": len(damaged) - len(remaining)}
    return remaining


def _repair_tables(config: Config, options: Options, console: Console, damaged: Iterable[str], top: str) -> None:
    """Run the program that makes the damaged tables of this configuration again. top: "plans" or "sets"."""
    program: Callable[..., Report] = bucket.run if top == "plans" else index.run
    if not any(path.startswith(f"{top}/") for path in damaged):
        return
    try:
        program(config, replace(options, workers=None), console)
    except LatentpressError as error:
        console.warn(f"{top} cannot be made again: {error.message}")


def _encode_units(
    stage: EncodingStage, units: set[str], config: Config, options: Options, console: Console, report: Report
) -> None:
    """Run the stage only on these units."""
    console.log(f"{stage.name}: encoding {len(units)} units again")
    try:
        stage_report = replace(stage, only_units=frozenset(units)).run(config, replace(options, workers=None), console)
    except LatentpressError as error:
        report.failed.append({"item": stage.name, "reason": "failed", "message": error.message})
        report.next_steps.append(f"latentpress {stage.name}")
        return
    report.failed += stage_report.failed
    report.rejects += stage_report.rejects
    report.remaining += stage_report.remaining


app = make_app(
    "verify",
    "Check all shards and tables: structure, checksums, agreement with the plan, NaN.\n\n"
    "With --repair, exit code 4 means that damage remains. Shards of other configurations are moved, but not replaced.",
    run,
    examples=["--repair", "--workers 4 --json"],
)

if __name__ == "__main__":
    app()
