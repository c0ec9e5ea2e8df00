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
from cache.compatibility import pinned
from cache.damage import DamageError
from cache.generations import Generation, Unit
from cache.shard import Truncated, done_units
from cache.store import Store
from schemas.config.encoding import MOST_PREFETCH, Encoding
from schemas.config.pipeline import Config
from schemas.config.types import MOST_PROCESSES
from schemas.console import Console, Options, Report, Shard
from schemas.errors import USAGE, LatentpressError
from schemas.identity import fingerprint
from schemas.report import shortened, visible
from schemas.unused import Topic, not_used_yet
from stages.discovery import presence
from stages.discovery.places import Places
from stages.engines.jobs import Job, Worker
from stages.engines.local import run_units
from stages.plan import current_plan
from stages.stopping import MaxTime, Stopping

FLOOR = 10  # items of which the share set aside is taken at least, so that one of three stops nothing
_READERS = "Processes that decode for each that encodes.  [default: as configured]"
_PREFETCH = "Members read ahead by each process.  [default: as configured]"


class WrongUse(LatentpressError):
    """The options do not fit the program."""

    exit_code = USAGE


def refuse_shard(options: Options, program: str) -> None:
    """Only the encoding stages and decode can be divided: the others are one small job."""
    if options.shard.total > 1:
        raise WrongUse(
            f"{program} is one job and can't be divided with --shard",
            f"run `latentpress {program}` once; --shard is for the encoding stages",
        )


@dataclass(frozen=True)
class EncodingStage:
    """One encoding stage. `parts`: everything beyond its inputs that determines its bytes (no torch needed to
    say it). `load`: imports the model's library and makes the worker."""

    name: str
    kind: str  # the folder of its shards: text | latents | vision
    parts: Callable[[Config], dict[str, Any]]
    load: Callable[[Job], Worker]
    units: str = ""  # the kind of units that it makes shards of, where that is another: text | latents
    size: Callable[[Config, Unit], int] = lambda config, unit: unit.estimated_bytes  # of a unit's shard, in bytes

    @property
    def of(self) -> str:
        """What its members are: "text" or "latents"."""
        return self.units or self.kind

    def fingerprint(self, config: Config) -> str:
        return fingerprint(self.parts(config))

    def work(self, store: Store, config: Config, plan: Generation, retry: bool = False) -> "Work":
        """Compare the plan's units with the shards there are. retry: try again everything that was set aside."""
        name = self.fingerprint(config)
        wanted = plan.active_texts if self.of == "text" else plan.active_samples
        done = done_units(store, f"{self.kind}/{name}")
        damaged: dict[str, DamageError] = {}
        lists = _of_items(rejects.read(store, reject_folder(self.name, name), damaged), wanted)
        places = Places(config, plan)
        again = {
            unit
            for unit, rows in lists.items()
            if any(retry or (row["retry"] and places.whole(self.of, row["item"])) for row in rows)
        }
        units = plan.units(self.of)
        held = pa.array([name for unit in units for name in unit.members], pa.string())
        lost = len(wanted) - (pc.sum(pc.is_in(wanted, value_set=held)).as_py() or 0)
        if lost:
            raise LatentpressError(
                f"plan {plan.name} wants {lost} items that no unit holds: an older plan was removed",
                "run `latentpress bucket`, which plans them again",
            )
        again = (again | damaged.keys()) & done.keys()
        return Work(plan, name, units, wanted, _counts(units, held, wanted), done, again, lists, damaged)

    def run(
        self,
        config: Config,
        options: Options,
        console: Console,
        *,
        retry_set_aside: Annotated[bool, typer.Option(help="Try again everything that was set aside.")] = False,
        max_time: MaxTime = None,
        readers: Annotated[int | None, typer.Option(min=1, max=MOST_PROCESSES, metavar="N", help=_READERS)] = None,
        prefetch: Annotated[int | None, typer.Option(min=1, max=MOST_PREFETCH, metavar="N", help=_PREFETCH)] = None,
    ) -> Report:
        """Do this process' part of what remains, and report."""
        stopping, store = Stopping(max_time), Store(config.root)
        plan = current_plan(store, config)
        if not options.dry_run:
            config = config.model_copy(update={"model": pinned(config.model, store)})
        work = self.work(store, config, plan, retry_set_aside)
        mine = work.part(options.shard)
        for damage in work.damaged.values():
            console.warn(f"{damage.message}; its unit is done again")
        before = len(work.units) - len(work.todo)
        report = Report(program=self.name, skipped=_members(work.units) - _members(work.todo))
        report.details = {
            "cache": f"{self.kind}/{work.fingerprint}",
            "units": f"{len(work.units)}, {before} done before, {len(mine)} in this run",
            "to_encode_mib": round(sum(self.size(config, unit) for unit in mine) / 2**20, 2),
        }
        topics: dict[str, tuple[Topic, ...]] = {"latents": ("masks", "regularisation"), "vision": ("vision",)}
        for text in not_used_yet(config, *topics.get(self.kind, ())):
            console.warn(text)
        if options.dry_run:
            report.remaining = _members(mine)
            _list_set_aside(store, self, work, report)
            return report
        limit = Limit(self, store, config, work)
        if mine:
            watched = presence.watched(work.plan, self.kind, work.wanted_of(mine))
            presence.require(Places(config, work.plan), self.kind, watched)
            _write_provenance(store, self, work.fingerprint, config)
            given = {key: value for key, value in (("readers", readers), ("prefetch", prefetch)) if value}
            resources = options.resources(config, self.name).model_copy(update=given)
            assert isinstance(resources, Encoding)
            job = Job(config, work.plan.name, work.fingerprint, resources, watched=watched)
            with stopping.by_signals():
                _run_units(store, self, job, work.plan, mine, limit, console, report)
            work = self.work(store, config, work.plan)
            if stopping.reason:
                _say_stopped(report, self.name, stopping.reason, work.part(options.shard))
        _list_set_aside(store, self, work, report)
        return report


@dataclass(frozen=True)
class Work:
    """What is to be done and what is done, for one stage and one plan."""

    plan: Generation
    fingerprint: str
    units: list[Unit]
    wanted: pa.Array  # ids of members that the plan holds active
    counts: dict[str, int]  # unit id -> how many of its members are wanted
    done: dict[str, str]  # unit id -> shard path
    again: set[str]  # units whose shard lacks a wanted member that may work now
    lists: dict[str, list[dict]]  # unit id -> what was set aside of it and is wanted
    damaged: dict[str, DamageError] = field(default_factory=dict)  # unit id -> what is wrong with that list

    @property
    def todo(self) -> list[Unit]:
        return self.part(Shard())

    def part(self, shard: Shard) -> list[Unit]:
        """What remains of one part. Parts are cut from all units, so they stay the same while others finish."""
        return [unit for unit in shard.of(self.units) if unit.unit_id not in self.done or unit.unit_id in self.again]

    def wanted_of(self, units: Sequence[Unit]) -> pa.Array:
        """Ids of the wanted members of some units."""
        members = pa.array([name for unit in units for name in unit.members], pa.string())
        return members.filter(pc.is_in(members, value_set=self.wanted))

    @property
    def set_aside(self) -> list[dict]:
        """Wanted members that were set aside, from this run and from earlier ones."""
        return [row for rows in self.lists.values() for row in rows]


def _say_stopped(report: Report, name: str, reason: str, left: Sequence[Unit]) -> None:
    report.details["stopped"] = f"by {reason}; {len(left)} units remain, what is done is kept"
    report.remaining = _members(left)
    if left:
        report.next_steps.append(f"latentpress {name}")


def _counts(units: list[Unit], members: pa.Array, wanted: pa.Array) -> dict[str, int]:
    """Wanted members of each unit; `members` are those of all units in a row."""
    before = np.concatenate([[0], np.cumsum(pc.is_in(members, value_set=wanted).to_numpy(zero_copy_only=False))])
    ends = np.cumsum([0, *(len(unit.members) for unit in units)])
    return dict(zip((unit.unit_id for unit in units), np.diff(before[ends]).tolist(), strict=True))


def _of_items(lists: dict[str, list[dict]], wanted: pa.Array) -> dict[str, list[dict]]:
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


def told(plan: Generation, truncated: Iterable[Truncated]) -> list[dict[str, Any]]:
    """For a report: truncated texts by their words."""
    return [
        {
            "item": row.id,
            "path": shortened(plan.texts[row.id]["text"]),
            "reason": f"{row.kept} of {row.tokens} tokens kept",
        }
        for row in truncated
    ]


def reject_folder(stage: str, fingerprint: str) -> str:
    return f"{stage}/{fingerprint}"


def _members(units: Sequence[Unit]) -> int:
    return sum(len(unit.members) for unit in units)


def _run_units(
    store: Store,
    stage: EncodingStage,
    job: Job,
    plan: Generation,
    units: list[Unit],
    limit: "Limit",
    console: Console,
    report: Report,
) -> None:
    members = {unit.unit_id: unit.members for unit in units}
    written, remarks = 0, Counter[str]()
    what = "texts" if stage.of == "text" else "samples"
    with console.progress(_members(units), stage.name, what) as progress:
        for outcome in run_units(stage.load, job, iter(units), progress.advance, console.warn):
            if outcome.shard is None:
                report.failed.append({"item": outcome.unit, "reason": "failed", "message": outcome.error})
                report.remaining += len(members[outcome.unit])
                continue
            rejects.write(store, reject_folder(stage.name, job.fingerprint), outcome.unit, list(outcome.set_aside))
            report.truncated += told(plan, outcome.truncated)
            remarks.update(outcome.remarks)
            if outcome.smaller:
                console.warn(f"unit {outcome.unit}: out of memory; {outcome.smaller}")
                report.details["units_in_smaller_batches"] = report.details.get("units_in_smaller_batches", 0) + 1
            report.done += outcome.encoded
            written += outcome.bytes
            limit.count(outcome.unit, outcome.set_aside)
    report.details["written_mib"] = round(written / 2**20, 2)
    if remarks:
        rows = [{"items": count, "of": report.done, "remark": remark} for remark, count in remarks.items()]
        report.details["remarks"] = rows


class Limit:
    """Of the members that the plan wants, what was tried and set aside, in this run and in earlier ones. Missing media
    is not counted: `presence` stops a stage that finds most of it missing, and index what lacks any.

    LatentpressError, at once or by `count`, where more than `max_reject_fraction` of them were set aside. A run
    that was stopped so is stopped again, until they are mended or the limit is raised.
    """

    def __init__(self, stage: EncodingStage, store: Store, config: Config, work: Work) -> None:
        self._stage, self._wanted = stage, work.wanted
        self._folder = store.path(f"rejects/{reject_folder(stage.name, work.fingerprint)}")
        self._fraction = config.stages.max_reject_fraction
        self._tried = self._aside = 0
        self._counts = work.counts
        settled = [unit.unit_id for unit in work.units if unit.unit_id in work.done and unit.unit_id not in work.again]
        self._tried += sum(work.counts[unit] for unit in settled)
        aside = _unusable(row for unit in settled for row in work.lists.get(unit, []))
        self._aside += len(aside)
        self._check(aside)

    def count(self, unit: str, set_aside: Sequence[dict]) -> None:
        """A unit that was just done."""
        aside = _unusable(_of_items({unit: list(set_aside)}, self._wanted).get(unit, []))
        self._tried += self._counts[unit]
        self._aside += len(aside)
        self._check(aside)

    def _check(self, aside: Sequence[dict]) -> None:
        if aside and self._aside > self._fraction * max(self._tried, FLOOR):
            what = "texts" if self._stage.of == "text" else "samples"
            raise LatentpressError(
                f"{self._stage.name} stopped: {self._aside} of {self._tried} {what} were set aside, more than "
                f"stages.max_reject_fraction = {self._fraction} of them (of {FLOOR}, where they are fewer); the last: "
                f"{visible(aside[-1]['message'])}",
                f"mend them and run `latentpress {self._stage.name} --retry-set-aside`, or raise that limit in the "
                f"configuration; the list is under {self._folder}",
            )


def _unusable(rows: Iterable[dict]) -> list[dict]:
    return [row for row in rows if row["reason"] != "missing"]


def _list_set_aside(store: Store, stage: EncodingStage, work: Work, report: Report) -> None:
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
    record = {"fingerprint": fingerprint, **stage.parts(config)}
    data = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False).encode()
    if not store.exists(rel) or store.read_bytes(rel) != data:
        store.publish_bytes(rel, data)
