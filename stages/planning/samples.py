"""Samples: their roles, their ids, and their rows in a plan's tables "samples" and "active".

A geometry is seven numbers: width, height and frames of the bucket, width and height to which the media is resized, and
x and y of the crop's corner. A row of zeros is the geometry of a part that a sample does not have, such as a mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.family import SOURCE_ROLES, Condition
from schemas.geometry import Crop
from schemas.identity import to_unit_interval
from schemas.tables import ACTIVE_SCHEMA, GEOMETRY_TYPE, GROUP, SAMPLES_SCHEMA, active_schema
from stages.planning.candidates import CandidateItems, drop_duplicate_ids, message_column

CONDITIONS = pa.array(["none", "first-frame", "source", "references"])  # in the order of SAMPLE_DTYPE's numbers

Geometries = NDArray[np.int64]


def content_ids(table: pa.Table) -> pa.Array:
    """(n,) the id that decides whether an item of a media table is held out: its media id or, with features, the media
    id of the best of its near-duplicates."""
    ids = table.column("media_id").combine_chunks()
    return pc.coalesce(table.column(GROUP).combine_chunks(), ids) if GROUP in table.column_names else ids


def held_out_mask(dataset: Dataset, table: pa.Table) -> np.ndarray:
    """(n,) whether an item of a media table is held out. The content determines this, so that an item's role does not
    change when data is added."""
    if dataset.eval or not dataset.eval_fraction:
        return np.full(len(table), dataset.eval)
    return to_unit_interval(identity.derive_seeds(content_ids(table), "eval")) < dataset.eval_fraction


def geometry_numbers(width: Any, height: Any, frames: Any, crop: Crop) -> Geometries:
    """(n, 7) geometries. Each argument is a column (n,), or one number for all rows."""
    columns = np.broadcast_arrays(*map(np.atleast_1d, (width, height, frames, *vars(crop).values())))
    return np.stack(columns, axis=1).astype(np.int64)


def geometry_column(geometry: Geometries) -> pa.Array:
    """(n,) values of schemas.tables.GEOMETRY_TYPE; null for a row of zeros."""
    width, height, frames = geometry.T[:3]
    _, first, codes = np.unique((width << 42) + (height << 21) + frames, return_index=True, return_inverse=True)
    names = pa.array([f"{width}x{height}@{frames}" for width, height, frames in geometry[first, :3]], pa.string())
    numbers = [pa.array(values, pa.int32()) for values in geometry.T[3:]]
    column = pa.StructArray.from_arrays([names.take(pa.array(codes)), *numbers], fields=list(GEOMETRY_TYPE))
    return column if width.all() else pc.if_else(pa.array(width > 0), column, pa.scalar(None, GEOMETRY_TYPE))


def sample_table(
    columns: Mapping[str, Any],
    geometry: Geometries,
    *,
    start: np.ndarray | None = None,
    rate: np.ndarray | None = None,
    source: Geometries | None = None,
    mask: Geometries | None = None,
    references: np.ndarray | None = None,
) -> pa.Table:
    """Rows of SAMPLES_SCHEMA with their ids.

    columns: name -> column of texts, null for an absent text; the condition is "none" by default. start: (n,) seconds,
    NaN for images. rate: (n,) frames per second, NaN for images. source, mask: (n, 7) geometries. references: (n,) V16
    from `list_ids`.
    """
    count = len(geometry)
    filled = {"condition": pa.repeat("none", count), **columns, "geometry": geometry_column(geometry)}
    record = np.zeros(count, identity.SAMPLE_DTYPE)
    record["media"], record["geometry"] = identity.id_bytes(filled["media_id"]), geometry
    record["condition"] = np.asarray(pc.index_in(filled["condition"], value_set=CONDITIONS))
    for name, values in (("start", start), ("rate", rate)):
        if values is not None:
            record[name] = np.nan_to_num(values)
            filled[name] = pa.array(values, from_pandas=True)
    for name, numbers in (("source", source), ("mask", mask)):
        if f"{name}_id" in filled:
            record[name] = identity.id_bytes(filled[f"{name}_id"])
        if numbers is not None:
            record[f"{name}_geometry"] = numbers
            filled[f"{name}_geometry"] = geometry_column(numbers)
    if references is not None:
        record["source"] = references
    filled["sample_id"] = identity.sample_ids(record)
    filled = {field.name: filled.get(field.name, pa.nulls(count, field.type)) for field in SAMPLES_SCHEMA}
    return pa.table(filled, schema=SAMPLES_SCHEMA)


def active_rows(samples: pa.Table, schema: pa.Schema = ACTIVE_SCHEMA, **columns: Any) -> pa.Table:
    """Rows of an `active_schema`. By default, samples are only read for other samples (repeats 0, no texts). columns:
    name -> column that replaces the default, for samples that are trained on."""
    count = len(samples)
    filled = {name: samples.column(name) for name in schema.names if name in samples.column_names} | {
        "bucket": pc.struct_field(samples.column("geometry"), "bucket"),
        "repeats": pa.repeat(pa.scalar(0, pa.int32()), count),
        "weight": pa.repeat(1.0, count),
        "regularization": pa.repeat(False, count),
        "texts": pa.array([[]] * count, pa.list_(pa.string())),
        **columns,
    }
    filled = {field.name: filled.get(field.name, pa.nulls(count, field.type)) for field in schema}
    return pa.table(filled, schema=schema)


def plan_samples(
    dataset: Dataset, condition: Condition | None, members: CandidateItems, references: np.ndarray | None = None
) -> pa.Table:
    """Rows of SAMPLES_SCHEMA, one for each picture or clip. members: pictures and clips with the values that
    `select_crops` and `select_members` set. references: (n,) V16 from `list_ids`, if the task has references."""
    geometry, kind = members.values["geometry"].copy(), "none" if condition is None else condition.kind
    geometry[:, 2] = members.values["frames"]
    columns: dict[str, Any] = {
        "role": pc.if_else(pa.array(held_out_mask(dataset, members.table)), "eval", "train"),
        "dataset": pa.repeat(dataset.id, len(members)),
        **{name: members.column(name) for name in ("path", "media_id", "kind")},
        "condition": pa.repeat(kind, len(members)),
    }
    source = mask = None
    if kind == "source":
        source = members.values["source_geometry"]
        columns |= {"source_path": members.column("source"), "source_id": members.column("source_id")}
    masked = np.asarray(members.column("mask_id").is_valid())
    if masked.any():
        # A mask of any size covers its media, so it gets the sample's crop.
        mask = np.where(masked[:, None], geometry, 0)
        masks = {"mask_path": "mask", "mask_id": "mask_id", "mask_kind": "mask_kind"}
        columns |= {name: members.column(column) for name, column in masks.items()}
    clip = {name: members.values[name] for name in ("start", "rate")}
    return sample_table(columns, geometry, **clip, source=source, mask=mask, references=references)


# -- references: each distinct reference, a file at one size, is a row without a caption and is encoded separately ---


@dataclass(frozen=True)
class PlannedReferences:
    """The references of n items. ids: (n,) lists of the ids of each item's references, in order. buckets: (n,) suffixes
    of the items' bucket names, "+WxH" for each reference. samples, active: one row for each distinct reference, of
    SAMPLES_SCHEMA and of `active_schema`."""

    ids: pa.Array
    buckets: pa.Array
    samples: pa.Table
    active: pa.Table


def drop_refused(condition: Condition, items: CandidateItems) -> None:
    """Drop items with a reference of a size that the family's pipeline does not support."""
    roles = [role for role in SOURCE_ROLES if role in items.table.column_names]
    for role, is_sole in product(roles, (False, True)):
        present = {name: np.asarray(pc.is_valid(items.column(f"{name}_width"))) for name in roles}
        size, applies = condition.size_of(is_sole), (np.sum([*present.values()], 0) == 1) == is_sole
        width, height = (np.maximum(items.numbers(f"{role}_{side}"), 1) for side in ("width", "height"))
        refused = present[role] & applies & size.refused(width, height)
        sizes = items.sizes(f"{role}_").filter(pa.array(refused))
        subject, limits = f"its {role.replace('_', ' image ')} is ", f"; the model supports {size.limits}"
        message = message_column(subject, sizes, limits)
        items.drop(refused, "reference-size", partial(_ignore_items, message))


def _ignore_items(message: pa.Array, rejected: CandidateItems) -> pa.Array:
    return message


def plan_references(condition: Condition, items: CandidateItems) -> PlannedReferences:
    """Plan the references of items. Each item has at least a first reference."""
    tables, owners, roles = [], [], [role for role in SOURCE_ROLES if role in items.table.column_names]
    counts = np.sum([np.asarray(pc.is_valid(items.column(f"{role}_id"))) for role in roles], 0)
    for role in roles:
        owner = np.flatnonzero(np.asarray(pc.is_valid(items.column(f"{role}_id"))))
        columns = {"path": role, "media_id": f"{role}_id", "width": f"{role}_width", "height": f"{role}_height"}
        reference_columns = {name: items.column(column).take(pa.array(owner)) for name, column in columns.items()}
        reference_columns |= {"role": pa.repeat(role, len(owner)), "dataset": pa.repeat(items.dataset, len(owner))}
        tables.append(reference_rows(condition, pa.table(reference_columns), counts[owner] == 1))
        owners.append(owner)
    table, owner = pa.concat_tables(tables), np.concatenate(owners)
    order = pa.array(np.argsort(owner, kind="stable"))  # an item's references stay in the order of their roles
    offsets = pa.array(np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(items)))]), pa.int32())
    ids = table.column("sample_id").combine_chunks().take(order)
    buckets = pc.struct_field(table.column("geometry"), "bucket").combine_chunks()
    sizes = pc.binary_join_element_wise("+", pc.replace_substring(buckets, "@1", ""), "").take(order)
    samples = drop_duplicate_ids(table, "sample_id").combine_chunks()
    lists = pa.ListArray.from_arrays(offsets, ids)
    names = pc.binary_join(pa.ListArray.from_arrays(offsets, sizes), "")
    return PlannedReferences(lists, names, samples, active_rows(samples, active_schema(references=True)))


def reference_rows(condition: Condition, media: pa.Table, is_sole: np.ndarray) -> pa.Table:
    """Rows of SAMPLES_SCHEMA for n references. media: table with the columns role, dataset, path, media_id, width and
    height. is_sole: (n,) whether each is the only reference of its sample."""
    width, height = (np.asarray(media.column(side)).astype(np.int64) for side in ("width", "height"))
    geometry = np.empty((len(media), 7), np.int64)
    for sole in (False, True):
        rows = np.flatnonzero(is_sole == sole)
        bucket_width, bucket_height, crop = condition.size_of(sole).fit(width[rows], height[rows])
        geometry[rows] = geometry_numbers(bucket_width, bucket_height, 1, crop)
    columns = {name: media.column(name).combine_chunks() for name in ("role", "dataset", "path", "media_id")}
    columns["kind"] = pa.repeat("image", len(media))
    return sample_table(columns, geometry)


def list_ids(references: pa.Array) -> np.ndarray:
    """(n,) V16 hashes of lists of ids. In the hash of a sample's id, they replace the id of the sample's source."""
    return identity.id_bytes(identity.hash_values(pc.binary_join(references, "")))
