"""The media table of a dataset: where it lies, what shaped it, how it is written, and what is new in it.

Beside the table, `partial/` holds rows that an unfinished discovery has read: they are known rows to the next
discovery and nothing to anyone else.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache import table_checks
from cache.damage import DamageError
from cache.files import explained
from cache.store import Store
from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.identity import hash_json, id_bytes
from schemas.recipe import discovery_settings
from schemas.tables import MEDIA_SCHEMA, TABLES_VERSION
from schemas.text_format import escape_unprintable
from stages.discovery.listing_diff import SLICE_ROWS, KnownRows, RandomAccessTable, equal_mask, iter_slices

NO_CHANGES = {"new": 0, "removed": 0, "changed": 0, "captions_changed": 0}
_NEVER_ANIMATED = r"(?i)\.(jpe?g|bmp|tiff?|heic|heif|mp4|mov|mkv|webm|avi|m4v)$"
_LOCATION_OPTIONS = (
    "instance_data_dir",
    "source",
    "split",
    "media_column",
)  # another file may have the same path, size and time
_VERSION_KEY, _SETTINGS_KEY = b"tables_version", b"discovered_with"


@dataclass(frozen=True)
class DiscoverySettings:
    """What shaped a table, beyond the media: where it differs, the columns that depend on it are read anew."""

    captions: str
    identity: str
    animations: str
    options: dict[str, Any]  # all that shaped it

    @classmethod
    def of(cls, dataset: Dataset) -> "DiscoverySettings":
        captions = hash_json([dataset.resolved_caption_strategy, list(dataset.caption_column)])
        return cls(captions, dataset.identity, dataset.animations, discovery_settings(dataset))


# -- files ----------------------------------------------------------------------------------------------------------


def media_table_path(dataset: str) -> str:
    return f"media/{dataset}/media.arrow"


def read_media_table(store: Store, dataset: str) -> pa.Table:
    """The whole media table of a dataset: MEDIA_SCHEMA and its extra columns, sorted by path."""
    step = "run `latentpress discover`"
    try:
        table = store.read_table(media_table_path(dataset), check_media_table)
    except FileNotFoundError as error:
        raise LatentpressError(f"dataset {dataset} has not been discovered yet", step) from error
    if not _is_current_version(table):
        raise LatentpressError(f"{store.path(media_table_path(dataset))} was written by another version", step)
    return table


def read_configured_media(store: Store, dataset: Dataset) -> pa.Table:
    """The media table of a dataset as it is configured; LatentpressError where it was discovered otherwise."""
    table, mine = read_media_table(store, dataset.id), discovery_settings(dataset)
    made = json.loads((table.schema.metadata or {}).get(_SETTINGS_KEY, b"{}")).get("options", {})
    differ = [
        f"{name} was {made.get(name)!r} and is {value!r}"
        for name, value in mine.items()
        if made.get(name, ...) != value
    ]
    if differ:
        how = "set skip_file_discovery: false for it, and run" if dataset.skip_file_discovery else "run"
        raise LatentpressError(
            f"dataset {dataset.id} was discovered with other settings: {escape_unprintable('; '.join(differ))}",
            f"{how} `latentpress discover`, then `latentpress bucket`",
        )
    return table


def check_media_table(table: pa.Table) -> None:
    """ValueError where the values of a media table can't be right. That of another version is not looked at."""
    if _is_current_version(table):
        table_checks.check_media(table)
        if not isinstance(json.loads((table.schema.metadata or {}).get(_SETTINGS_KEY, b"{}")), dict):
            raise ValueError("what it was made with is no object")


def _is_current_version(table: pa.Table) -> bool:
    return (table.schema.metadata or {}).get(_VERSION_KEY) == str(TABLES_VERSION).encode()


def find_media_table(store: Store, dataset: str) -> pa.Table | None:
    """The media table as it is; None where there is none of this version."""
    try:
        table = store.read_table(media_table_path(dataset), check_media_table)
    except FileNotFoundError:
        return None
    return table if _is_current_version(table) else None


def load_known_rows(
    store: Store,
    dataset: str,
    whole: pa.Table | None,
    settings: DiscoverySettings,
    damaged: Callable[[DamageError], object],
    rehash: bool = False,
) -> KnownRows | None:
    """All rows that are known, first those of the whole table, without what other settings made of them. damaged: told
    of each piece that is, whose rows are not known then. rehash: without any version, so that all is read again."""
    found = [whole] if whole is not None else []
    for name in partial_table_paths(store, dataset):
        try:
            table = store.read_table(name, check_media_table)
        except DamageError as damage:
            damaged(damage)
            continue
        found += [table] if _is_current_version(table) else []
    if not found:
        return None
    known = concat_media([_drop_stale_versions(table, settings) for table in found])  # newer rows come last
    for name in ("version", "captions_version", "source_version", "mask_version") if rehash else ():
        known = _null_where_not(known, name, None)
    return KnownRows(known)


def partial_table_paths(store: Store, dataset: str) -> list[str]:
    folder = f"media/{dataset}/partial"
    return [f"{folder}/{name}" for name in store.list_names(folder)]


def save_partial_table(store: Store, dataset: str, tables: list[pa.Table], settings: DiscoverySettings) -> None:
    """Keep rows that were read, until the table is whole."""
    number = len(partial_table_paths(store, dataset))
    store.write_table(
        f"media/{dataset}/partial/{number:06d}.arrow", with_table_metadata(concat_media(tables), settings)
    )


def with_table_metadata(table: pa.Table, settings: DiscoverySettings) -> pa.Table:
    shaped = json.dumps(asdict(settings), sort_keys=True)
    return table.replace_schema_metadata({_VERSION_KEY: str(TABLES_VERSION).encode(), _SETTINGS_KEY: shaped.encode()})


def was_made_with(table: pa.Table, settings: DiscoverySettings) -> bool:
    """Whether a table of this version was made with these settings."""
    return table.schema.metadata == with_table_metadata(MEDIA_SCHEMA.empty_table(), settings).schema.metadata


def _drop_stale_versions(table: pa.Table, settings: DiscoverySettings) -> pa.Table:
    """`table` without the versions of what other settings would have made otherwise."""
    before = json.loads((table.schema.metadata or {}).get(_SETTINGS_KEY, b"{}"))
    table = table.replace_schema_metadata(None)
    options = before.get("options", {})
    if any(options.get(name, settings.options[name]) != settings.options[name] for name in _LOCATION_OPTIONS):
        for name in ("version", "captions_version", "source_version", "mask_version"):
            table = _null_where_not(table, name, None)
        return table
    if before.get("captions") != settings.captions:
        table = _null_where_not(table, "captions_version", None)
    if before.get("identity") != settings.identity:
        return _null_where_not(table, "version", None)
    if before.get("animations") != settings.animations:
        return _null_where_not(table, "version", pc.match_substring_regex(table["path"], _NEVER_ANIMATED))
    return table


def _null_where_not(table: pa.Table, name: str, keep: Any) -> pa.Table:
    """`table` with nulls in a column, but where `keep`."""
    nothing = pa.scalar(None, pa.string())
    column = pc.if_else(keep, table[name], nothing) if keep is not None else pa.nulls(len(table), pa.string())
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)


# -- whole tables ---------------------------------------------------------------------------------------------------


def concat_media(tables: list[pa.Table]) -> pa.Table:
    """All rows of media tables."""
    return concat_permissive([MEDIA_SCHEMA.empty_table(), *tables])


def concat_permissive(tables: list[pa.Table]) -> pa.Table:
    """All rows; a column that only some tables have is null in the others."""
    return pa.concat_tables(tables, promote_options="permissive")


def release_arrow_memory() -> None:
    """Give memory that Arrow keeps for its next table back to the system: several times a slice, else."""
    pa.default_memory_pool().release_unused()


class SpillBuffer:
    """Rows that wait for their use, all but the last of them in files that have no name and end with the program."""

    def __init__(self, store: Store, rel: str) -> None:
        """rel: what they are for; the files are where its own temporary would be."""
        self._store, self._rel = store, rel
        self._pending: list[pa.Table] = []
        self._room = SLICE_ROWS
        self._writer: pa.RecordBatchFileWriter | None = None
        self._schema: pa.Schema | None = None  # of the rows in the last file
        self._files: list[tuple[BinaryIO, BinaryIO]] = []  # each to write and to read
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        if not len(table):
            return
        self.rows += len(table)
        self._room -= len(table)
        self._pending.append(table)
        if self._room <= 0:
            self._write(concat_permissive(self._pending))
            self._pending, self._room = [], SLICE_ROWS

    def tables(self) -> list[pa.Table]:
        """All rows, in order; those in files are memory-mapped. Nothing is added afterwards."""
        if self._files and self._pending:  # which may be slices of what else should go
            self._write(concat_permissive(self._pending))
            self._pending = []
        self._close()
        maps = [mmap.mmap(reading.fileno(), 0, access=mmap.ACCESS_READ) for _, reading in self._files]
        return [pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped))).read_all() for mapped in maps] + self._pending

    def _write(self, table: pa.Table) -> None:
        with explained(self._store.path(self._rel)):
            if self._writer is None or table.schema != self._schema:
                self._close()
                writing = self._store.open_temp(self._rel)
                self._files.append((writing, open(writing.name, "rb")))  # noqa: SIM115 (ends with these rows)
                os.unlink(writing.name)
                self._schema = table.schema
                self._writer = pa.ipc.new_file(writing, table.schema)
            self._writer.write_table(table.combine_chunks())
        release_arrow_memory()

    def _close(self) -> None:
        if self._writer is not None:
            with explained(self._store.path(self._rel)):
                self._writer.close()
                self._files[-1][0].close()
            self._writer = None


def write_media_table(
    store: Store, dataset: str, before: pa.Table | None, table: pa.Table, keep: np.ndarray, settings: DiscoverySettings
) -> bool:
    """Put the rows to keep, (n,) bool, as the media table, sorted, in place of `before`, the last one; False where
    that says the same and stays.

    In slices, so that no second copy of it stands in memory; the bytes are a function of the rows alone.
    """
    release_arrow_memory()
    order = pc.sort_indices(table["path"]).to_numpy().astype(np.int64)
    order = order[keep[order]]
    schema = with_table_metadata(table.schema.empty_table(), settings).schema
    rows = RandomAccessTable(table)

    def sorted_slices() -> Iterator[pa.Table]:
        for part in iter_slices(pa.array(order)):
            yield rows.take(part.to_numpy(), schema.names).cast(schema)
            release_arrow_memory()

    alike = before is not None and len(before) == len(order) and before.schema.equals(schema, check_metadata=True)
    if alike and all(map(pa.Table.equals, sorted_slices(), iter_slices(before))):
        return False
    with store.create_table(media_table_path(dataset), schema) as writer:
        for piece in sorted_slices():
            writer.write_table(piece)
    return True


def count_changes(before: KnownRows | None, same: int, others: Iterable[pa.Table]) -> dict[str, int]:
    """How many items came, went, have other content, have other captions. same: rows of the table that are rows of
    `before`; others: the other rows of it."""
    counts = dict(NO_CHANGES)
    common, names = same, ["media_id", "captions"]
    for part in (part for table in others for part in iter_slices(table.select(["path", *names]))):
        if before is None:
            counts["new"] += len(part)
            continue
        rows, old = before.find(part["path"], names)
        there = pa.array(rows >= 0)
        part, old = part.filter(there), old.filter(there)
        common += len(part)
        counts["new"] += len(rows) - len(part)
        counts["changed"] += int((~equal_mask(part["media_id"], old["media_id"])).sum())
        counts["captions_changed"] += int((~equal_mask(_join_captions(part), _join_captions(old))).sum())
    counts["removed"] = (0 if before is None else len(before.table)) - common
    return counts


def _join_captions(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join(table["captions"], "\0")


def count_duplicates(ids: pa.ChunkedArray) -> int:
    """How many of the ids stood there before; 8 bytes of each are enough to tell."""
    heads = [id_bytes(part).view("<u8")[::2] for part in iter_slices(ids)]
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *heads]))
    return int((ordered[1:] == ordered[:-1]).sum())
