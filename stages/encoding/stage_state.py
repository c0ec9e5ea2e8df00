"""What an encoding stage has done of a plan, and what remains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from cache.damage import DamageError
from cache.plans import Plan, Unit
from schemas.cli.options import NOT_PARTITIONED, Partition


@dataclass(frozen=True)
class StageState:
    """What one stage has done of one plan, and what remains."""

    plan: Plan
    fingerprint: str
    units: list[Unit]
    wanted_ids: pa.Array  # the members that are active in the plan
    counts: dict[str, int]  # unit id -> how many of its members are wanted
    done: dict[str, str]  # unit id -> shard path
    retry_units: set[str]  # units whose shard lacks a wanted member that may work now
    rejects_by_unit: dict[str, list[dict]]  # unit id -> the wanted members that were set aside
    damaged_lists: dict[str, DamageError] = field(default_factory=dict)  # unit id -> what is wrong with that list

    def remaining_units(self, partition: Partition = NOT_PARTITIONED) -> list[Unit]:
        """What remains of one partition. It is cut from all units, so it stays the same while others finish."""
        settled = self.done.keys() - self.retry_units
        return [unit for unit in partition.select(self.units) if unit.unit_id not in settled]

    def wanted_members(self, units: Sequence[Unit]) -> pa.Array:
        """Ids of the wanted members of these units."""
        members = pa.array([name for unit in units for name in unit.members], pa.string())
        return members.filter(pc.is_in(members, value_set=self.wanted_ids))

    @property
    def set_aside(self) -> list[dict]:
        """Wanted members that were set aside, in this run and in earlier ones."""
        return [row for rows in self.rejects_by_unit.values() for row in rows]


def wanted_rows(rows_by_unit: Mapping[str, Sequence[dict]], wanted: pa.Array) -> dict[str, list[dict]]:
    items = pa.array([row["item"] for rows in rows_by_unit.values() for row in rows], pa.string())
    hits = iter(pc.is_in(items, value_set=wanted).to_pylist())
    kept = {unit: [row for row in rows if next(hits)] for unit, rows in rows_by_unit.items()}
    return {unit: rows for unit, rows in kept.items() if rows}
