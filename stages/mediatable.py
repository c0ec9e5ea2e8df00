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

from cache import checks
from cache.damage import DamageError
from cache.files import explained
from cache.store import Store
from schemas.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.identity import hash_json, id_bytes
from schemas.recipe import discovery_settings
from schemas.report import visible
from schemas.tables import MEDIA, TABLES_VERSION
from stages.listing import SLICE, Known, Rows, equal, slices

NO_NEWS = {"new": 0, "removed": 0, "changed": 0, "captions_changed": 0}
_NO_ANIMATION = r"(?i)\.(jpe?g|bmp|tiff?|heic|heif|mp4|mov|mkv|webm|avi|m4v)$"
_PLACE = ("instance_data_dir", "source", "split", "media_column")  # another file may have the same path, size and time
_VERSION, _SETTINGS = b"tables_version", b"discovered_with"


@dataclass(frozen=True)
class Settings:
    """What shaped a table, beyond the media: where it differs, the columns that depend on it are read anew."""

    captions: str
    identity: str
    animations: str
    options: dict[str, Any]  # all that shaped it

    @classmethod
    def of(cls, dataset: Dataset) -> "Settings":
        captions = hash_json([dataset.captions_from, list(dataset.caption_column)])
        return cls(captions, dataset.identity, dataset.animations, discovery_settings(dataset))


# -- files ----------------------------------------------------------------------------------------------------------


def media_path(dataset: str) -> str:
    return f"media/{dataset}/media.arrow"


def read_media(store: Store, dataset: str) -> pa.Table:
    """The whole media table of a dataset: MEDIA and its extra columns, sorted by path."""
    step = "run `latentpress discover`"
    try:
        table = store.read_table(media_path(dataset), sound)
    except FileNotFoundError as error:
        raise LatentpressError(f"dataset {dataset} has not been discovered yet", step) from error
    if not _is_current(table):
        raise LatentpressError(f"{store.path(media_path(dataset))} was written by another version", step)
    return table


def media_of(store: Store, dataset: Dataset) -> pa.Table:
    """The media table of a dataset as it is configured; LatentpressError where it was discovered otherwise."""
    table, mine = read_media(store, dataset.id), discovery_settings(dataset)
    made = json.loads((table.schema.metadata or {}).get(_SETTINGS, b"{}")).get("options", {})
    differ = [
        f"{name} was {made.get(name)!r} and is {value!r}"
        for name, value in mine.items()
        if made.get(name, ...) != value
    ]
    if differ:
        how = "set skip_file_discovery: false for it, and run" if dataset.skip_file_discovery else "run"
        raise LatentpressError(
            f"dataset {dataset.id} was discovered with other settings: {visible('; '.join(differ))}",
            f"{how} `latentpress discover`, then `latentpress bucket`",
        )
    return table


def sound(table: pa.Table) -> None:
    """ValueError where the values of a media table can't be right. That of another version is not looked at."""
    if _is_current(table):
        checks.media(table)
        if not isinstance(json.loads((table.schema.metadata or {}).get(_SETTINGS, b"{}")), dict):
            raise ValueError("what it was made with is no object")


def _is_current(table: pa.Table) -> bool:
    return (table.schema.metadata or {}).get(_VERSION) == str(TABLES_VERSION).encode()


def whole_table(store: Store, dataset: str) -> pa.Table | None:
    """The media table as it is; None where there is none of this version."""
    try:
        table = store.read_table(media_path(dataset), sound)
    except FileNotFoundError:
        return None
    return table if _is_current(table) else None


def known_rows(
    store: Store,
    dataset: str,
    whole: pa.Table | None,
    settings: Settings,
    damaged: Callable[[DamageError], object],
    rehash: bool = False,
) -> Known | None:
    """All rows that are known, first those of the whole table, without what other settings made of them. damaged: told
    of each piece that is, whose rows are not known then. rehash: without any version, so that all is read again."""
    found = [whole] if whole is not None else []
    for name in partial_names(store, dataset):
        try:
            table = store.read_table(name, sound)
        except DamageError as damage:
            damaged(damage)
            continue
        found += [table] if _is_current(table) else []
    if not found:
        return None
    known = join([_forget(table, settings) for table in found])  # newer rows come last
    for name in ("version", "captions_version", "source_version", "mask_version") if rehash else ():
        known = _without(known, name, None)
    return Known(known)


def partial_names(store: Store, dataset: str) -> list[str]:
    folder = f"media/{dataset}/partial"
    return [f"{folder}/{name}" for name in store.names(folder)]


def save_partial(store: Store, dataset: str, tables: list[pa.Table], settings: Settings) -> None:
    """Keep rows that were read, until the table is whole."""
    number = len(partial_names(store, dataset))
    store.write_table(f"media/{dataset}/partial/{number:06d}.arrow", marked(join(tables), settings))


def marked(table: pa.Table, settings: Settings) -> pa.Table:
    shaped = json.dumps(asdict(settings), sort_keys=True)
    return table.replace_schema_metadata({_VERSION: str(TABLES_VERSION).encode(), _SETTINGS: shaped.encode()})


def made_with(table: pa.Table, settings: Settings) -> bool:
    """Whether a table of this version was made with these settings."""
    return table.schema.metadata == marked(MEDIA.empty_table(), settings).schema.metadata


def _forget(table: pa.Table, settings: Settings) -> pa.Table:
    """`table` without the versions of what other settings would have made otherwise."""
    before = json.loads((table.schema.metadata or {}).get(_SETTINGS, b"{}"))
    table = table.replace_schema_metadata(None)
    options = before.get("options", {})
    if any(options.get(name, settings.options[name]) != settings.options[name] for name in _PLACE):
        for name in ("version", "captions_version", "source_version", "mask_version"):
            table = _without(table, name, None)
        return table
    if before.get("captions") != settings.captions:
        table = _without(table, "captions_version", None)
    if before.get("identity") != settings.identity:
        return _without(table, "version", None)
    if before.get("animations") != settings.animations:
        return _without(table, "version", pc.match_substring_regex(table["path"], _NO_ANIMATION))
    return table


def _without(table: pa.Table, name: str, keep: Any) -> pa.Table:
    """`table` with nulls in a column, but where `keep`."""
    nothing = pa.scalar(None, pa.string())
    column = pc.if_else(keep, table[name], nothing) if keep is not None else pa.nulls(len(table), pa.string())
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)


# -- whole tables ---------------------------------------------------------------------------------------------------


def join(tables: list[pa.Table]) -> pa.Table:
    """All rows of media tables."""
    return concat([MEDIA.empty_table(), *tables])


def concat(tables: list[pa.Table]) -> pa.Table:
    """All rows; a column that only some tables have is null in the others."""
    return pa.concat_tables(tables, promote_options="permissive")


def release() -> None:
    """Give memory that Arrow keeps for its next table back to the system: several times a slice, else."""
    pa.default_memory_pool().release_unused()


class Spill:
    """Rows that wait for their use, all but the last of them in files that have no name and end with the program."""

    def __init__(self, store: Store, rel: str) -> None:
        """rel: what they are for; the files are where its own temporary would be."""
        self._store, self._rel = store, rel
        self._pending: list[pa.Table] = []
        self._room = SLICE
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
            self._write(concat(self._pending))
            self._pending, self._room = [], SLICE

    def tables(self) -> list[pa.Table]:
        """All rows, in order; those in files are memory-mapped. Nothing is added afterwards."""
        if self._files and self._pending:  # which may be slices of what else should go
            self._write(concat(self._pending))
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
        release()

    def _close(self) -> None:
        if self._writer is not None:
            with explained(self._store.path(self._rel)):
                self._writer.close()
                self._files[-1][0].close()
            self._writer = None


def write_whole(
    store: Store, dataset: str, before: pa.Table | None, table: pa.Table, keep: np.ndarray, settings: Settings
) -> bool:
    """Put the rows to keep, (n,) bool, as the media table, sorted, in place of `before`, the last one; False where
    that says the same and stays.

    In slices, so that no second copy of it stands in memory; the bytes are a function of the rows alone.
    """
    release()
    order = pc.sort_indices(table["path"]).to_numpy().astype(np.int64)
    order = order[keep[order]]
    schema = marked(table.schema.empty_table(), settings).schema
    rows = Rows(table)

    def sorted_slices() -> Iterator[pa.Table]:
        for part in slices(pa.array(order)):
            yield rows.take(part.to_numpy(), schema.names).cast(schema)
            release()

    alike = before is not None and len(before) == len(order) and before.schema.equals(schema, check_metadata=True)
    if alike and all(map(pa.Table.equals, sorted_slices(), slices(before))):
        return False
    with store.create_table(media_path(dataset), schema) as writer:
        for piece in sorted_slices():
            writer.write_table(piece)
    return True


def compare(before: Known | None, same: int, others: Iterable[pa.Table]) -> dict[str, int]:
    """How many items came, went, have other content, have other captions. same: rows of the table that are rows of
    `before`; others: the other rows of it."""
    counts = dict(NO_NEWS)
    common, names = same, ["media_id", "captions"]
    for part in (part for table in others for part in slices(table.select(["path", *names]))):
        if before is None:
            counts["new"] += len(part)
            continue
        rows, old = before.find(part["path"], names)
        there = pa.array(rows >= 0)
        part, old = part.filter(there), old.filter(there)
        common += len(part)
        counts["new"] += len(rows) - len(part)
        counts["changed"] += int((~equal(part["media_id"], old["media_id"])).sum())
        counts["captions_changed"] += int((~equal(_one_text(part), _one_text(old))).sum())
    counts["removed"] = (0 if before is None else len(before.table)) - common
    return counts


def _one_text(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join(table["captions"], "\0")


def twice(ids: pa.ChunkedArray) -> int:
    """How many of the ids stood there before; 8 bytes of each are enough to tell."""
    heads = [id_bytes(part).view("<u8")[::2] for part in slices(ids)]
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *heads]))
    return int((ordered[1:] == ordered[:-1]).sum())
