"""Items of the shards of `features`, as arrays for the comparison of all with each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.sets.item_rows import iter_item_rows
from cache.store.store import Store
from schemas.tables import MEASURES
from stages.encoding.features.neighbors import centered
from stages.encoding.stage_state import StageState


@dataclass(frozen=True)
class ComparedItems:
    """n items, sorted by media id. measures: (n, len(MEASURES)), NaN for none. vectors: (n, width) of the model,
    without what all have in common; None without a model. layouts: (n, parts, numbers). is_clip: (n,)."""

    sample_ids: Sequence[str]
    media_ids: Sequence[str]
    measures: NDArray[np.float64]
    vectors: NDArray[np.float32] | None
    layouts: NDArray[np.float16]
    is_clip: NDArray[np.bool_]


def read_items(store: Store, state: StageState) -> ComparedItems:
    """The items of the plan whose rows are there. Each row is copied into arrays for all: the rows of a million items
    would take several times the memory. Of an item that was read in two ways the row of the greater id."""
    wanted = set(state.wanted_ids.to_pylist())
    done = [state.done[unit.unit_id] for unit in state.units if unit.unit_id in state.done]
    positions, ids = dict[str, int](), list[str]()
    measures = np.empty((len(wanted), len(MEASURES)))
    tensors = dict[str, np.ndarray]()
    for _, _, row in iter_item_rows(store, f"features/{state.fingerprint}", done):
        if row.id not in wanted:
            continue
        position = positions.setdefault(row.info["media_id"], len(positions))
        if position == len(ids):
            ids.append(row.id)
        elif row.id < ids[position]:
            continue
        ids[position] = row.id
        measures[position] = [np.nan if (value := row.info["measures"][name]) is None else value for name in MEASURES]
        for name, array in row.tensors.items():
            values = array.numpy()
            if name not in tensors:
                tensors[name] = np.empty((len(wanted), *values.shape), values.dtype)
            tensors[name][position] = values
    media_ids = sorted(positions)
    order = np.array([positions[media_id] for media_id in media_ids], np.int64)
    clips = state.plan.sample_table.filter(pc.equal(state.plan.sample_table.column("kind"), "video"))
    is_clip = set(clips.column("sample_id").to_pylist())
    sample_ids = [ids[position] for position in order]
    layouts = tensors["layouts"][order] if tensors else np.zeros((0, 1, 1), np.float16)
    tensors.pop("layouts", None)
    return ComparedItems(
        sample_ids,
        media_ids,
        measures[order],
        centered(tensors["features"][order].astype(np.float32)) if "features" in tensors else None,
        layouts,
        np.array([name in is_clip for name in sample_ids], bool),
    )
