"""The state of an encoding stage: units of a plan that are done, units that remain, and members that were rejected."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import rejects
from cache.sets.plans import Plan, Unit
from cache.shards.shard import TruncatedText, find_done_units
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.cli.console import Report
from schemas.cli.options import NOT_PARTITIONED, Partition
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable, shorten
from stages.discovery.media_locations import MediaLocations

#: Kind of unit -> plural name of its members.
MEMBER_NAMES = {"text": "texts", "latents": "samples", "items": "items"}
MIN_REJECT_BASE = 10  # least base of max_reject_fraction, so that one reject of three members stops nothing


class StageNames(NamedTuple):
    """Names of an encoding stage. name: its program. kind: folder of its shards. member_kind: key of MEMBER_NAMES."""

    name: str
    kind: str
    member_kind: str


@dataclass(frozen=True)
class StageState:
    """The state of one stage for one plan."""

    stage: StageNames
    plan: Plan
    fingerprint: str
    units: list[Unit]
    wanted_ids: pa.Array  # the members that are active in the plan
    counts: dict[str, int]  # unit id -> number of its wanted members
    shard_paths: dict[str, str]  # unit id -> shard path
    retry_units: set[str]  # units whose shard lacks a wanted member that may work now
    rejects_by_unit: dict[str, list[dict]]  # unit id -> the wanted members that were rejected
    damaged_lists: dict[str, DamageError] = field(default_factory=dict)  # unit id -> the damage of its list of rejects

    def remaining_units(self, partition: Partition = NOT_PARTITIONED) -> list[Unit]:
        """Return the units of one partition that remain. The partition is cut from all units, so it stays the same
        while other processes finish units."""
        settled = self.shard_paths.keys() - self.retry_units
        return [unit for unit in partition.select(self.units) if unit.unit_id not in settled]

    def wanted_members(self, units: Sequence[Unit]) -> pa.Array:
        """Ids of the wanted members of these units."""
        members = _list_members(units)
        return members.filter(pc.is_in(members, value_set=self.wanted_ids))

    @property
    def reject_folder(self) -> str:
        return reject_folder(self.stage.name, self.fingerprint)

    @property
    def rejected_members(self) -> list[dict]:
        """Wanted members that were rejected, in this run and in earlier runs."""
        return [row for rows in self.rejects_by_unit.values() for row in rows]


def find_state(
    stage: StageNames, fingerprint: str, plan: Plan, locations: MediaLocations, retry: bool, ids: frozenset[str] | None
) -> StageState:
    """Compare the plan's units with the existing shards. locations: locations of the plan's media. retry: whether to
    encode every unit with rejected members again. ids: ids of the units to encode; None for all."""
    wanted_ids = plan.active_text_ids if stage.member_kind == "text" else plan.active_sample_ids
    units = plan.units(stage.member_kind)
    missing_count = len(wanted_ids) - (pc.sum(pc.is_in(wanted_ids, value_set=_list_members(units))).as_py() or 0)
    if missing_count:
        raise LatentpressError(
            f"plan {plan.name} has {missing_count} items that are in no unit: an older plan was removed",
            "run `latentpress bucket` to plan them again",
        )
    shard_paths = find_done_units(plan.store, f"{stage.kind}/{fingerprint}")
    damaged: dict[str, DamageError] = {}
    listed = rejects.read_stage(plan.store, reject_folder(stage.name, fingerprint), damaged)
    rejected = select_wanted(listed, wanted_ids)
    retry_units = {
        unit
        for unit, rows in rejected.items()
        if any(retry or (row["retry"] and locations.all_present(stage.member_kind, row["item"])) for row in rows)
    }
    retry_units = (retry_units | damaged.keys()) & shard_paths.keys()
    is_wanted = pc.is_in(_list_members(units), value_set=wanted_ids).to_numpy(zero_copy_only=False)
    wanted_before = np.concatenate([[0], np.cumsum(is_wanted)])  # over the members of all units
    numbers = np.diff(wanted_before[np.cumsum([0, *(len(unit.members) for unit in units)])]).tolist()
    counts = {unit.unit_id: count for unit, count in zip(units, numbers, strict=True)}
    units = [unit for unit in units if ids is None or unit.unit_id in ids]
    return StageState(stage, plan, fingerprint, units, wanted_ids, counts, shard_paths, retry_units, rejected, damaged)


def _list_members(units: Sequence[Unit]) -> pa.Array:
    return pa.array([name for unit in units for name in unit.members], pa.string())


def select_wanted(rows_by_unit: Mapping[str, Sequence[dict]], wanted_ids: pa.Array) -> dict[str, list[dict]]:
    items = pa.array([row["item"] for rows in rows_by_unit.values() for row in rows], pa.string())
    hits = iter(pc.is_in(items, value_set=wanted_ids).to_pylist())
    wanted_by_unit = {unit: [row for row in rows if next(hits)] for unit, rows in rows_by_unit.items()}
    return {unit: rows for unit, rows in wanted_by_unit.items() if rows}


def reject_folder(stage: str, fingerprint: str) -> str:
    return f"{stage}/{fingerprint}"


def count_members(units: Sequence[Unit]) -> int:
    return sum(len(unit.members) for unit in units)


class RejectLimit:
    """Counts the wanted members that were tried and that were rejected, in this run and in earlier runs. Missing media
    do not count: `require_media` stops a stage if most media are missing, and `index` stops for any.

    The constructor and `add` raise LatentpressError if more than `max_reject_fraction` of the tried members were
    rejected. The next run stops in the same way until the items are corrected or the limit is raised.
    """

    def __init__(self, store: Store, max_fraction: float, state: StageState) -> None:
        """most: largest rejected fraction, stages.max_reject_fraction."""
        self._state, self._fraction = state, max_fraction
        self._folder = store.path(f"rejects/{state.reject_folder}")
        self._tried = self._rejected = 0
        settled = state.shard_paths.keys() - state.retry_units
        names = [unit.unit_id for unit in state.units if unit.unit_id in settled]
        self.add({name: state.rejects_by_unit.get(name, []) for name in names})

    def add(self, rejects_by_unit: Mapping[str, Sequence[dict]]) -> None:
        """Count encoded units. rejects_by_unit: unit id -> rejected members, empty for a unit without rejects."""
        wanted_rows = select_wanted(rejects_by_unit, self._state.wanted_ids).values()
        rejected = [row for rows in wanted_rows for row in rows if row["reason"] != "missing"]
        self._tried += sum(self._state.counts[unit] for unit in rejects_by_unit)
        self._rejected += len(rejected)
        if rejected and self._rejected > self._fraction * max(self._tried, MIN_REJECT_BASE):
            stage = self._state.stage
            members = MEMBER_NAMES[stage.member_kind]
            raise LatentpressError(
                f"{stage.name} stopped: {self._rejected} of {self._tried} {members} were rejected, more than "
                f"stages.max_reject_fraction = {self._fraction} of them (of at least {MIN_REJECT_BASE}); the last: "
                f"{escape_unprintable(rejected[-1]['message'])}",
                f"correct them and run `latentpress {stage.name} --retry-rejects`, or raise "
                f"stages.max_reject_fraction; the list is under {self._folder}",
            )


def format_truncated(plan: Plan, truncated: Iterable[TruncatedText]) -> list[dict[str, Any]]:
    """Truncated texts as rows of a report."""
    rows = ((row.id, plan.texts[row.id]["text"], f"{row.kept} of {row.tokens} tokens kept") for row in truncated)
    return [{"item": name, "path": shorten(text), "reason": reason} for name, text, reason in rows]


def report_rejects(store: Store, state: StageState, report: Report) -> None:
    report.rejects = state.rejected_members
    if report.rejects:
        report.rejects_path = store.path(f"rejects/{state.reject_folder}")
        if any(not row["retry"] for row in report.rejects):
            report.next_steps.append(f"latentpress {state.stage.name} --retry-rejects   # once the cause is corrected")
        if any(row["reason"] == "missing" for row in report.rejects):
            report.next_steps.append(f"latentpress {state.stage.name}   # once the missing files are back")
