"""The contract of an encoding stage, and the loop that runs one.

A stage is a kind of unit, a fingerprint, and a `Worker`: made once in each process from a `Job`, it loads its
model and turns one unit into one shard. Which units there are comes from the plan; which are done, from one
listing of shard names. So any number of processes on any number of machines need no lock and no coordination.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache import rejects
from cache.compatibility import pin_revision
from cache.damage import DamageError
from cache.plans import Plan, Unit
from cache.shard import TruncatedText, find_done_units
from cache.store import Store
from schemas.cli.console import Console, Options, Partition, Report
from schemas.config.encoding import MOST_PREFETCH, Encoding
from schemas.config.pipeline import Config
from schemas.config.types import MOST_PROCESSES
from schemas.config.unused_features import Topic, find_unused_features
from schemas.errors import USAGE, LatentpressError
from schemas.identity import compute_fingerprint
from schemas.text_format import escape_unprintable, shorten
from stages.discovery import missing_media
from stages.discovery.media_locations import MediaLocations
from stages.encoding.interruption import MaxTimeOption, StopHandler
from stages.engines.jobs import Job, Worker
from stages.engines.local import run_units
from stages.planning.plan_lookup import current_plan

MIN_REJECT_BASE = 10  # items of which the share set aside is taken at least, so that one of three stops nothing
_READERS_HELP = "Processes that decode for each that encodes.  [default: as configured]"
_PREFETCH_HELP = "Members read ahead by each process.  [default: as configured]"


class UsageError(LatentpressError):
    """The options do not fit the program."""

    exit_code = USAGE


def refuse_partition(options: Options, program: str) -> None:
    """Only the encoding stages and decode can be divided: the others are one small job."""
    if options.partition.total > 1:
        raise UsageError(
            f"{program} is one job and can't be divided with --shard",
            f"run `latentpress {program}` once; --shard is for the encoding stages",
        )


@dataclass(frozen=True)
class EncodingStage:
    """One encoding stage. `parts`: everything beyond its inputs that determines its bytes (no torch needed to
    say it). `load`: imports the model's library and makes the worker."""

    name: str
    kind: str  # the folder of its shards: text | latents | vision
    fingerprint_inputs: Callable[[Config], dict[str, Any]]
    load_worker: Callable[[Job], Worker]
    unit_kind: str = ""  # the kind of units that it makes shards of, where that is another: text | latents
    estimate_bytes: Callable[[Config, Unit], int] = lambda config, unit: (
        unit.estimated_bytes
    )  # of a unit's shard, in bytes

    @property
    def member_kind(self) -> str:
        """What its members are: "text" or "latents"."""
        return self.unit_kind or self.kind

    def fingerprint(self, config: Config) -> str:
        return compute_fingerprint(self.fingerprint_inputs(config))

    def state(self, store: Store, config: Config, plan: Plan, retry: bool = False) -> "StageState":
        """Compare the plan's units with the shards there are. retry: try again everything that was set aside."""
        name = self.fingerprint(config)
        wanted = plan.active_text_ids if self.member_kind == "text" else plan.active_sample_ids
        done = find_done_units(store, f"{self.kind}/{name}")
        damaged: dict[str, DamageError] = {}
        lists = _rows_of_items(rejects.read_stage(store, reject_folder(self.name, name), damaged), wanted)
        places = MediaLocations(config, plan)
        again = {
            unit
            for unit, rows in lists.items()
            if any(retry or (row["retry"] and places.all_present(self.member_kind, row["item"])) for row in rows)
        }
        units = plan.units(self.member_kind)
        held = pa.array([name for unit in units for name in unit.members], pa.string())
        lost = len(wanted) - (pc.sum(pc.is_in(wanted, value_set=held)).as_py() or 0)
        if lost:
            raise LatentpressError(
                f"plan {plan.name} wants {lost} items that no unit holds: an older plan was removed",
                "run `latentpress bucket`, which plans them again",
            )
        again = (again | damaged.keys()) & done.keys()
        return StageState(plan, name, units, wanted, _count_wanted(units, held, wanted), done, again, lists, damaged)

    def run(
        self,
        config: Config,
        options: Options,
        console: Console,
        *,
        retry_set_aside: Annotated[bool, typer.Option(help="Try again everything that was set aside.")] = False,
        max_time: MaxTimeOption = None,
        readers: Annotated[int | None, typer.Option(min=1, max=MOST_PROCESSES, metavar="N", help=_READERS_HELP)] = None,
        prefetch: Annotated[
            int | None, typer.Option(min=1, max=MOST_PREFETCH, metavar="N", help=_PREFETCH_HELP)
        ] = None,
    ) -> Report:
        """Do this process' part of what remains, and report."""
        stopping, store = StopHandler(max_time), Store(config.root)
        plan = current_plan(store, config)
        if not options.dry_run:
            config = config.model_copy(update={"model": pin_revision(config.model, store)})
        work = self.state(store, config, plan, retry_set_aside)
        mine = work.remaining_units(options.partition)
        for damage in work.damaged_lists.values():
            console.warn(f"{damage.message}; its unit is done again")
        before = len(work.units) - len(work.todo)
        report = Report(program=self.name, skipped=_count_members(work.units) - _count_members(work.todo))
        report.details = {
            "cache": f"{self.kind}/{work.fingerprint}",
            "units": f"{len(work.units)}, {before} done before, {len(mine)} in this run",
            "to_encode_mib": round(sum(self.estimate_bytes(config, unit) for unit in mine) / 2**20, 2),
        }
        topics: dict[str, tuple[Topic, ...]] = {"latents": ("masks", "regularisation"), "vision": ("vision",)}
        for text in find_unused_features(config, *topics.get(self.kind, ())):
            console.warn(text)
        if options.dry_run:
            report.remaining = _count_members(mine)
            _report_set_aside(store, self, work, report)
            return report
        limit = RejectLimit(self, store, config, work)
        if mine:
            watched = missing_media.select_probed_members(work.plan, self.kind, work.wanted_members(mine))
            missing_media.require_media(MediaLocations(config, work.plan), self.kind, watched)
            _write_provenance(store, self, work.fingerprint, config)
            given = {key: value for key, value in (("readers", readers), ("prefetch", prefetch)) if value}
            resources = options.resources(config, self.name).model_copy(update=given)
            assert isinstance(resources, Encoding)
            job = Job(config, work.plan.name, work.fingerprint, resources, probed_members=watched)
            with stopping.stop_on_signals():
                _run_units(store, self, job, work.plan, mine, limit, console, report)
            work = self.state(store, config, work.plan)
            if stopping.reason:
                _report_interruption(report, self.name, stopping.reason, work.remaining_units(options.partition))
        _report_set_aside(store, self, work, report)
        return report


@dataclass(frozen=True)
class StageState:
    """What is to be done and what is done, for one stage and one plan."""

    plan: Plan
    fingerprint: str
    units: list[Unit]
    wanted_ids: pa.Array  # ids of members that the plan holds active
    counts: dict[str, int]  # unit id -> how many of its members are wanted
    done: dict[str, str]  # unit id -> shard path
    retry_units: set[str]  # units whose shard lacks a wanted member that may work now
    rejects_by_unit: dict[str, list[dict]]  # unit id -> what was set aside of it and is wanted
    damaged_lists: dict[str, DamageError] = field(default_factory=dict)  # unit id -> what is wrong with that list

    @property
    def todo(self) -> list[Unit]:
        return self.remaining_units(Partition())

    def remaining_units(self, shard: Partition) -> list[Unit]:
        """What remains of one part. Parts are cut from all units, so they stay the same while others finish."""
        return [
            unit
            for unit in shard.select(self.units)
            if unit.unit_id not in self.done or unit.unit_id in self.retry_units
        ]

    def wanted_members(self, units: Sequence[Unit]) -> pa.Array:
        """Ids of the wanted members of some units."""
        members = pa.array([name for unit in units for name in unit.members], pa.string())
        return members.filter(pc.is_in(members, value_set=self.wanted_ids))

    @property
    def set_aside(self) -> list[dict]:
        """Wanted members that were set aside, from this run and from earlier ones."""
        return [row for rows in self.rejects_by_unit.values() for row in rows]


def _report_interruption(report: Report, name: str, reason: str, left: Sequence[Unit]) -> None:
    report.details["stopped"] = f"by {reason}; {len(left)} units remain, what is done is kept"
    report.remaining = _count_members(left)
    if left:
        report.next_steps.append(f"latentpress {name}")


def _count_wanted(units: list[Unit], members: pa.Array, wanted: pa.Array) -> dict[str, int]:
    """Wanted members of each unit; `members` are those of all units in a row."""
    before = np.concatenate([[0], np.cumsum(pc.is_in(members, value_set=wanted).to_numpy(zero_copy_only=False))])
    ends = np.cumsum([0, *(len(unit.members) for unit in units)])
    return dict(zip((unit.unit_id for unit in units), np.diff(before[ends]).tolist(), strict=True))


def _rows_of_items(lists: dict[str, list[dict]], wanted: pa.Array) -> dict[str, list[dict]]:
    """The rows about wanted items."""
    rows = [(unit, row) for unit, rows in lists.items() for row in rows]
    if not rows:
        return {}
    there = pc.is_in(pa.array([row["item"] for _, row in rows], pa.string()), value_set=wanted).to_pylist()
    kept: dict[str, list[dict]] = {}
    for (unit, row), hit in zip(rows, there, strict=True):
        if hit:
            kept.setdefault(unit, []).append(row)
    return kept


def format_truncated(plan: Plan, truncated: Iterable[TruncatedText]) -> list[dict[str, Any]]:
    """For a report: truncated texts by their words."""
    return [
        {
            "item": row.id,
            "path": shorten(plan.texts[row.id]["text"]),
            "reason": f"{row.kept} of {row.tokens} tokens kept",
        }
        for row in truncated
    ]


def reject_folder(stage: str, fingerprint: str) -> str:
    return f"{stage}/{fingerprint}"


def _count_members(units: Sequence[Unit]) -> int:
    return sum(len(unit.members) for unit in units)


def _run_units(
    store: Store,
    stage: EncodingStage,
    job: Job,
    plan: Plan,
    units: list[Unit],
    limit: "RejectLimit",
    console: Console,
    report: Report,
) -> None:
    members = {unit.unit_id: unit.members for unit in units}
    written, remarks = 0, Counter[str]()
    what = "texts" if stage.member_kind == "text" else "samples"
    with console.progress(_count_members(units), stage.name, what) as progress:
        for outcome in run_units(stage.load_worker, job, iter(units), progress.advance, console.warn):
            if outcome.shard_path is None:
                report.failed.append({"item": outcome.unit_id, "reason": "failed", "message": outcome.error})
                report.remaining += len(members[outcome.unit_id])
                continue
            rejects.write_rejects(
                store, reject_folder(stage.name, job.fingerprint), outcome.unit_id, list(outcome.set_aside)
            )
            report.truncated += format_truncated(plan, outcome.truncated)
            remarks.update(outcome.remarks)
            if outcome.fitting_batch:
                console.warn(f"unit {outcome.unit_id}: out of memory; {outcome.fitting_batch}")
                report.details["units_in_smaller_batches"] = report.details.get("units_in_smaller_batches", 0) + 1
            report.done += outcome.encoded
            written += outcome.bytes
            limit.add_unit(outcome.unit_id, outcome.set_aside)
    report.details["written_mib"] = round(written / 2**20, 2)
    if remarks:
        rows = [{"items": count, "of": report.done, "remark": remark} for remark, count in remarks.items()]
        report.details["remarks"] = rows


class RejectLimit:
    """Of the members that the plan wants, what was tried and set aside, in this run and in earlier ones. Missing media
    is not counted: `presence` stops a stage that finds most of it missing, and index what lacks any.

    LatentpressError, at once or by `count`, where more than `max_reject_fraction` of them were set aside. A run
    that was stopped so is stopped again, until they are mended or the limit is raised.
    """

    def __init__(self, stage: EncodingStage, store: Store, config: Config, work: StageState) -> None:
        self._stage, self._wanted = stage, work.wanted_ids
        self._folder = store.path(f"rejects/{reject_folder(stage.name, work.fingerprint)}")
        self._fraction = config.stages.max_reject_fraction
        self._tried = self._aside = 0
        self._counts = work.counts
        settled = [
            unit.unit_id for unit in work.units if unit.unit_id in work.done and unit.unit_id not in work.retry_units
        ]
        self._tried += sum(work.counts[unit] for unit in settled)
        aside = _without_missing(row for unit in settled for row in work.rejects_by_unit.get(unit, []))
        self._aside += len(aside)
        self._check(aside)

    def add_unit(self, unit: str, set_aside: Sequence[dict]) -> None:
        """A unit that was just done."""
        aside = _without_missing(_rows_of_items({unit: list(set_aside)}, self._wanted).get(unit, []))
        self._tried += self._counts[unit]
        self._aside += len(aside)
        self._check(aside)

    def _check(self, aside: Sequence[dict]) -> None:
        if aside and self._aside > self._fraction * max(self._tried, MIN_REJECT_BASE):
            what = "texts" if self._stage.member_kind == "text" else "samples"
            raise LatentpressError(
                f"{self._stage.name} stopped: {self._aside} of {self._tried} {what} were set aside, more than "
                f"stages.max_reject_fraction = {self._fraction} of them (of {MIN_REJECT_BASE}, where they are "
                f"fewer); the last: "
                f"{escape_unprintable(aside[-1]['message'])}",
                f"mend them and run `latentpress {self._stage.name} --retry-set-aside`, or raise that limit in the "
                f"configuration; the list is under {self._folder}",
            )


def _without_missing(rows: Iterable[dict]) -> list[dict]:
    return [row for row in rows if row["reason"] != "missing"]


def _report_set_aside(store: Store, stage: EncodingStage, work: StageState, report: Report) -> None:
    report.set_aside = work.set_aside
    if report.set_aside:
        report.rejects = store.path(f"rejects/{reject_folder(stage.name, work.fingerprint)}")
        if any(not row["retry"] for row in report.set_aside):
            report.next_steps.append(f"latentpress {stage.name} --retry-set-aside   # once their cause is mended")
        if any(row["reason"] == "missing" for row in report.set_aside):
            report.next_steps.append(f"latentpress {stage.name}   # once the missing files are there again")


def _write_provenance(store: Store, stage: EncodingStage, fingerprint: str, config: Config) -> None:
    """provenance.json: in words, what the fingerprint stands for. A damaged one is written again."""
    rel = f"{stage.kind}/{fingerprint}/provenance.json"
    record = {"fingerprint": fingerprint, **stage.fingerprint_inputs(config)}
    data = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False).encode()
    if not store.exists(rel) or store.read_bytes(rel) != data:
        store.publish_bytes(rel, data)
