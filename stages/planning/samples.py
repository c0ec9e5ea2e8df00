"""From items, cuts and clips to samples: their identities and the rows of the plan's tables."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.family import Condition
from schemas.geometry import Bucket, Crop
from schemas.randomness import to_unit_interval
from schemas.tables import SAMPLES_SCHEMA
from stages.planning.candidates import CandidateItems
from stages.planning.clip_selection import SelectedClips
from stages.planning.crop_selection import SelectedCrops, geometry_columns

_CONDITION_CODES = {"none": 0, "first-frame": 1, "source": 2}


@dataclass(frozen=True)
class PlannedSamples:
    """(m,) samples as rows of schemas.tables.SAMPLES_SCHEMA, the item each is of, and the source image's own bucket."""

    table: pa.Table
    item: np.ndarray

    def column(self, name: str) -> pa.Array:
        return self.table.column(name).combine_chunks()


def held_out_mask(dataset: Dataset, media_ids: pa.Array) -> np.ndarray:
    """(n,) whether an item is kept for evaluation: by its content, so that nothing crosses over when data is added."""
    if dataset.eval or not dataset.eval_fraction:
        return np.full(len(media_ids), dataset.eval)
    return to_unit_interval(identity.derive_seeds(media_ids, "eval")) < dataset.eval_fraction


def plan_samples(
    dataset: Dataset,
    given: Condition | None,
    items: CandidateItems,
    cuts: SelectedCrops,
    chosen: SelectedClips,
    eval_: np.ndarray,
) -> PlannedSamples:
    """One sample for each image or clip. given: beside the text."""
    of, condition = chosen.item, "none" if given is None else given.kind
    buckets = _bucket_names(cuts, of, chosen.frames)
    still = _bucket_names(cuts, of, np.ones_like(chosen.frames))

    def taken(name: str) -> pa.Array:
        return items.column(name).take(pa.array(of))

    record = np.zeros(len(of), identity.SAMPLE_DTYPE)
    record["media"] = identity.id_bytes(items.column("media_id"))[of]
    record["geometry"] = _geometry_numbers(cuts, cuts.crop, of, chosen.frames)
    record["start"], record["rate"] = np.nan_to_num(chosen.start), np.nan_to_num(chosen.rate)
    record["condition"] = _CONDITION_CODES[condition]
    columns = {
        "role": pc.if_else(pa.array(eval_[of]), "eval", "train"),
        "dataset": pa.repeat(dataset.id, len(of)),
        "path": taken("path"),
        "media_id": taken("media_id"),
        "kind": taken("kind"),
        "geometry": geometry_columns(cuts.crop, buckets, of),
        "start": pa.array(chosen.start, from_pandas=True),
        "rate": pa.array(chosen.rate, from_pandas=True),
        "condition": pa.repeat(condition, len(of)),
    }
    if condition == "source":
        assert cuts.source is not None
        record["source"] = identity.id_bytes(items.column("source_id"))[of]
        record["source_geometry"] = _geometry_numbers(cuts, cuts.source, of, np.ones_like(chosen.frames))
        columns |= {"source_path": taken("source"), "source_id": taken("source_id")}
        columns["source_geometry"] = geometry_columns(cuts.source, still, of)
    if items.table.column("mask_id").null_count < len(items):
        # Laid over the media, whatever size it was drawn at: cut as the sample is.
        record["mask"] = identity.id_bytes(items.column("mask_id"))[of]
        columns |= {"mask_path": taken("mask"), "mask_id": taken("mask_id"), "mask_kind": taken("mask_kind")}
        given = pc.is_valid(columns["mask_id"])
        record["mask_geometry"] = np.where(np.asarray(given)[:, None], record["geometry"], 0)
        columns["mask_geometry"] = pc.if_else(given, columns["geometry"], pa.scalar(None, columns["geometry"].type))
    columns["sample_id"] = identity.sample_ids(record)
    whole = {field.name: columns.get(field.name, pa.nulls(len(of), field.type)) for field in SAMPLES_SCHEMA}
    return PlannedSamples(pa.table(whole, schema=SAMPLES_SCHEMA), of)


def _bucket_names(cuts: SelectedCrops, of: np.ndarray, frames: np.ndarray) -> pa.Array:
    """(m,) "WxH@F"."""
    most = int(frames.max(initial=1)) + 1
    keys, codes = np.unique(cuts.size[of] * most + frames, return_inverse=True)
    sizes = [cuts.sizes[key // most] for key in keys]
    names = [str(Bucket(width, height, int(key % most))) for (width, height), key in zip(sizes, keys, strict=True)]
    return pa.array(names, pa.string()).take(pa.array(codes))


def _geometry_numbers(cuts: SelectedCrops, crop: Crop, of: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """(m, 7) the geometry as identities have it."""
    of_items = (cuts.width, cuts.height, None, crop.resize_width, crop.resize_height, crop.x, crop.y)
    return np.stack([frames if values is None else np.asarray(values)[of] for values in of_items], axis=1)
