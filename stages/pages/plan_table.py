"""A plan as columns: which samples a page shows, the numbers for each, and what of it is encoded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan
from cache.shards.shard import ShardRow
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, Crop, aspect_distortion, cropped_share
from stages.discovery.media_locations import MediaLocations
from stages.discovery.media_table import read_media_table
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage
from stages.pages.html import Link
from stages.planning import summary
from stages.planning.plan_builder import crop_statistics

TableRow = dict[str, Any]
StoredRow = tuple[str, ShardRow]  # path of the shard, row
MAX_OPEN_SHARDS = 16
NOT_ENCODED = "not encoded yet"


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
        active = summary.only_trained(plan.active).combine_chunks()
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
        lost = cropped_share(crop, *sides[np.asarray(coded.indices)].T)
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
        return summary.bucket_table(self.config.model, self.config.latents, self.active, self.samples, crops)


def bucket_anchor(bucket: str) -> str:
    """The id of a bucket's section."""
    return f"bucket-{bucket.replace('@', '-')}"


def link_buckets(rows: Iterable[TableRow]) -> list[TableRow]:
    """The rows of a table of buckets, each of which leads to its section."""
    return [row | {"bucket": Link(row["bucket"], f"#{bucket_anchor(row['bucket'])}")} for row in rows]


@dataclass(frozen=True)
class EncodedCaption:
    """A caption with its number of tokens, and how many of them the encoder kept. problem: why they are not known."""

    text: str
    tokens: int | None = None
    kept: int | None = None
    problem: str = ""

    @property
    def truncated(self) -> bool:
        return self.tokens is not None and self.kept is not None and self.kept < self.tokens

    @property
    def complete(self) -> bool:
        return self.tokens is not None and not self.truncated

    @property
    def token_summary(self) -> str:
        if self.problem:
            return self.problem
        return f"truncated: {self.kept} of {self.tokens} tokens kept" if self.truncated else f"{self.tokens} tokens"


class StageShards:
    """The shards of one stage. members: ids of the units that are encoded. set_aside: ids among them without a row."""

    def __init__(self, table: PlanTable, stage: EncodingStage, readers: ReaderPool) -> None:
        state = stage.state(table.store, table.config, table.plan)
        units = [unit for unit in state.units if unit.unit_id in state.done]
        self.members = pa.array((name for unit in units for name in unit.members), pa.string())
        self.set_aside = pa.array([row["item"] for row in state.set_aside], pa.string())
        self._paths = [state.done[unit.unit_id] for unit in units for _ in unit.members]
        self._store, self._readers = table.store, readers

    def read(self, names: Sequence[str]) -> dict[str, StoredRow | LatentpressError]:
        """name -> its stored row, or why it can't be read, for the names whose unit is encoded."""
        indices = pc.index_in(pa.array(names, pa.string()), value_set=self.members).to_pylist()
        return {
            name: self._read(self._paths[index], name)
            for name, index in zip(names, indices, strict=True)
            if index is not None
        }

    def _read(self, path: str, name: str) -> StoredRow | LatentpressError:
        try:
            meta = self._readers.meta(path)
            if name in meta.ids:
                return self._store.path(path), self._readers.read(path, meta.ids.index(name))
        except DamageError as damage:
            return damage
        why = next((f": {member.message}" for member in meta.set_aside if member.id == name), "")
        return LatentpressError(f"it was set aside when its unit was encoded{why}")


class EncodedPlan:
    """The encoded samples and texts of a plan.

    encoded, set_aside: (n,) bool for the rows of `table.active`. folder: of the latents' shards.
    """

    def __init__(self, table: PlanTable) -> None:
        readers, ids = ReaderPool(table.store, MAX_OPEN_SHARDS), table.active.column("sample_id")
        self.table = table
        self.folder = f"latents/{stage_registry.LATENTS.fingerprint(table.config)}"
        self.latents = StageShards(table, stage_registry.LATENTS, readers)
        self.texts = StageShards(table, stage_registry.TEXT, readers)
        self.set_aside = pc.is_in(ids, value_set=self.latents.set_aside).to_numpy()
        self.encoded = pc.is_in(ids, value_set=self.latents.members).to_numpy() & ~self.set_aside

    @property
    def missing(self) -> int:
        """The number of samples that are neither encoded nor set aside."""
        return int((~self.encoded & ~self.set_aside).sum())

    def bucket_row(self, bucket: str, shown: int) -> TableRow:
        """A bucket's row of the table."""
        in_bucket = pc.equal(self.table.active.column("bucket"), bucket).to_numpy()
        encoded = int(self.encoded[in_bucket].sum())
        return {"bucket": bucket, "samples": int(in_bucket.sum()), "encoded": encoded, "shown": shown}

    def captions(self, names: Sequence[str]) -> tuple[EncodedCaption, ...]:
        """The texts of these ids with their tokens."""
        rows, captions = self.texts.read(names), []
        for name in names:
            text, row = self.table.plan.texts[name]["text"], rows.get(name)
            if row is None or isinstance(row, LatentpressError):
                captions.append(EncodedCaption(text, problem=row.message if row else NOT_ENCODED))
            else:
                captions.append(EncodedCaption(text, row[1].info["tokens"], row[1].info["kept"]))
        return tuple(captions)
