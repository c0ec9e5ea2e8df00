"""Units that no cache has a shard of yet, divided again, for jobs that are too short for them."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan, Unit
from cache.shards.shard import unit_name
from cache.store.damage import ENCODE_PROGRAMS
from schemas.tables import SAMPLES_SCHEMA, TEXTS_SCHEMA
from stages.planning.plan_builder import drop_duplicate_ids


@dataclass(frozen=True)
class OpenMembers:
    """The members of units that are to be divided. samples, texts: rows of SAMPLES_SCHEMA and TEXTS_SCHEMA. unit_ids:
    of the units."""

    samples: pa.Table
    texts: pa.Table
    unit_ids: list[str]


def find_open_members(plan: Plan | None, unit_mib: float) -> OpenMembers:
    """Those of the plan's units that are larger than unit_mib, have more than one member and no shard in any cache, of
    whatever fingerprint. One listing for each kind of shard."""
    if plan is None:
        return OpenMembers(SAMPLES_SCHEMA.empty_table(), TEXTS_SCHEMA.empty_table(), [])
    names = [name.rpartition("/")[2] for kind in ENCODE_PROGRAMS for name in plan.store.list_names(kind)]
    done = {unit_name(name) for name in names}

    def is_open(unit: Unit) -> bool:
        return unit.estimated_bytes > unit_mib * 2**20 and len(unit.members) > 1 and unit.unit_id not in done

    units = {kind: [unit for unit in plan.units(kind) if is_open(unit)] for kind in ("latents", "text")}

    def rows(table: pa.Table, key: str, kind: str) -> pa.Table:
        ids = pa.array([name for unit in units[kind] for name in unit.members], pa.string())
        return drop_duplicate_ids(table.filter(pc.is_in(table.column(key), value_set=ids)), key)

    return OpenMembers(
        rows(plan.sample_table, "sample_id", "latents").cast(SAMPLES_SCHEMA),
        rows(plan.text_table, "text_id", "text").cast(TEXTS_SCHEMA),
        sorted(unit.unit_id for found in units.values() for unit in found),
    )
