"""Checks of tables before any of their values is used. Each function raises ValueError with the problem.

A checksum proves that a table is as it was written, so of the tables of a root only the columns are checked. A training
set may come from elsewhere, so the values in its tables are checked, too: they end as damage and not as a traceback.

The files of a training set, sets/<id>, are read and checked here: its tables and set.json.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, Field, StringConstraints

from cache.store import json_checks
from cache.store.damage import as_damage
from cache.store.json_checks import PATH_NAME_PATTERN, Count, EmptyName, Foreign, ImagedPrompt, Name, Stored
from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from schemas import tables
from schemas.config.section import NAME_PATTERN
from schemas.family import Task
from schemas.geometry import Bucket

MAX_DRAWS = 10**6  # limit for repeats and for weights
MAX_SIDE = 1 << 20  # pixels, or frames
SET_ROLES = tables.TRAINED_ROLES


def check_columns(schema: pa.Schema | Callable[[list[str]], pa.Schema], table: pa.Table) -> None:
    """Raise ValueError unless a table has the columns of a schema. schema: a schema, or a function that returns it for
    the names of the columns."""
    expected = schema if isinstance(schema, pa.Schema) else schema(table.column_names)
    if not table.schema.equals(expected):
        raise ValueError(f"it has the columns {json_checks.printable(table.column_names)}")


check_caption_edits = partial(check_columns, tables.CAPTION_EDITS_SCHEMA)
check_items = partial(check_columns, tables.FEATURES_SCHEMA)
check_rejects = partial(check_columns, tables.REJECTS_SCHEMA)


def check_media(table: pa.Table) -> None:
    names = [name for name in table.column_names if not name.startswith(tables.EXTRA_PREFIX)]
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError(f"it has the columns {json_checks.printable(table.column_names)}")
    check_columns(tables.media_schema_of, table.select(names))


def check_index(table: pa.Table) -> None:
    kinds = [kind for kind in tables.further_kinds(table.column_names) if kind in ENCODE_PROGRAMS]
    parts = tables.reference_parts(table.column_names)
    check_columns(tables.index_schema(kinds, len(parts)), table)
    _check_present(table, {"null_text", *(f"{part}_{column}" for part in parts for column in ("id", "shard", "row"))})
    _check_references(table, parts)
    if not set(pc.unique(_drop_repeats(table["role"])).to_pylist()) <= set(SET_ROLES):
        raise ValueError(f"a role is invalid; valid roles: {', '.join(SET_ROLES)}")
    for name in pc.unique(_drop_repeats(table["bucket"])).to_pylist():
        bucket = Bucket.parse(name[: json_checks.MAX_NAME_CHARS])
        if max(bucket.width, bucket.height, bucket.frames) > MAX_SIDE:
            raise ValueError(f"bucket {name} is too large")
    for name, least in (("repeats", 0), ("weight", np.nextafter(0, 1))):
        for values in map(np.asarray, table[name].chunks):  # the whole column as one array would be a copy
            if not ((values >= least) & (values < MAX_DRAWS)).all():
                raise ValueError(f"{name} is out of range")
    if pc.list_flatten(table["texts"]).null_count or pc.min(pc.list_value_length(table["texts"])).as_py() == 0:
        raise ValueError("a sample lacks a text")


def _check_present(table: pa.Table, nullable: Collection[str] = ()) -> None:
    for name in table.column_names:
        if name not in nullable and table[name].null_count:
            raise ValueError(f"a value of {name} is missing")


def _drop_repeats(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a sorted column without most of its repeated values. For ten million strings, `unique` takes twice the
    time."""
    return pa.chunked_array([pc.run_end_encode(chunk).values for chunk in column.chunks], column.type)


def _check_references(index: pa.Table, parts: Collection[str]) -> None:
    """Raise ValueError unless each sample has as many references as its bucket has reference sizes."""
    if not parts:
        return
    buckets = index["bucket"].combine_chunks().dictionary_encode()
    counts = np.array([len(Bucket.parse(name).references) for name in buckets.dictionary.to_pylist()])
    expected = counts[np.asarray(buckets.indices)]
    for number, part in enumerate(parts):
        if not (np.asarray(index[f"{part}_id"].is_valid()) == (expected > number)).all():
            raise ValueError(f"the {part} of a sample is missing or not in its bucket")


def check_set_texts(table: pa.Table) -> None:
    check_columns(tables.SET_TEXTS_SCHEMA, table)
    _check_present(table)


def check_set_shards(table: pa.Table) -> None:
    check_columns(tables.SET_SHARDS_SCHEMA, table)
    _check_present(table)


def check_set_references(index: pa.Table, texts: pa.Table, shards: pa.Table) -> None:
    """Raise ValueError if a table of a set refers to a row that another table does not have."""
    _check_row_numbers(pc.list_flatten(index["texts"]), len(texts), "text")
    _check_row_numbers(index["null_text"].drop_null(), len(texts), "text")
    names = index.column_names
    further_columns = [(index, f"{part}_") for part in (*tables.further_kinds(names), *tables.reference_parts(names))]
    for table, prefix in ((index, ""), (texts, ""), *further_columns):
        _check_row_numbers(table[f"{prefix}shard"].drop_null(), len(shards), "shard")
        _check_row_numbers(table[f"{prefix}row"].drop_null(), 1 << 31, "row")


def _check_row_numbers(numbers: pa.ChunkedArray, count: int, name: str) -> None:
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and (ends["min"] < 0 or ends["max"] >= count):
        raise ValueError(f"it refers to {name} {ends['max']}; the limit is {count}")


TABLE_CHECKS = {"index": check_index, "texts": check_set_texts, "shards": check_set_shards}


def read_set_table(store: Store, id: str, name: str) -> pa.Table:
    """Return the table "index", "texts" or "shards" of a set. Raises DamageError if the table is damaged."""
    rel = f"sets/{id}/{name}.arrow"
    with as_damage(store.path(rel), "it can't be read"):
        return store.read_table(rel, TABLE_CHECKS[name])


class PromptRow(Foreign):
    """A row of a latents shard that a validation prompt uses. id: the row's id, only set for references."""

    row: Count
    shard: Count
    id: Name | None = None


class SetPrompt(ImagedPrompt):
    """A validation prompt. text, negative: numbers of texts."""

    name: Annotated[Name, StringConstraints(pattern=NAME_PATTERN)]  # files are named after prompts
    bucket: Name
    text: Count
    negative: Count
    prompt: str
    negative_prompt: str
    condition: PromptRow | None
    references: list[PromptRow] = Field(default_factory=list)


class Provenance(Stored):
    """provenance.json of a cache: all settings in its fingerprint. Only these fields are read."""

    model_config = ConfigDict(extra="allow")

    stage: str = "a cache"
    encoder: str | None = None
    autoencoder: str | None = None
    precision: str | None = None
    posterior: str | None = None
    decoder: str | None = None
    condition_frames: Annotated[int, Field(gt=0, lt=1 << 16)] | None = 1
    weights: dict[str, Any] | None = None


class Counts(Foreign):
    samples: Count = 0
    eval: Count = 0
    texts: Count = 0


SetName = Annotated[str, StringConstraints(pattern=rf"^{PATH_NAME_PATTERN.pattern}$")]


class SetPointer(Stored):
    """A file that names a set: the newest set of a family and task, or the set of a configuration."""

    id: SetName


class SetRecord(Stored):
    """set.json. generation: name of the plan. recipe: settings of the configuration. provenance: kind of shards ->
    values of its provenance.json."""

    version = tables.TABLES_VERSION

    id: EmptyName = ""
    family: Name
    flavour: EmptyName = ""
    task: Task
    template: EmptyName = ""
    generation: EmptyName = ""
    recipe: dict[str, Any] = Field(default_factory=dict)
    fingerprints: dict[str, str] = Field(default_factory=dict)
    provenance: dict[str, Provenance] = Field(default_factory=dict)
    null_text: Count | None
    validation: list[SetPrompt]
    counts: Counts = Counts()


def check_set_record(record: SetRecord, texts: int, shards: int) -> None:
    """Raise ValueError if set.json refers to a text or shard that the set does not have. texts, shards: their numbers
    in the set."""
    numbers = [] if record.null_text is None else [record.null_text]
    for prompt in record.validation:
        numbers += [prompt.text, prompt.negative]
        for image in (*([prompt.condition] if prompt.condition else []), *prompt.references):
            if image.shard >= shards:
                raise ValueError(f"the prompt {prompt.name} has an image in shard {image.shard} of {shards}")
    if any(number >= texts for number in numbers):
        raise ValueError(f"it refers to a text that the set does not have: the set has {texts} texts")
