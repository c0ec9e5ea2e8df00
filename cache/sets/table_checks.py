"""Checks of tables before any of their values is used. Each function raises ValueError with the problem.

A checksum proves that a table is as it was written, so of the tables of a root only the columns are checked. A training
set may come from elsewhere, so the values in its tables are checked, too: they end as damage and not as a traceback.

The files of a training set, sets/<id>, are read and checked here: its tables and set.json.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, StringConstraints

from cache.store import json_checks
from cache.store.damage import as_damage
from cache.store.json_checks import Count, Foreign, ImagedPrompt, Name
from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from schemas import tables
from schemas.config.section import NAME_PATTERN
from schemas.geometry import Bucket

MAX_DRAWS = 10**6  # of repeats, or as a weight
MAX_SIDE = 1 << 20  # pixels, or frames
SET_ROLES = tables.TRAINED_ROLES


def check_samples(table: pa.Table) -> None:
    required = ("sample_id", "role", "dataset", "path", "media_id", "kind", "geometry", "condition")
    _check_columns(table, tables.SAMPLES_SCHEMA, required)


def check_texts(table: pa.Table) -> None:
    _check_columns(table, tables.plan_schema("texts", table.column_names), ("text_id", "text"))


def check_units(table: pa.Table) -> None:
    _check_columns(table, tables.UNITS_SCHEMA, tables.UNITS_SCHEMA.names)


def check_active(table: pa.Table) -> None:
    required = ("sample_id", "role", "dataset", "path", "bucket", "repeats", "weight", "regularization", "texts")
    _check_columns(table, tables.plan_schema("active", table.column_names), required)


def check_media(table: pa.Table) -> None:
    extra = [field.name for field in table.schema if field.name.startswith(tables.EXTRA_PREFIX)]
    if len(set(table.schema.names)) < len(table.schema):
        raise ValueError(f"it has the columns {json_checks.printable(table.schema.names)}")
    schema = tables.media_schema_of(table.schema.names)
    _check_columns(table.drop_columns(extra), schema, ("path", "media_id", "kind"))


def check_caption_edits(table: pa.Table) -> None:
    _check_columns(table, tables.CAPTION_EDITS_SCHEMA, tables.CAPTION_EDITS_SCHEMA.names)


def check_items(table: pa.Table) -> None:
    names = ["media_id", *(name for name in tables.MEASURES if name != "motion")]
    _check_columns(table, tables.FEATURES_SCHEMA, names)


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


def _check_buckets(names: pa.ChunkedArray, *other: str) -> list[Bucket]:
    return [_parse_bucket(name) for name in pc.unique(names).to_pylist() if name not in other]


def _parse_bucket(name: Any) -> Bucket:
    if not isinstance(name, str) or len(name) > json_checks.MAX_NAME_CHARS:
        raise ValueError("a bucket has no name")
    bucket = Bucket.parse(name)
    if max(bucket.width, bucket.height, bucket.frames) > MAX_SIDE:
        raise ValueError(f"bucket {name} is too large")
    return bucket


TABLE_CHECKS = {"index": check_index, "texts": check_set_texts, "shards": check_set_shards}


def read_set_table(store: Store, id: str, name: str) -> pa.Table:
    """The table "index", "texts" or "shards" of a set. DamageError where it is not as it was written."""
    rel = f"sets/{id}/{name}.arrow"
    with as_damage(store.path(rel), "it can't be read"):
        return store.read_table(rel, TABLE_CHECKS[name])


class _Image(Foreign):
    row: Count
    shard: Count


class _Reference(_Image):
    id: Name


class _SetPrompt(ImagedPrompt):
    name: Annotated[Name, StringConstraints(pattern=NAME_PATTERN)]  # files are named after prompts
    bucket: Name
    text: Count
    negative: Count
    prompt: str
    negative_prompt: str
    condition: _Image | None
    references: list[_Reference] = Field(default_factory=list)


class _SetRecord(Foreign):
    """set.json, as far as it refers to the set's tables."""

    null_text: Count | None
    validation: list[_SetPrompt]


def check_set_json(meta: Mapping[str, Any], texts: int, shards: int) -> None:
    """One of PARSE_ERRORS where set.json refers to a text or shard beyond the `texts` and `shards` that the set has."""
    record = _SetRecord.model_validate(dict(meta))
    numbers = [] if record.null_text is None else [record.null_text]
    for prompt in record.validation:
        numbers += [prompt.text, prompt.negative]
        for image in (*([prompt.condition] if prompt.condition else []), *prompt.references):
            if image.shard >= shards:
                raise ValueError(f"the prompt {prompt.name} has an image in shard {image.shard} of {shards}")
    if any(number >= texts for number in numbers):
        raise ValueError(f"it names a text beyond the {texts} of the set")
