"""Checks of the values in tables, column by column, before any of them is used.

A checksum proves that a table is as it was written. These checks prove that its values are possible, so that a table
made with intent, or by a mistake of ours, ends as damage and not as a wrong crop or a traceback. Each function raises
ValueError with the problem.

The files of a training set, sets/<id>, are read and checked here: its tables and set.json.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.store import json_checks
from cache.store.damage import ENCODE_PROGRAMS, as_damage
from cache.store.json_checks import (
    check_count,
    check_list,
    check_name,
    check_names,
    check_object,
    check_prompt_image,
    check_text,
)
from cache.store.layout import UNIT_PATTERN
from cache.store.store import Store
from schemas import tables
from schemas.config.section import NAME_PATTERN
from schemas.geometry import Bucket
from schemas.references import SOURCE_ROLES

MAX_DRAWS = 10**6  # of repeats, or as a weight
MAX_SIDE = 1 << 20  # pixels, or frames
SET_ROLES = tables.TRAINED_ROLES
PLAN_ROLES = (*SET_ROLES, "validation", *SOURCE_ROLES, "item")
PLANNED = "rolling"  # in set.json of a set that was made of the plan, and whose shards come and go (cache.rolling)
_KINDS = ("image", "video")
PROMPT_NAME_PATTERN = re.compile(NAME_PATTERN, re.ASCII)  # files are named after prompts


def check_samples(table: pa.Table) -> None:
    required = ("sample_id", "role", "dataset", "path", "media_id", "kind", "geometry", "condition")
    _check_columns(table, tables.SAMPLES_SCHEMA, required)
    _check_ids(table, "sample_id", "media_id", "source_id", "mask_id")
    _check_choices(table, "role", PLAN_ROLES)
    _check_choices(table, "kind", _KINDS)
    _check_choices(table, "condition", ("none", "first-frame", "source", "references"))
    _check_paths(table, "path", "source_path", "mask_path")
    for name in ("geometry", "source_geometry", "mask_geometry"):
        _check_crops(table, name)
    _check_numbers(table, "start", 0, 1e9)
    _check_numbers(table, "rate", 1e-9, 1e6)


def check_texts(table: pa.Table) -> None:
    _check_columns(table, tables.plan_schema("texts", table.column_names), ("text_id", "text"))
    _check_ids(table, "text_id", "image_id")
    _check_paths(table, "image_path")
    _check_crops(table, "image_geometry")
    if "references" in table.column_names:
        _check_hex(pc.list_flatten(table["references"]), "references")


def check_units(table: pa.Table) -> None:
    _check_columns(table, tables.UNITS_SCHEMA, tables.UNITS_SCHEMA.names)
    if not pc.all(pc.match_substring_regex(table["unit_id"], f"^{UNIT_PATTERN}$")).as_py() and len(table):
        raise ValueError("a unit has a name that no unit has")
    _check_choices(table, "kind", ("text", "latents", "items"))
    _check_buckets(table["bucket"], "")
    _check_numbers(table, "estimated_bytes", 0, 1 << 62)
    _check_lists(table, "members", 1)
    _check_hex(pc.list_flatten(table["members"]), "members")


def check_active(table: pa.Table) -> None:
    required = ("sample_id", "role", "dataset", "path", "bucket", "repeats", "weight", "regularization", "texts")
    _check_columns(table, tables.plan_schema("active", table.column_names), required)
    _check_ids(table, "sample_id", "null_text")
    _check_choices(table, "role", PLAN_ROLES)
    _check_paths(table, "path", "source_path", "mask_path")
    _check_buckets(table["bucket"])
    _check_numbers(table, "repeats", 0, MAX_DRAWS)
    _check_numbers(table, "weight", np.nextafter(0, 1), MAX_DRAWS)
    _check_lists(table, "texts", 0)
    _check_hex(pc.list_flatten(table["texts"]), "texts")
    if "references" in table.column_names:
        _check_hex(pc.list_flatten(table["references"]), "references")


def check_media(table: pa.Table) -> None:
    extra = [field for field in table.schema if field.name.startswith(tables.EXTRA_PREFIX)]
    if len(set(table.schema.names)) < len(table.schema):
        raise ValueError(f"it has the columns {json_checks.printable(table.schema.names)}")
    schema = tables.media_schema_of(table.schema.names)
    _check_columns(table.drop_columns([field.name for field in extra]), schema, ("path", "media_id", "kind"))
    roles = (*SOURCE_ROLES, "mask")
    _check_ids(table, "media_id", *(f"{role}_id" for role in roles))
    _check_choices(table, "kind", _KINDS)
    _check_paths(table, "path", *roles)
    for side in ("width", "height"):
        for name in (side, *(f"{role}_{side}" for role in roles)):
            _check_numbers(table, name, 1, 1 << 31)
    _check_numbers(table, "frames", 0, 1 << 31)
    _check_numbers(table, "track", 0, 1 << 31)
    for name in ("rate", "duration"):
        _check_numbers(table, name, 0, 1e12)
    _check_lists(table, "captions", 0)
    if tables.FACE in table.schema.names:
        faces = table[tables.FACE].drop_null()
        lengths, numbers = pc.list_value_length(faces), pc.list_flatten(faces)
        if {*pc.unique(lengths).to_pylist()} - {0, 4} or (pc.min(numbers).as_py() or 0) < 0:
            raise ValueError("a face has other than four numbers of 0 or more")


def check_caption_edits(table: pa.Table) -> None:
    _check_columns(table, tables.CAPTION_EDITS_SCHEMA, tables.CAPTION_EDITS_SCHEMA.names)
    _check_ids(table, "media_id")
    _check_lists(table, "captions", 1)
    if len(pc.unique(table["media_id"])) < len(table):
        raise ValueError("a media id is there twice")


def check_items(table: pa.Table) -> None:
    names = ["media_id", *(name for name in tables.MEASURES if name != "motion")]
    _check_columns(table, tables.FEATURES_SCHEMA, names)
    _check_ids(table, "media_id", "cluster", "duplicate_group", "duplicate_of")
    for field in table.schema:
        if pa.types.is_floating(field.type):
            _check_numbers(table, field.name, 0, 1e12)
    if len(pc.unique(table["media_id"])) < len(table):
        raise ValueError("a media id is there twice")


def check_rejects(table: pa.Table) -> None:
    _check_columns(table, tables.REJECTS_SCHEMA, ("item", "reason", "message", "retry"))


def check_merged_rejects(table: pa.Table) -> None:
    required = ("list", "version", "item", "reason", "message", "retry")
    _check_columns(table, tables.MERGED_REJECTS_SCHEMA, required)


def check_index(table: pa.Table) -> None:
    kinds = [kind for kind in tables.further_kinds(table.column_names) if kind in ENCODE_PROGRAMS]
    parts = tables.reference_parts(table.column_names)
    schema = tables.index_schema(kinds, len(parts))
    nullable = {"null_text", *(f"{part}_{column}" for part in parts for column in ("id", "shard", "row"))}
    _check_columns(table, schema, [name for name in table.column_names if name not in nullable])
    _check_references(table, parts)
    _check_choices(pa.table({"role": _drop_repeats(table["role"])}), "role", SET_ROLES)
    _check_buckets(_drop_repeats(table["bucket"]))
    _check_numbers(table, "repeats", 0, MAX_DRAWS)
    _check_numbers(table, "weight", np.nextafter(0, 1), MAX_DRAWS)
    _check_lists(table, "texts", 1)


def _check_references(index: pa.Table, parts: Collection[str]) -> None:
    """Each sample has as many references as its bucket has sizes of them."""
    if not parts:
        return
    buckets = index["bucket"].combine_chunks().dictionary_encode()
    counts = np.array([len(Bucket.parse(name).references) for name in buckets.dictionary.to_pylist()])
    wanted = counts[np.asarray(buckets.indices)]
    for number, part in enumerate(parts):
        if not (np.asarray(index[f"{part}_id"].is_valid()) == (wanted > number)).all():
            raise ValueError(f"a sample has more or fewer references than its bucket says, by its {part}")


def check_set_texts(table: pa.Table) -> None:
    _check_columns(table, tables.SET_TEXTS_SCHEMA, ("text_id",))


def check_set_shards(table: pa.Table) -> None:
    _check_columns(table, tables.SET_SHARDS_SCHEMA, tables.SET_SHARDS_SCHEMA.names)


def check_set_references(index: pa.Table, texts: pa.Table, shards: pa.Table) -> None:
    """The tables of a set refer to rows of each other that exist."""
    check_row_numbers(pc.list_flatten(index["texts"]), len(texts), "text")
    check_row_numbers(index["null_text"].drop_null(), len(texts), "text")
    names = index.column_names
    of_kinds = [(index, f"{part}_") for part in (*tables.further_kinds(names), *tables.reference_parts(names))]
    for table, prefix in ((index, ""), (texts, ""), *of_kinds):
        check_row_numbers(table[f"{prefix}shard"].drop_null(), len(shards), "shard")
        check_row_numbers(table[f"{prefix}row"].drop_null(), 1 << 31, "row")


def _check_columns(table: pa.Table, schema: pa.Schema, required: Collection[str]) -> None:
    """The columns of `schema`; those `required` have no nulls."""
    if not table.schema.equals(schema):
        raise ValueError(f"it has the columns {json_checks.printable(table.schema.names)}")
    for name in required:
        if table[name].null_count:
            raise ValueError(f"a value of {name} is missing")


def _check_choices(table: pa.Table, name: str, values: Collection[str]) -> None:
    if not set(pc.unique(table[name]).to_pylist()) <= set(values):
        raise ValueError(f"{name} is none of {', '.join(values)}")


def _drop_repeats(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A sorted column without most of its repeated values: of ten million strings in half the time of `unique`."""
    return pa.chunked_array([pc.run_end_encode(chunk).values for chunk in column.chunks], column.type)


def _check_numbers(table: pa.Table, name: str, low: float, high: float) -> None:
    """Numbers from `low` to below `high`, or null; NaN is out of range."""
    if name not in table.schema.names:
        return
    for values in map(np.asarray, table[name].drop_null().chunks):  # the column at once would be a copy
        if not ((values >= low) & (values < high)).all():
            raise ValueError(f"{name} is out of range")


def check_row_numbers(numbers: pa.ChunkedArray, count: int, what: str) -> None:
    """Row numbers below `count`, none of them null."""
    ends = pc.min_max(numbers).as_py()
    if numbers.null_count or (ends["min"] is not None and (ends["min"] < 0 or ends["max"] >= count)):
        raise ValueError(f"{what} {ends['max']} of {count}")


def _check_lists(table: pa.Table, name: str, least: int) -> None:
    lists = table[name].drop_null()
    shortest = pc.min(pc.list_value_length(lists)).as_py()
    if pc.list_flatten(lists).null_count or (shortest is not None and shortest < least):
        raise ValueError(f"a list of {name} is too short, or lacks a value")


def _check_paths(table: pa.Table, *names: str) -> None:
    """No system has a file name with a zero byte, and Python's error about one would be a traceback."""
    for name in names:
        if name in table.schema.names and pc.any(pc.match_substring(table[name], "\0")).as_py():
            raise ValueError(f"a {name} holds a zero byte")


def _check_ids(table: pa.Table, *names: str) -> None:
    for name in names:
        if name in table.schema.names:
            _check_hex(table[name].drop_null(), name)


def _check_hex(ids: pa.ChunkedArray | pa.Array, name: str) -> None:
    """Ids of 32 hex digits."""
    if ids.null_count or not pc.all(pc.match_substring_regex(ids, "^[0-9a-f]{32}$"), min_count=0).as_py():
        raise ValueError(f"a value of {name} is no id of 32 hex digits")


def _check_buckets(names: pa.ChunkedArray, *other: str) -> list[Bucket]:
    return [_parse_bucket(name) for name in pc.unique(names).to_pylist() if name not in other]


def _parse_bucket(name: Any) -> Bucket:
    if not isinstance(name, str) or len(name) > json_checks.MAX_NAME_CHARS:
        raise ValueError("a bucket has no name")
    bucket = Bucket.parse(name)
    if max(bucket.width, bucket.height, bucket.frames) > MAX_SIDE:
        raise ValueError(f"bucket {name} is too large")
    return bucket


def _check_crops(table: pa.Table, name: str) -> None:
    """A column of schemas.tables.GEOMETRY_TYPE: each crop is inside of its resized picture."""
    if name not in table.schema.names:
        return
    column = table[name].drop_null()
    parts = {field.name: pc.struct_field(column, field.name) for field in column.type}
    if any(part.null_count for part in parts.values()):
        raise ValueError(f"a value within {name} is missing")
    buckets = parts.pop("bucket").combine_chunks().dictionary_encode()
    sides = np.array(
        [(bucket.width, bucket.height) for bucket in map(_parse_bucket, buckets.dictionary.to_pylist())], np.int64
    )
    width, height = sides.reshape(-1, 2)[np.asarray(buckets.indices)].T
    numbers = {key: np.asarray(part).astype(np.int64) for key, part in parts.items()}
    fits = (numbers["x"] >= 0) & (numbers["x"] + width <= numbers["resize_w"]) & (numbers["resize_w"] <= MAX_SIDE)
    fits &= (numbers["y"] >= 0) & (numbers["y"] + height <= numbers["resize_h"]) & (numbers["resize_h"] <= MAX_SIDE)
    if not fits.all():
        raise ValueError(f"a {name} cuts outside of the picture")


TABLE_CHECKS = {"index": check_index, "texts": check_set_texts, "shards": check_set_shards}


def read_set_table(store: Store, id: str, name: str) -> pa.Table:
    """The table "index", "texts" or "shards" of a set. DamageError where it is not as it was written."""
    rel = f"sets/{id}/{name}.arrow"
    with as_damage(store.path(rel), "it can't be read"):
        return store.read_table(rel, TABLE_CHECKS[name])


def check_set_json(meta: Mapping[str, Any], texts: int, shards: int) -> None:
    """One of PARSE_ERRORS where set.json refers to a text or shard beyond the `texts` and `shards` that the set has."""
    numbers = [] if meta["null_text"] is None else [meta["null_text"]]
    for entry in check_list(meta["validation"], "validation"):
        prompt = check_object(entry, "a validation prompt")
        if not PROMPT_NAME_PATTERN.fullmatch(check_name(prompt["name"], "the name of a validation prompt")):
            raise ValueError(f"{prompt['name']!r} can't be the name of a validation prompt")
        check_name(prompt["bucket"], "the bucket of a validation prompt")
        numbers += [prompt["text"], prompt["negative"]]
        for key in ("prompt", "negative_prompt"):
            check_text(prompt[key], key)
        check_prompt_image(prompt)
        if prompt["condition"] is not None:
            image = check_object(prompt["condition"], "a condition")
            check_count(image["row"], "the row of a condition")
            if check_count(image["shard"], "the shard of a condition") >= shards:
                raise ValueError(f"a condition in shard {image['shard']} of {shards}")
        for value in check_list(prompt.get("references", []), "references"):
            image = check_object(value, "a reference")
            check_name(image["id"], "the id of a reference")
            check_count(image["row"], "the row of a reference")
            if check_count(image["shard"], "the shard of a reference") >= shards:
                raise ValueError(f"a reference in shard {image['shard']} of {shards}")
    if PLANNED in meta:
        planned = check_object(meta[PLANNED], PLANNED)
        check_names(planned["tensors"], "tensors")
        if len([check_count(size, "bytes") for size in check_list(planned["bytes"], "bytes")]) != shards:
            raise ValueError(f"it has sizes of {len(planned['bytes'])} shards, and there are {shards}")
    if any(check_count(number, "the number of a text") >= texts for number in numbers):
        raise ValueError(f"it names a text beyond the {texts} of the set")
