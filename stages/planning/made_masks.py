"""Masks that a model made, as companions of a dataset's pictures and clips, each clip with its own. The user's masks
stay as they are."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.tables import MADE
from stages.planning.candidates import CandidateItems
from stages.planning.items import ItemRequest, item_members

NO_MASK = "has no mask, and none was made of it; `latentpress status --rejects` says why; or draw one (mask_data)"


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
