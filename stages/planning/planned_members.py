"""The index of a set with a limited cache, made from the plan before anything is encoded.

Every wanted member counts as encoded, in its unit's shard and at its place among the unit's members, so the tables are
those that `index` makes of a full cache in which nothing is set aside.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.models.weights import WeightsError, read_component_config
from cache.sets.plans import Plan, Unit
from cache.shards.shard import SUFFIXES, unit_name
from schemas.config.pipeline import Config
from stages.planning.join import EncodedMembers, IdLookup, TrainingSetTables
from stages.planning.units import text_tensor_limits

ROW_BYTES, SHARD_BYTES = 4096, 1 << 13  # more than ids, headers, checksums and descriptions take


def planned_members(units: Sequence[Unit], folder: str, format: str, wanted: pa.Array) -> EncodedMembers:
    """The future places of the wanted members of units. folder: of their shards. format: cache.format."""
    ids = pa.array([name for unit in units for name in unit.members], pa.string())
    ends = np.cumsum([0, *(len(unit.members) for unit in units)])
    at = IdLookup(ids).find(wanted)
    shard = np.searchsorted(ends, at, side="right") - 1
    paths = [f"{folder}/{unit.unit_id}{SUFFIXES[format]}" for unit in units]
    return EncodedMembers(IdLookup(wanted), paths, shard, at - ends[shard], {}, [], wanted.slice(0, 0))


def describe_limits(
    config: Config,
    plan: Plan,
    joined: TrainingSetTables,
    estimates: dict[str, Callable[[Config, Unit], int]],
) -> dict[str, Any]:
    """The part of set.json about such a set: "tensors" that samples have, and the most "bytes" of each shard.

    estimates: kind -> the bytes of the tensors of a unit of samples."""
    limits: dict[tuple[str, str], int] = {}
    texts = plan.text_table
    sizes = dict(
        zip(
            texts.column("text_id").to_pylist(),
            text_tensor_limits(config, texts, text_widths(config)).tolist(),
            strict=True,
        )
    )
    for unit in plan.units("text"):
        limits["text", unit.unit_id] = sum(sizes[member] for member in unit.members) + _overhead(unit)
    for unit in plan.units("latents"):
        for kind, estimate in estimates.items():
            limits[kind, unit.unit_id] = estimate(config, unit) + _overhead(unit)
    shards = joined.tables["shards"]
    pairs = zip(shards.column("kind").to_pylist(), shards.column("path").to_pylist(), strict=True)
    masked = plan.sample_table.filter(pc.is_in(plan.sample_table.column("sample_id"), value_set=plan.active_sample_ids))
    tensors = {
        "latent": True,
        "condition": config.model.condition is not None,
        "mask": masked.column("mask_id").null_count < masked.num_rows,
        "vision": "vision" in estimates,
    }
    return {
        "tensors": [name for name, given in tensors.items() if given],
        "bytes": [limits[kind, unit_name(path.rpartition("/")[2])] for kind, path in pairs],
    }


def text_widths(config: Config) -> dict[str, int]:
    """The widths of a text's tensors, as the transformer reads them; the family's where it is not on this machine."""
    model, family = config.model, config.model.family_spec
    widths = dict.fromkeys(family.text_widths, family.text_width)
    with suppress(WeightsError):
        shape = read_component_config(model.source, model.revision, family.components[0])
        known = {name: shape.get(key) for name, key in family.text_widths.items()}
        widths |= {name: width for name, width in known.items() if isinstance(width, int)}
    return widths


def _overhead(unit: Unit) -> int:
    return ROW_BYTES * len(unit.members) + SHARD_BYTES
