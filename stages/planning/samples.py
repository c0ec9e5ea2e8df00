"""From items, their crops and their clips to samples: their roles, their ids and the rows of the plan's table."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.family import Condition
from schemas.geometry import Bucket, Crop
from schemas.randomness import to_unit_interval
from schemas.tables import GROUP, SAMPLES_SCHEMA
from stages.planning.candidates import CandidateItems
from stages.planning.clip_selection import SelectedClips
from stages.planning.crop_selection import SelectedCrops, geometry_columns

_CONDITION_CODES = {"none": 0, "first-frame": 1, "source": 2, "references": 3}


def content_ids(table: pa.Table) -> pa.Array:
    """(n,) what decides on which side an item of a media table is: its media id or, with features, that of the best of
    its near-duplicates."""
    ids = table.column("media_id").combine_chunks()
    return pc.coalesce(table.column(GROUP).combine_chunks(), ids) if GROUP in table.column_names else ids


def held_out_mask(dataset: Dataset, table: pa.Table) -> np.ndarray:
    """(n,) whether an item of a media table is held out. Its content decides, so that its role stays when data is
    added."""
    if dataset.eval or not dataset.eval_fraction:
        return np.full(len(table), dataset.eval)
    return to_unit_interval(identity.derive_seeds(content_ids(table), "eval")) < dataset.eval_fraction


def plan_samples(
    dataset: Dataset,
    condition: Condition | None,
    items: CandidateItems,
    crops: SelectedCrops,
    clips: SelectedClips,
    held_out: np.ndarray,
    references: np.ndarray | None = None,
    masks: pa.Table | None = None,
) -> pa.Table:
    """Rows of schemas.tables.SAMPLES_SCHEMA, one for each image or clip. held_out: (n,) which items are. references:
    (n,) V16 as of `references.list_ids`, if the task has them. masks: (m,) mask_path, mask_id and mask_kind, in place
    of those of the items."""
    rows, kind = clips.item, "none" if condition is None else condition.kind
    one_frame = np.ones_like(clips.frames)

    def take(name: str) -> pa.Array:
        return items.column(name).take(pa.array(rows))

    record = np.zeros(len(rows), identity.SAMPLE_DTYPE)
    record["media"] = identity.id_bytes(items.column("media_id"))[rows]
    record["geometry"] = _geometry_numbers(crops, crops.crop, rows, clips.frames)
    record["start"], record["rate"] = np.nan_to_num(clips.start), np.nan_to_num(clips.rate)
    record["condition"] = _CONDITION_CODES[kind]
    columns = {
        "role": pc.if_else(pa.array(held_out[rows]), "eval", "train"),
        "dataset": pa.repeat(dataset.id, len(rows)),
        **{name: take(name) for name in ("path", "media_id", "kind")},
        "geometry": geometry_columns(crops.crop, _bucket_names(crops, rows, clips.frames), rows),
        "start": pa.array(clips.start, from_pandas=True),
        "rate": pa.array(clips.rate, from_pandas=True),
        "condition": pa.repeat(kind, len(rows)),
    }
    if kind == "source":
        assert crops.source is not None
        record["source"] = identity.id_bytes(items.column("source_id"))[rows]
        record["source_geometry"] = _geometry_numbers(crops, crops.source, rows, one_frame)
        columns |= {"source_path": take("source"), "source_id": take("source_id")}
        columns["source_geometry"] = geometry_columns(crops.source, _bucket_names(crops, rows, one_frame), rows)
    if references is not None:
        record["source"] = references[rows]
    if masks is None:
        masks = pa.table({"mask_path": take("mask"), "mask_id": take("mask_id"), "mask_kind": take("mask_kind")})
    if masks["mask_id"].null_count < len(rows):
        # A mask is laid over the media, whatever its own size, and so gets the sample's crop.
        columns |= {name: masks[name].combine_chunks() for name in masks.column_names}
        record["mask"] = identity.id_bytes(columns["mask_id"])
        masked = pc.is_valid(columns["mask_id"])
        record["mask_geometry"] = np.where(np.asarray(masked)[:, None], record["geometry"], 0)
        columns["mask_geometry"] = pc.if_else(masked, columns["geometry"], pa.scalar(None, columns["geometry"].type))
    columns["sample_id"] = identity.sample_ids(record)
    columns = {field.name: columns.get(field.name, pa.nulls(len(rows), field.type)) for field in SAMPLES_SCHEMA}
    return pa.table(columns, schema=SAMPLES_SCHEMA)


def _bucket_names(crops: SelectedCrops, rows: np.ndarray, frames: np.ndarray) -> pa.Array:
    """(m,) "WxH@F"."""
    base = int(frames.max(initial=1)) + 1
    keys, codes = np.unique(crops.size[rows] * base + frames, return_inverse=True)
    sizes = [crops.sizes[key // base] for key in keys]
    names = [str(Bucket(width, height, int(key % base))) for (width, height), key in zip(sizes, keys, strict=True)]
    return pa.array(names, pa.string()).take(pa.array(codes))


def _geometry_numbers(crops: SelectedCrops, crop: Crop, rows: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """(m, 7) the geometry as sample ids contain it."""
    of_items = (crops.width, crops.height, None, crop.resize_width, crop.resize_height, crop.x, crop.y)
    return np.stack([frames if values is None else np.asarray(values)[rows] for values in of_items], axis=1)
