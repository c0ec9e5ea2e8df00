"""verify: read every shard and table completely, compare them with their checksums and plans, and repair damage.

Several shards are checked at once, in threads: reading, hashing and searching for NaN all release Python's lock.
"""

import os
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from math import ceil
from time import sleep
from typing import Annotated, Any

import typer

from cache import shard
from cache.damage import SHARD_PROGRAMS, DamageError, rebuild_program
from cache.files import StoreError
from cache.store import STALE, Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import bucket, index
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage, StageState, refuse_partition
from stages.maintenance import shard_checks, table_scan
from stages.maintenance.shard_checks import ExpectedShards, UnmappedStore
from stages.planning.plan_lookup import current_plan

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
    refuse_partition(options, "verify")
    store = UnmappedStore(config.root)
    present = shard_checks.list_shards(store, tuple(SHARD_PROGRAMS))
    report = Report(program="verify", dry_run=options.dry_run)
    report.details = {"shards": len(present), "mib": round(sum(present.values()) / MIB, 2)}
    if options.dry_run:
        report.remaining = len(present)
        return report
    if removed := store.remove_stale_temps(STALE):
        console.log(f"removed {len(removed)} temporary files that killed processes left")
    report.details["tables"], damaged_tables = table_scan.find_damaged_tables(store)
    if damaged_tables and repair:  # plans before shards, which are compared with them
        _repair_tables(config, options, console, damaged_tables, "plans")
    found = check_shards(store, present, options.workers, console)
    found.damage |= {
        rel: [DamageError(store.path(rel), f"it is missing, and the training set sets/{name} needs it")]
        for rel, name in _find_missing(store, present).items()
    }
    report.failed = found.unread
    report.done = len(present) - len(found.unread) - sum(rel in present for rel in found.damage)
    if found.damage and repair:
        _repair_shards(store, config, options, console, found, report)
    if damaged_tables and repair:
        _repair_tables(config, options, console, damaged_tables, "sets")
        report.details["damaged_tables"] = sorted(damaged_tables)
        _, damaged_tables = table_scan.find_damaged_tables(store)
    all_damage = found.damage | damaged_tables
    report.damage = [_damage_row(rel, damage) for rel in sorted(all_damage) for damage in all_damage[rel]]
    commands = table_scan.rebuild_commands(damaged_tables)
    if found.damage and not repair:
        commands = [line for line in commands if line != "latentpress index"]
        commands += _repair_commands(store, found.damage, ["latentpress verify --repair", "latentpress index"])
    report.next_steps += [line for line in commands if line not in report.next_steps]
    return report


def _damage_row(rel: str, damage: DamageError) -> dict[str, Any]:
    message = damage.reason if damage.row is None else f"row {damage.row} ({damage.id}): {damage.reason}"
    return {"path": rel, "row": damage.row, "item": damage.id, "reason": "damaged", "message": message}


def _find_missing(store: Store, present: dict[str, int]) -> dict[str, str]:
    """Path -> set, of the missing shards of current sets. They are looked for twice: a stage that replaces a tar
    removes the old one first, and what appeared after the listing is not missing."""
    missing = shard_checks.find_missing_shards(store, present)
    if not all(store.exists(rel) for rel in missing):
        sleep(SETTLE_S)
    return {rel: name for rel, name in missing.items() if not store.exists(rel)}


def _is_exported(rel: str) -> bool:
    return rebuild_program(rel) == "export"


def _repair_commands(store: Store, damaged: Iterable[str], commands: list[str]) -> list[str]:
    """`commands` for shards of the stages, and another command for those of an export, which no stage makes."""
    exported = {_is_exported(rel) for rel in damaged}
    again = (
        f"latentpress export --to {shlex.quote(store.url)}   # from the root of the set, with the same options: it "
        "replaces damaged shards; or copy the export again"
    )
    return (commands if False in exported else []) + ([again] if True in exported else [])


@dataclass
class VerifyResult:
    """damage: by the shard's path. unread: rows about shards that the disk or its permissions kept from being read."""

    damage: dict[str, list[DamageError]] = field(default_factory=dict)
    unread: list[dict[str, Any]] = field(default_factory=list)


def check_shards(store: Store, present: dict[str, int], workers: int | None, console: Console) -> VerifyResult:
    """Check the shards in `present`, path -> bytes, with so many threads (None: one for each processor, at most 8)."""
    expected, found = ExpectedShards(store), VerifyResult()
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def check(rel: str) -> list[DamageError]:
        # Twice where there is damage: a stage may just be replacing a tar and its sidecar.
        return shard_checks.check_shard(store, rel, expected) and shard_checks.check_shard(store, rel, expected)

    with (
        ThreadPoolExecutor(workers or min(MAX_WORKERS, processors), "verify") as pool,
        console.progress(ceil(sum(present.values()) / MIB), "verify", "MiB") as progress,
    ):
        read_bytes = 0
        shards = {pool.submit(check, rel): rel for rel in present}
        try:
            for future in as_completed(shards):
                rel = shards[future]
                try:
                    if damage := future.result():
                        found.damage[rel] = damage
                except StoreError as error:
                    found.unread.append({"path": rel, "reason": "unread", "message": str(error)})
                progress.advance(ceil((read_bytes + present[rel]) / MIB) - ceil(read_bytes / MIB))
                read_bytes += present[rel]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _repair_shards(
    store: Store, config: Config, options: Options, console: Console, found: VerifyResult, report: Report
) -> None:
    """Move the damaged shards away and encode their units again; repaired ones leave `found`. Shards of an export stay
    in place: their other rows can still be read, and `export` replaces them."""
    stages = dict[str, str]()  # damaged shard -> its unit's stage
    own = [rel for rel in sorted(found.damage) if not _is_exported(rel)]
    states = _stage_states(store, config, console) if own else []
    for stage, state in states:
        units = {unit.unit_id for unit in state.units}
        folder = f"{stage.kind}/{state.fingerprint}/"
        stages |= {rel: stage.name for rel in found.damage if rel.startswith(folder) and _unit_of_shard(rel) in units}
    report.details["damaged_shards"] = [
        {
            "shard": rel,
            "moved_to": shard_checks.move_to_damaged(store, rel) if store.exists(rel) else "",
            "then": stages.get(rel, "not encoded again: no unit of this configuration"),
        }
        for rel in own
    ]
    made = list[str]()
    for stage, state in states:
        units = {_unit_of_shard(rel) for rel, name in stages.items() if name == stage.name}
        if units:
            _encode_units(stage, units, config, options, console, report)
            done = shard.find_done_units(store, f"{stage.kind}/{state.fingerprint}")
            made += [done[unit] for unit in units & set(done)]
    sizes = {rel: store.size(rel) for rel in made}
    checked = check_shards(store, sizes, options.workers, console) if made else VerifyResult()
    repaired = {_unit_of_shard(rel) for rel in made}
    found.damage = {
        rel: damage for rel, damage in found.damage.items() if rel not in stages or _unit_of_shard(rel) not in repaired
    }
    found.damage |= checked.damage
    report.failed += checked.unread
    report.details["encoded_again"] = len(made) - len(checked.damage)
    report.next_steps += _repair_commands(store, found.damage, []) + (["latentpress index"] if own else [])


def _repair_tables(config: Config, options: Options, console: Console, damaged: Iterable[str], top: str) -> None:
    """Run the program that writes the damaged tables under `top`, "plans" or "sets": it makes those of this
    configuration again."""
    program = {"plans": bucket.run, "sets": index.run}[top]
    if not any(path.startswith(f"{top}/") for path in damaged):
        return
    try:
        program(config, replace(options, workers=None), console)
    except LatentpressError as error:
        console.warn(f"{top} can't be made again: {error.message}")


def _stage_states(store: Store, config: Config, console: Console) -> list[tuple[EncodingStage, StageState]]:
    """The encoding stages that this configuration needs; none where it has no plan, or its weights are missing."""
    try:
        plan = current_plan(store, config)
        return [(stage, stage.state(store, config, plan)) for stage in stage_registry.required_stages(config)]
    except LatentpressError as error:
        console.warn(f"nothing can be encoded again: {error.message}")
        return []


def _encode_units(
    stage: EncodingStage, units: set[str], config: Config, options: Options, console: Console, report: Report
) -> None:
    """Run the stage on these units alone."""

    class SelectedUnits(type(stage)):  # type: ignore[misc]
        def state(self, *args: Any, **options: Any) -> StageState:
            state = super().state(*args, **options)
            return replace(state, units=[unit for unit in state.units if unit.unit_id in units])

    console.log(f"{stage.name}: {len(units)} units again")
    try:
        encoded = SelectedUnits(**vars(stage)).run(config, replace(options, workers=None), console)
    except LatentpressError as error:
        report.failed.append({"item": stage.name, "reason": "failed", "message": error.message})
        report.next_steps.append(f"latentpress {stage.name}")
        return
    report.failed += encoded.failed
    report.set_aside += encoded.set_aside
    report.remaining += encoded.remaining


def _unit_of_shard(rel: str) -> str:
    return shard.unit_name(rel.rpartition("/")[2])


app = make_app(
    "verify",
    "Read every shard and table: structure, checksums, agreement with the plan, NaN.\n\n"
    "With --repair exit code 4 means that some damage remains: shards of other configurations are only moved away.",
    run,
    examples=["--repair", "--workers 4 --json"],
    extra="encode",
)

if __name__ == "__main__":
    app()
