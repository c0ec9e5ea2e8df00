"""A plan as columns: which samples a page shows, and the numbers for each."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan
from cache.store.store import Store
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, Crop, aspect_distortion, cropped_share
from stages.discovery.media_locations import MediaLocations
from stages.discovery.media_table import read_media_table
from stages.pages.html import Link
from stages.planning import summary
from stages.planning.plan_builder import crop_statistics

TableRow = dict[str, Any]


class PlanTable:
    """A plan as columns.

    active: its n rows without those of validation. width, height: (n,) of the item as displayed, in pixels; 0 if the
    media table no longer has it. cropped_share, stretched: (n,) share cut off and change of aspect; NaN without a size.
    samples: the active samples, validation included, with the columns that sizes are computed from. locations: of their
    files.
    """

    def __init__(self, store: Store, config: Config, plan: Plan) -> None:
        self.store, self.config, self.plan = store, config, plan
        self.locations = MediaLocations(config, plan)
        active = plan.active.filter(pc.not_equal(plan.active.column("role"), VALIDATION)).combine_chunks()
        samples = plan.sample_table.select(["sample_id", "media_id", "geometry", "condition", "mask_id"])
        row = pc.index_in(active.column("sample_id"), value_set=samples.column("sample_id").combine_chunks())
        if row.null_count:
            raise LatentpressError(
                f"plan {plan.name} has {row.null_count} samples that no plan describes: an older plan was removed",
                "run `latentpress bucket`, which plans them again",
            )
        self.active = active
        self.samples = samples.filter(pc.is_in(samples.column("sample_id"), value_set=plan.active_sample_ids))
        media_id, displayed = samples.column("media_id").take(row), np.zeros((2, active.num_rows), np.int64)
        columns = ["path", "media_id", "width", "height"]
        for dataset in pc.unique(active.column("dataset")).to_pylist():
            try:
                media = read_media_table(store, dataset).select(columns).combine_chunks()
            except LatentpressError:
                continue  # the dataset was removed; the plan and perhaps the files remain
            in_dataset = pc.equal(active.column("dataset"), dataset)
            indices = pc.index_in(active.column("path").filter(in_dataset), value_set=media.column("path"))
            is_same = pc.fill_null(pc.equal(media.column("media_id").take(indices), media_id.filter(in_dataset)), False)
            size = [pc.fill_null(media.column(side).take(indices), 0).to_numpy() for side in ("width", "height")]
            displayed[:, in_dataset.to_numpy()] = np.where(is_same.to_numpy(), size, 0)
        self.width, self.height = displayed
        known = self.width > 0
        geometry = samples.column("geometry").take(row).combine_chunks()
        crop = Crop(*(np.asarray(geometry.field(name)).astype(np.int64) for name in ("resize_w", "resize_h", "x", "y")))
        coded = geometry.field("bucket").dictionary_encode()
        buckets = [Bucket.parse(name) for name in coded.dictionary.to_pylist()]
        sides = np.array([(bucket.width, bucket.height) for bucket in buckets], np.int64).reshape(-1, 2)
        # Unknown sizes count as 1; their results are not used.
        width, height = np.where(known, self.width, 1), np.where(known, self.height, 1)
        lost = cropped_share(width, height, crop, *sides[np.asarray(coded.indices)].T)
        self.cropped_share = np.where(known, lost, np.nan)
        self.stretched = np.where(known, aspect_distortion(width, height, crop), np.nan)

    @property
    def buckets(self) -> list[str]:
        return sorted(pc.unique(self.active.column("bucket")).to_pylist())

    def count(self, bucket: str, role: str | None = None) -> int:
        chosen = pc.equal(self.active.column("bucket"), bucket)
        chosen = chosen if role is None else pc.and_(chosen, pc.equal(self.active.column("role"), role))
        return pc.sum(chosen).as_py() or 0

    def choose(self, count: int, buckets: Sequence[str], *, among: np.ndarray | None = None) -> dict[str, list[int]]:
        """bucket -> `count` rows of `active`: those of the lowest ids, a random choice that stays when data is added.

        among: (n,) bool, which rows may be chosen.
        """
        table = self.active.select(["bucket", "sample_id"])
        table = table.append_column("row", pa.array(np.arange(table.num_rows)))
        table = table if among is None else table.filter(pa.array(among))
        chosen = {}
        for name in buckets:
            in_bucket = table.filter(pc.equal(table.column("bucket"), name))
            # Two files with the same bytes have the same id.
            lowest = in_bucket.group_by("sample_id").aggregate([("row", "min")]).sort_by("sample_id").slice(0, count)
            chosen[name] = lowest.column("row_min").to_pylist()
        return chosen

    def bucket_rows(self) -> list[TableRow]:
        """The table of buckets as `latentpress bucket` prints it, from the plan and the media tables."""
        known = pa.array(self.width > 0)
        columns = (pa.array(values).filter(known) for values in (self.stretched, self.cropped_share))
        crops = crop_statistics(self.active.column("bucket").filter(known), *columns)
        return summary.bucket_table(self.config, self.active, self.samples, crops)


def bucket_anchor(bucket: str) -> str:
    """The id of a bucket's section."""
    return f"bucket-{bucket.replace('@', '-')}"


def link_buckets(rows: Iterable[TableRow]) -> list[TableRow]:
    """The rows of a table of buckets, each of which leads to its section."""
    return [row | {"bucket": Link(row["bucket"], f"#{bucket_anchor(row['bucket'])}")} for row in rows]
