"""verify: read every shard and table whole, compare it with its checksums and its plan, and have what is damaged made
again.

Several shards at once, in threads: reading, hashing and looking for NaN all release Python's lock.
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
from schemas.cli.console import Console, Options, Progress, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import bucket, index
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage, StageState, refuse_partition
from stages.maintenance import shard_checks, table_scan
from stages.maintenance.shard_checks import ExpectedShards, UnmappedStore
from stages.planning.plan_lookup import current_plan

MAX_WORKERS = 8  # by default; a disk is faster with some requests at once, not with many
SETTLE_S = 2.0  # seconds until a shard that is missing is looked for again
MIB = 1 << 20

TableRow = dict[str, Any]


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
    swept = store.remove_stale_temps(STALE)
    if swept:
        console.log(f"removed {len(swept)} temporary files that killed processes left")
    report.details["tables"], bad = table_scan.find_damaged_tables(store)
    if bad and repair:  # plans before shards, which are looked at by them
        _repair_tables(config, options, console, bad, "plans")
    found = check_shards(store, present, options.workers, console)
    found.damage |= {
        rel: [DamageError(store.path(rel), f"it is missing, and the training set sets/{name} needs it")]
        for rel, name in _find_missing(store, present).items()
    }
    report.failed = found.unread
    report.done = len(present) - len(found.unread) - sum(rel in present for rel in found.damage)
    if found.damage and repair:
        _repair_shards(store, config, options, console, found, report)
    if bad and repair:
        _repair_tables(config, options, console, bad, "sets")
        report.details["damaged_tables"], (_, bad) = sorted(bad), table_scan.find_damaged_tables(store)
    every = found.damage | bad
    report.damage = [_damage_row(rel, damage) for rel in sorted(every) for damage in every[rel]]
    again = table_scan.rebuild_commands(bad)
    if found.damage and not repair:
        again = [line for line in again if line != "latentpress index"]
        again += _repair_advice(store, found.damage, ["latentpress verify --repair", "latentpress index"])
    report.next_steps += [line for line in again if line not in report.next_steps]
    return report


def _find_missing(store: Store, present: dict[str, int]) -> dict[str, str]:
    """Path -> set, of shards that a set names and that are not there: also not in a while, as a stage that replaces a
    tar removes the old one first, and what appeared after the listing is no loss."""
    lost = shard_checks.find_missing_shards(store, present)
    if not all(store.exists(rel) for rel in lost):
        sleep(SETTLE_S)
    return {rel: name for rel, name in lost.items() if not store.exists(rel)}


def _is_exported(rel: str) -> bool:
    return rebuild_program(rel) == "export"


def _repair_advice(store: Store, damaged: Iterable[str], own: list[str]) -> list[str]:
    """What mends these shards: for those of an export, which no stage makes, another command than `own`."""
    whose = {_is_exported(rel) for rel in damaged}
    again = f"latentpress export --to {shlex.quote(store.url)}"
    why = "from where the set lies, as before: it writes damaged shards anew; or copy the export again"
    return (own if False in whose else []) + ([f"{again}   # {why}"] if True in whose else [])


@dataclass
class VerifyResult:
    """damage: by the shard's path. unread: those that the disk or its rights kept from being read."""

    damage: dict[str, list[DamageError]] = field(default_factory=dict)
    unread: list[TableRow] = field(default_factory=list)


def check_shards(store: Store, present: dict[str, int], workers: int | None, console: Console) -> VerifyResult:
    """Check the shards in `present`, path -> bytes, with so many threads (None: one for each processor, at most 8)."""
    expected, found = ExpectedShards(store), VerifyResult()
    total = ceil(sum(present.values()) / MIB)
    with (
        ThreadPoolExecutor(workers or min(MAX_WORKERS, _cpu_count()), "verify") as pool,
        console.progress(total, "verify", "MiB") as progress,
    ):
        counter = _MibProgress(progress)
        shards = {pool.submit(_check_twice, store, rel, expected): rel for rel in present}
        try:
            for future in as_completed(shards):
                rel = shards[future]
                try:
                    damage = future.result()
                except StoreError as error:
                    found.unread.append({"path": rel, "reason": "unread", "message": str(error)})
                else:
                    found.damage |= {rel: damage} if damage else {}
                counter.advance(present[rel])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_twice(store: Store, rel: str, expected: ExpectedShards) -> list[DamageError]:
    """Damage is looked at twice: a stage may be replacing a tar and the description beside it at this moment."""
    return shard_checks.check_shard(store, rel, expected) and shard_checks.check_shard(store, rel, expected)


class _MibProgress:
    """Advances a progress by whole MiB."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._bytes = progress, 0

    def advance(self, size: int) -> None:
        before = ceil(self._bytes / MIB)
        self._bytes += size
        self._progress.advance(ceil(self._bytes / MIB) - before)


def _repair_shards(
    store: Store, config: Config, options: Options, console: Console, found: VerifyResult, report: Report
) -> None:
    """Put the damaged shards away and encode their units again. What is sound then leaves `found`. Those of an export
    stay where they are: other rows of them can still be read, and `export` puts whole ones in their place."""
    again = dict[str, str]()  # damaged shard -> its unit's stage
    own = [rel for rel in sorted(found.damage) if not _is_exported(rel)]
    works = _stage_states(store, config, console) if own else []
    for stage, work in works:
        units = {unit.unit_id for unit in work.units}
        folder = f"{stage.kind}/{work.fingerprint}/"
        again |= {rel: stage.name for rel in found.damage if rel.startswith(folder) and _unit_of_shard(rel) in units}
    report.details["damaged_shards"] = [
        {
            "shard": rel,
            "moved_to": shard_checks.move_to_damaged(store, rel) if store.exists(rel) else "",
            "then": again.get(rel, "not encoded again: no unit of this configuration"),
        }
        for rel in own
    ]
    made = list[str]()
    for stage, work in works:
        units = {_unit_of_shard(rel) for rel, name in again.items() if name == stage.name}
        if units:
            _encode_units(stage, units, config, options, console, report)
            done = shard.find_done_units(store, f"{stage.kind}/{work.fingerprint}")
            made += [done[unit] for unit in units & set(done)]
    later = (
        check_shards(store, {rel: store.size(rel) for rel in made}, options.workers, console)
        if made
        else VerifyResult()
    )
    mended = {_unit_of_shard(rel) for rel in made}
    found.damage = {
        rel: bad for rel, bad in found.damage.items() if rel not in again or _unit_of_shard(rel) not in mended
    }
    found.damage |= later.damage
    report.failed += later.unread
    report.details["encoded_again"] = len(made) - len(later.damage)
    report.next_steps += _repair_advice(store, found.damage, []) + (["latentpress index"] if own else [])


def _repair_tables(config: Config, options: Options, console: Console, bad: table_scan.DamageByPath, top: str) -> None:
    """Have the program that writes what lies under `top`, "plans" or "sets", make again what is damaged there, as far
    as this configuration makes it."""
    program = {"plans": bucket.run, "sets": index.run}[top]
    if not any(path.startswith(f"{top}/") for path in bad):
        return
    try:
        program(config, replace(options, workers=None), console)
    except LatentpressError as error:
        console.warn(f"{top} can't be made again: {error.message}")


def _stage_states(store: Store, config: Config, console: Console) -> list[tuple[EncodingStage, StageState]]:
    """What this configuration needs of each encoding stage; nothing where it has no plan, or its weights are absent."""
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
    console.log(f"{stage.name}: {len(units)} units again")
    try:
        done = _restrict_to_units(stage, units).run(config, replace(options, workers=None), console)
    except LatentpressError as error:
        report.failed.append({"item": stage.name, "reason": "failed", "message": error.message})
        report.next_steps.append(f"latentpress {stage.name}")
        return
    report.failed += done.failed
    report.set_aside += done.set_aside
    report.remaining += done.remaining


def _unit_of_shard(rel: str) -> str:
    return shard.unit_name(rel.rpartition("/")[2])


def _restrict_to_units(stage: EncodingStage, units: set[str]) -> EncodingStage:
    """The stage as if these units were all that there are."""

    class Only(type(stage)):  # type: ignore[misc]
        def work(self, *args: Any, **options: Any) -> StageState:
            work = super().state(*args, **options)
            return replace(work, units=[unit for unit in work.units if unit.unit_id in units])

    return Only(**vars(stage))


def _damage_row(rel: str, damage: DamageError) -> TableRow:
    return {"path": rel, "row": damage.row, "item": damage.id, "reason": "damaged", "message": _damage_message(damage)}


def _damage_message(damage: DamageError) -> str:
    """The row that is meant, and what is wrong with it."""
    return damage.reason if damage.row is None else f"row {damage.row} ({damage.id}): {damage.reason}"


app = make_app(
    "verify",
    "Read every shard and table: structure, checksums, agreement with the plan, NaN.\n\n"
    "With --repair exit code 4 means that some damage could not be mended: shards of another configuration are only "
    "set aside.",
    run,
    examples=["--repair", "--workers 4 --json"],
    extra="encode",
)

if __name__ == "__main__":
    app()
