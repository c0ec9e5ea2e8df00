"""A plan as columns: what of it a page shows, and the numbers that stand beside each picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.plans import Plan
from cache.store import Store
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, Crop, aspect_distortion, cropped_share
from stages.discovery.media_table import read_media_table
from stages.planning import summary

TableRow = dict[str, Any]


@dataclass(frozen=True)
class PlanTable:
    """A plan as columns. active: its (n,) rows but those of validation, each with its cut, the item's size as shown in
    pixels (0 where discover's table no longer has it), the share cut off and the change of aspect (NaN there)."""

    store: Store
    config: Config
    plan: Plan
    active: pa.Table
    width: np.ndarray
    height: np.ndarray
    cropped_share: np.ndarray
    stretched: np.ndarray
    samples: pa.Table

    @classmethod
    def of(cls, store: Store, config: Config, plan: Plan) -> "PlanTable":
        active = plan.active.filter(pc.not_equal(plan.active.column("role"), VALIDATION)).combine_chunks()
        samples = plan.sample_table.select(["sample_id", "media_id", "geometry", "condition", "mask_id"])
        row = pc.index_in(active.column("sample_id"), value_set=samples.column("sample_id").combine_chunks())
        if row.null_count:
            raise LatentpressError(
                f"plan {plan.name} has {row.null_count} samples that no plan describes: an older plan was removed",
                "run `latentpress bucket`, which plans them again",
            )
        media_id = samples.column("media_id").take(row)
        width, height = _item_sizes(store, config, active, media_id)
        known = width > 0
        crop, cut = _parse_crops(samples.column("geometry").take(row).combine_chunks())
        # Where the size is not known any will do: its results are not used.
        across, down = np.where(known, width, 1), np.where(known, height, 1)
        lost = np.where(known, cropped_share(across, down, crop, *cut), np.nan)
        stretched = np.where(known, aspect_distortion(across, down, crop), np.nan)
        planned = samples.filter(pc.is_in(samples.column("sample_id"), value_set=plan.active_sample_ids))
        return cls(store, config, plan, active, width, height, lost, stretched, planned)

    @property
    def buckets(self) -> list[str]:
        return sorted(pc.unique(self.active.column("bucket")).to_pylist())

    def count(self, bucket: str, role: str | None = None) -> int:
        mine = pc.equal(self.active.column("bucket"), bucket)
        mine = mine if role is None else pc.and_(mine, pc.equal(self.active.column("role"), role))
        return pc.sum(mine).as_py() or 0

    def choose(self, count: int, buckets: Sequence[str], *, among: np.ndarray | None = None) -> dict[str, list[int]]:
        """bucket -> rows of `active`: those of the lowest ids, which are random and stay when others are added.

        among: (n,) which rows may be chosen.
        """
        table = self.active.select(["bucket", "sample_id"])
        table = table.append_column("row", pa.array(np.arange(table.num_rows)))
        table = table if among is None else table.filter(pa.array(among))
        found = {}
        for name in buckets:
            mine = table.filter(pc.equal(table.column("bucket"), name))
            # An id may stand there twice for two files of the same bytes.
            least = mine.group_by("sample_id").aggregate([("row", "min")]).sort_by("sample_id").slice(0, count)
            found[name] = least.column("row_min").to_pylist()
        return found

    def bucket_rows(self) -> list[TableRow]:
        """The table of buckets as `latentpress bucket` prints it, from what the plan and discover's tables say."""
        coded = self.active.column("bucket").combine_chunks().dictionary_encode()
        names, code = coded.dictionary.to_pylist(), np.asarray(coded.indices)
        rows = [{"bucket": name, "samples": 1, "distortion": np.nan, "lost": np.nan, "mean": np.nan} for name in names]
        for number, row in enumerate(rows):
            mine = (code == number) & (self.width > 0)
            if mine.any():
                lost = self.cropped_share[mine]
                row |= {"samples": int(mine.sum()), "distortion": float(self.stretched[mine].max())}
                row |= {"lost": float(lost.max()), "mean": float(lost.mean())}
        return summary.bucket_table(self.config, self.active, self.samples, rows)


def _item_sizes(
    store: Store, config: Config, active: pa.Table, media_id: pa.ChunkedArray
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) width and height as discover found them; 0 where its table no longer has the item with that content."""
    sizes = np.zeros((2, active.num_rows), np.int64)
    for dataset in pc.unique(active.column("dataset")).to_pylist():
        try:
            media = read_media_table(store, dataset).select(["path", "media_id", "width", "height"]).combine_chunks()
        except LatentpressError:
            continue  # removed since: the plan is still there, and its files may be
        mine = pc.equal(active.column("dataset"), dataset)
        row = pc.index_in(active.column("path").filter(mine), value_set=media.column("path"))
        same = pc.fill_null(pc.equal(media.column("media_id").take(row), media_id.filter(mine)), False)
        found = [pc.fill_null(media.column(side).take(row), 0).to_numpy() for side in ("width", "height")]
        sizes[:, mine.to_numpy()] = np.where(same.to_numpy(), found, 0)
    return sizes[0], sizes[1]


def _parse_crops(geometry: pa.StructArray) -> tuple[Crop, np.ndarray]:
    """(crops of n rows, (2, n) width and height of their buckets)."""
    numbers = (np.asarray(geometry.field(name)).astype(np.int64) for name in ("resize_w", "resize_h", "x", "y"))
    coded = geometry.field("bucket").dictionary_encode()
    parsed = [Bucket.parse(name) for name in coded.dictionary.to_pylist()]
    sides = np.array([(bucket.width, bucket.height) for bucket in parsed], np.int64).reshape(-1, 2)
    return Crop(*numbers), sides[np.asarray(coded.indices)].T
