"""From items, their crops and their clips to samples: their roles, their ids and the rows of the plan's table; and the
reference images of samples.

Each distinct reference, a file at one size, is planned once, as a row without a caption that is encoded by itself.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.family import SOURCE_ROLES, Condition
from schemas.geometry import Bucket, Crop
from schemas.identity import to_unit_interval
from schemas.tables import ACTIVE_SCHEMA, GEOMETRY_TYPE, GROUP, SAMPLES_SCHEMA, active_schema
from stages.planning.candidates import CandidateItems, message_column
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
    (n,) V16 as of `list_ids`, if the task has them. masks: (m,) mask_path, mask_id and mask_kind, in place
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


# -- references ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedReferences:
    """The references of n items. ids: (n,) lists of the ids of each one's references, in order. buckets: (n,) what the
    names of their samples' buckets end with, "+WxH" for each reference. samples, active: of the references themselves,
    each once, rows of SAMPLES_SCHEMA and of `active_schema`."""

    ids: pa.Array
    buckets: pa.Array
    samples: pa.Table
    active: pa.Table


def drop_refused(condition: Condition, items: CandidateItems) -> None:
    """Drop items with a reference that the family's pipeline refuses."""
    assert condition.size is not None
    limits = f"; the model takes {condition.size.limits}"
    for role in (role for role in SOURCE_ROLES if role in items.table.column_names):
        given = np.asarray(pc.is_valid(items.column(f"{role}_width")))
        width, height = (np.maximum(items.numbers(f"{role}_{side}"), 1) for side in ("width", "height"))
        refused = given & condition.size.refused(width, height)
        sizes = items.sizes(f"{role}_").filter(pa.array(refused))
        message = message_column(f"its {role.replace('_', ' image ')} is ", sizes, limits)
        items.drop(refused, "reference-size", partial(_same, message))


def _same(message: pa.Array, dropped: CandidateItems) -> pa.Array:
    return message


def plan_references(condition: Condition, items: CandidateItems) -> PlannedReferences:
    """Plan the references of items, of which each has its first."""
    roles = [role for role in SOURCE_ROLES if role in items.table.column_names]
    tables = [_plan_role(condition, items, role) for role in roles]
    table, count = pa.concat_tables(tables), len(items)
    owners = np.concatenate([np.asarray(part.column("owner")) for part in tables])
    order = np.argsort(owners, kind="stable")  # an item's references stay in the order of their roles
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=count))]).astype(np.int32)
    ids = table.column("sample_id").combine_chunks().take(pa.array(order))
    buckets = pc.struct_field(table.column("geometry"), "bucket").combine_chunks()
    sizes = pc.binary_join_element_wise("+", pc.replace_substring(buckets, "@1", ""), "").take(pa.array(order))
    lists = pa.ListArray.from_arrays(pa.array(offsets), ids)
    codes = np.asarray(table.column("sample_id").combine_chunks().dictionary_encode().indices)
    first = table.take(pa.array(np.sort(np.unique(codes, return_index=True)[1])))
    samples = first.select(SAMPLES_SCHEMA.names).cast(SAMPLES_SCHEMA)
    return PlannedReferences(
        lists, pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), sizes), ""), samples, active_rows(samples)
    )


def prompt_reference_columns(dataset: pa.Array, references: pa.Array) -> dict[str, pa.Array]:
    """Columns of schemas.tables.texts_schema for lists of references in prompts, and "key": the lists' ids."""
    key = identity.hash_values(pc.binary_join(references, ""))
    return {"image_dataset": dataset, "references": references, "key": key}


def list_ids(references: pa.Array) -> np.ndarray:
    """(n,) V16, of lists of ids: what a sample's id has in the place of its source."""
    return identity.id_bytes(identity.hash_values(pc.binary_join(references, "")))


def active_rows(samples: pa.Table) -> pa.Table:
    """The active rows of samples that are not trained on by themselves, as references."""
    count = len(samples)
    names = ("sample_id", "role", "dataset", "path")
    columns = {name: samples.column(name) for name in names} | {
        "bucket": pc.struct_field(samples.column("geometry"), "bucket"),
        "repeats": pa.repeat(pa.scalar(0, pa.int32()), count),
        "weight": pa.repeat(1.0, count),
        "regularization": pa.repeat(False, count),
        "texts": pa.array([[]] * count, ACTIVE_SCHEMA.field("texts").type),
    }
    schema = active_schema(references=True)
    return pa.table(
        {field.name: columns.get(field.name, pa.nulls(count, field.type)) for field in schema}, schema=schema
    )


def reference_rows(condition: Condition, media: pa.Table) -> pa.Table:
    """Rows of SAMPLES_SCHEMA of references. media: their columns role, dataset, path, media_id, width and height."""
    assert condition.size is not None
    width, height = (np.asarray(media.column(side)).astype(np.int64) for side in ("width", "height"))
    bucket_width, bucket_height, crop = condition.size.fit(width, height)
    record = np.zeros(len(media), identity.SAMPLE_DTYPE)
    media_ids = media.column("media_id").combine_chunks()
    record["media"] = identity.id_bytes(media_ids)
    numbers = [bucket_width, bucket_height, np.ones_like(width), *vars(crop).values()]
    record["geometry"] = np.stack(numbers, axis=1)
    columns = {name: media.column(name) for name in ("role", "dataset", "path", "media_id")} | {
        "sample_id": identity.sample_ids(record),
        "kind": pa.repeat("image", len(media)),
        "geometry": _geometry(bucket_width, bucket_height, crop),
        "condition": pa.repeat("none", len(media)),
    }
    filled = {field.name: columns.get(field.name, pa.nulls(len(media), field.type)) for field in SAMPLES_SCHEMA}
    return pa.table(filled, schema=SAMPLES_SCHEMA)


def _geometry(width: np.ndarray, height: np.ndarray, crop: Crop) -> pa.StructArray:
    names = message_column(width, "x", height, "@1")
    numbers = (pa.array(np.asarray(values), pa.int32()) for values in vars(crop).values())
    return pa.StructArray.from_arrays([names, *numbers], fields=list(GEOMETRY_TYPE))


def _plan_role(condition: Condition, items: CandidateItems, role: str) -> pa.Table:
    """`reference_rows` of the items' source images of a role, and "owner", the number of each one's item."""
    owners = np.flatnonzero(np.asarray(pc.is_valid(items.column(f"{role}_id"))))
    columns = {"path": role, "media_id": f"{role}_id", "width": f"{role}_width", "height": f"{role}_height"}
    given = {name: items.column(column).take(pa.array(owners)) for name, column in columns.items()}
    given |= {"role": pa.repeat(role, len(owners)), "dataset": pa.repeat(items.dataset, len(owners))}
    return reference_rows(condition, pa.table(given)).append_column("owner", pa.array(owners))
