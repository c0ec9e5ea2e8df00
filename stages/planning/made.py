"""Captions and masks that a model made, each clip with its own.

Made captions are captions of a dataset's pictures and clips beside, or in the place of, the captions of its files; one
that a person edited stays as it is. Made masks are companions; the user's masks stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.tables import MADE
from stages.planning.candidates import CandidateItems, message_column
from stages.planning.clip_selection import SelectedClips
from stages.planning.items import ItemRequest, item_members

NO_CAPTION = "has no caption, and none was made of it; `latentpress status --rejects` says why; or write one"

NO_MASK = "has no mask, and none was made of it; `latentpress status --rejects` says why; or draw one (mask_data)"


@dataclass(frozen=True)
class CaptionSet:
    """One set of made captions. request: by which they were made. table: of cache.sets.item_rows.CAPTIONS_SCHEMA."""

    request: ItemRequest
    table: pa.Table


@dataclass(frozen=True)
class MadeCaptions:
    """The sets that a dataset uses, all as alternatives. edited: media ids of items whose captions a person edited."""

    sets: Sequence[CaptionSet]
    edited: pa.Array

    def join(self, config: Config, dataset: Dataset, items: CandidateItems) -> tuple[pa.ListArray, NDArray[np.int64]]:
        """The captions of each picture and clip of the items, and its item, in the items' order, as
        `select_clips_and_images` gives them."""
        owner, made = np.zeros(0, np.int64), list[pa.Array]()
        for used in self.sets:
            clips, rows = item_members(config, dataset, used.request, items)
            owner, ids = clips.item, rows.column("sample_id").combine_chunks()
            indices = pc.index_in(ids, value_set=used.table.column("sample_id").combine_chunks())
            made.append(used.table.column("captions").combine_chunks().take(indices))
        file_captions = items.column("captions").take(pa.array(owner))
        has_own = list_lengths(file_captions) > 0
        has_made = np.zeros(len(owner), bool)
        for captions in made:
            has_made |= np.asarray(captions.is_valid())
        edited = np.asarray(pc.is_in(items.column("media_id").take(pa.array(owner)), value_set=self.edited))
        uses_made = {"fill": ~has_own, "beside": has_made, "instead": has_made}[dataset.made_captions] & ~edited
        uses_own = ~uses_made | (dataset.made_captions == "beside")
        parts = [pc.if_else(pa.array(uses_own), file_captions, None)]
        parts += [pc.if_else(pa.array(uses_made), captions, None) for captions in made]
        return _join_lists(parts), owner


def list_lengths(lists: pa.Array) -> NDArray[np.int64]:
    """(n,) the length of each list; 0 for null."""
    return np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)


def renumber(owner: NDArray[np.int64], stay: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The items of the rows whose item stays, by the items' numbers among those."""
    return (np.cumsum(stay) - 1)[owner[stay[owner]]]


def record_clips_without(
    items: CandidateItems, clips: SelectedClips, has: NDArray[np.bool_], reason: str, problem: str
) -> None:
    """Record the clips, (m,), that do not have what a model was to make, among the items that were dropped."""
    if not has.all():
        without = CandidateItems(items.dataset, items.table.take(pa.array(clips.item[~has])))
        starts = message_column("has a clip at ", clips.start[~has], f" s that {problem}")
        without.drop(np.ones(len(without), bool), reason, lambda gone: starts)
        items.rejects += without.rejects


def _join_lists(parts: Sequence[pa.Array]) -> pa.ListArray:
    """The lists of several columns of one length, joined row by row."""
    owner = np.concatenate([np.asarray(pc.list_parent_indices(part)).astype(np.int64) for part in parts])
    values = pa.concat_arrays([pc.list_flatten(part) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(parts[0])))])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), values.take(pa.array(np.argsort(owner, kind="stable")))
    )


@dataclass(frozen=True)
class MadeMasks:
    """The masks of one cache. request: by which they were made. table: of cache.sets.item_rows.list_masks."""

    request: ItemRequest
    fingerprint: str
    table: pa.Table

    def find(self, config: Config, dataset: Dataset, items: CandidateItems) -> tuple[pa.Table, NDArray[np.int64]]:
        """(m,) mask_path, mask_id and mask_kind of each picture and clip of the items, null where there is none; and
        its item, in the items' order, as `select_clips_and_images` gives them. A made mask is identified by its item,
        the model and the settings."""
        clips, rows = item_members(config, dataset, self.request, items)
        ids = rows.column("sample_id").combine_chunks()
        paths = (
            self.table["path"]
            .combine_chunks()
            .take(pc.index_in(ids, value_set=self.table["sample_id"].combine_chunks()))
        )
        made = {"path": paths, "kind": pc.if_else(paths.is_valid(), MADE, None)}
        made["id"] = pc.if_else(
            paths.is_valid(), identity.hash_values(pc.binary_join_element_wise(self.fingerprint, ids, "/")), None
        )
        file_columns = {"path": "mask", "id": "mask_id", "kind": "mask_kind"}
        owner = pa.array(clips.item)
        taken = {name: items.column(column).take(owner) for name, column in file_columns.items()}
        has_own = taken["id"].is_valid()
        columns = {f"mask_{name}": pc.if_else(has_own, taken[name], made[name]) for name in file_columns}
        return pa.table(columns), clips.item

    def drop_items_without(self, config: Config, dataset: Dataset, items: CandidateItems) -> None:
        """Drop the items of which no picture or clip has a mask. A video without clips is dropped as such, later."""
        masks, owner = self.find(config, dataset, items)
        has, of_any = np.asarray(masks["mask_id"].is_valid()), np.bincount(owner, minlength=len(items)) > 0
        items.drop(of_any & (np.bincount(owner[has], minlength=len(items)) == 0), "no-mask", NO_MASK)
