"""A listing against the rows that are known: what is as it was, what must be read anew, and rows put together.

Columns in, columns out: no loop over items. A row is kept as far as its versions are the known ones; what was read
anew takes the place of the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from schemas.config.datasets import Dataset
from schemas.tables import EXTRA_PREFIX, MEDIA_SCHEMA, REJECTS_SCHEMA

#: Columns of MEDIA_SCHEMA by what must be read to know them.
COLUMN_GROUPS = {
    "media": ("media_id", "kind", "width", "height", "frames", "rate", "duration", "constant_rate", "scenes"),
    "captions": ("captions",),
    "source": ("source_id", "source_width", "source_height"),
    "mask": ("mask_id", "mask_kind", "mask_width", "mask_height"),
}
_LISTED_COLUMNS = ("path", "version", "captions_version", "source", "source_version", "mask", "mask_version")
_COMPARED_COLUMNS = [*_LISTED_COLUMNS, "size", "kind", "scenes", "source_id", "mask_id"]
_READ_SCHEMA = pa.schema(
    [MEDIA_SCHEMA.field("size"), *(MEDIA_SCHEMA.field(name) for names in COLUMN_GROUPS.values() for name in names)]
)
SLICE_ROWS = 65536  # rows that are copied at a time
_KNOWN_ROW = "row in the known table"


class RandomAccessTable:
    """A table whose rows are taken in any order; `Table.take` would copy whole columns of a table in pieces."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._batches = table.to_batches()
        self._starts = np.cumsum([0, *map(len, self._batches)])

    def take(self, rows: np.ndarray, names: list[str]) -> pa.Table:
        """Columns at rows, (n,) int64, of the table; nulls for -1."""
        order = np.argsort(rows, kind="stable")
        cuts = np.searchsorted(rows[order], self._starts)
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows)) - cuts[0]
        parts = [
            (batch, pa.array(rows[order[first:last]] - start))
            for batch, start, first, last in zip(self._batches, self._starts[:-1], cuts[:-1], cuts[1:], strict=True)
            if first < last
        ]
        schema, at = self.table.schema, pa.array(back, mask=rows < 0)

        def column(name: str) -> pa.Array:
            found = pa.chunked_array([batch[name].take(here) for batch, here in parts], schema.field(name).type)
            return found.combine_chunks().take(at)

        return pa.table({name: column(name) for name in names}, pa.schema([schema.field(name) for name in names]))


class KnownRows(RandomAccessTable):
    """A media table and where each path stands in it: 16 bytes a row, whatever the order of what is looked up. Of
    several rows of a path the last one counts."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(table)
        heads = np.concatenate([np.empty(0, np.uint64), *map(_hash_paths, iter_slices(table["path"]))])
        self._order = np.argsort(heads, kind="stable")
        self._heads = heads[self._order]

    def find(self, paths: pa.ChunkedArray, names: list[str]) -> tuple[np.ndarray, pa.Table]:
        """(n,) int64: the row of each path, -1 where it has none; and columns at those rows."""
        if not len(self.table):
            return np.full(len(paths), -1, np.int64), null_columns(len(paths), names)
        rows = self._order[(np.searchsorted(self._heads, _hash_paths(paths), side="right") - 1).clip(min=0)]
        found = self.take(rows, list(dict.fromkeys([*names, "path"])))
        # Equal hashes of different paths, if that ever happens, cost a file that is read again.
        there = equal_mask(found["path"], paths)
        if there.all():
            return rows, found
        rows = np.where(there, rows, -1)
        return rows, self.take(rows, names)


def _hash_paths(paths: pa.ChunkedArray) -> np.ndarray:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, paths.cast(pa.binary()).to_pylist()), np.uint64, len(paths))


def iter_slices(column: Any) -> Iterator[Any]:
    return (column.slice(start, SLICE_ROWS) for start in range(0, len(column), SLICE_ROWS))


@dataclass(frozen=True)
class ListingDiff:
    """A chunk of a listing, taken apart. same: numbers of rows of the known table that stay as they are. kept: rows of
    the media table. todo: rows of the listing, with what must be read of each, for `assemble`. rejects: rows of
    schemas.tables.REJECTS_SCHEMA."""

    unchanged_rows: np.ndarray
    kept: pa.Table
    todo: pa.Table
    rejects: pa.Table


def diff_listing(listing: pa.Table, known: KnownRows | None, dataset: Dataset) -> ListingDiff:
    """What of a listing is as known, what must be read, and what is set aside unread."""
    listing = listing.combine_chunks()
    whole = pc.is_null(listing["problem"])
    rejects = rejects_of_listing(listing.filter(pc.invert(whole)), dataset.id)
    listing = listing if not len(rejects) else listing.filter(whole)
    rows, before = _find_known(known, listing["path"])
    needs = _required_reads(listing, before, dataset)
    todo = needs["media"] | needs["captions"] | needs["source"] | needs["mask"]
    same = ~todo & _matches_known(listing, known, before)
    if same.all():
        return ListingDiff(rows, MEDIA_SCHEMA.empty_table(), listing.slice(0, 0), rejects)
    asked = _add_read_flags(listing, rows, needs)
    rest = asked.filter(pa.array(~todo & ~same))
    kept = assemble_rows(rest, [], known)
    if equals_known(kept, rest, known):
        kept, same = kept.slice(0, 0), ~todo
    return ListingDiff(rows[same], kept, asked.filter(pa.array(todo)), rejects)


def _find_known(known: KnownRows | None, paths: pa.ChunkedArray) -> tuple[np.ndarray, pa.Table]:
    if known is None:
        return np.full(len(paths), -1, np.int64), null_columns(len(paths), _COMPARED_COLUMNS)
    return known.find(paths, _COMPARED_COLUMNS)


def known_row_numbers(listing: pa.Table) -> np.ndarray:
    """(n,) int64: the known row of each row of `ListingDiff.todo`, or -1."""
    return listing[_KNOWN_ROW].to_numpy()


def equals_known(table: pa.Table, listing: pa.Table, known: KnownRows | None) -> bool:
    """Whether rows of the media table say just what the known rows of the same paths do. listing: as for
    `assemble`, which made them."""
    rows = known_row_numbers(listing)
    if known is None or (rows < 0).any() or not table.schema.equals(known.table.schema):
        return False
    return table.equals(known.take(rows, table.schema.names))


def null_columns(count: int, names: list[str]) -> pa.Table:
    """Columns of MEDIA_SCHEMA that are null throughout."""
    return pa.table({name: pa.nulls(count, MEDIA_SCHEMA.field(name).type) for name in names})


def _matches_known(listing: pa.Table, known: KnownRows | None, before: pa.Table) -> np.ndarray:
    """(n,) bool: whether the known row, where nothing must be read, says everything that the listing does."""
    if known is None or known.table.schema.names != MEDIA_SCHEMA.names or _extra_columns(listing):
        return np.zeros(len(listing), bool)
    same = _to_bool(pc.is_valid(listing["captions_at"])) & _to_bool(pc.is_null(listing["captions"]))
    for role in ("source", "mask"):
        same &= _to_bool(pc.is_valid(listing[role])) == _to_bool(pc.is_valid(before[role]))
    return same


def _extra_columns(table: pa.Table) -> list[str]:
    return [name for name in table.schema.names if name.startswith(EXTRA_PREFIX)]


def _required_reads(listing: pa.Table, before: pa.Table, dataset: Dataset) -> dict[str, np.ndarray]:
    """(n,) bool for each of COLUMN_GROUPS: whether it must be read."""
    same = equal_mask(listing["version"], before["version"])
    same &= _to_bool(pc.is_null(listing["size"])) | equal_mask(listing["size"], before["size"])
    moving = _to_bool(pc.equal(before["kind"], "video"))
    asked = equal_mask(listing["kind"], before["kind"])
    same &= asked | moving if dataset.animations == "video" else asked
    if dataset.video.scenes:
        same &= ~moving | _to_bool(pc.is_valid(before["scenes"]))
    told = _to_bool(pc.is_valid(listing["captions"]))
    read = equal_mask(listing["captions_version"], before["captions_version"])
    needs = {"media": ~same, "captions": ~told & ~read & _to_bool(pc.is_valid(listing["captions_at"]))}
    for role in ("source", "mask"):
        there = _to_bool(pc.is_valid(listing[role]))
        kept = equal_mask(listing[role], before[role]) & _to_bool(pc.is_valid(before[f"{role}_id"]))
        needs[role] = there & ~(kept & equal_mask(listing[f"{role}_version"], before[f"{role}_version"]))
    return needs


def equal_mask(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    return _to_bool(pc.equal(left, right))


def _to_bool(values: pa.ChunkedArray) -> np.ndarray:
    """(n,) bool; null is no."""
    return pc.fill_null(values, False).to_numpy()


def _add_read_flags(listing: pa.Table, rows: np.ndarray, needs: dict[str, np.ndarray]) -> pa.Table:
    listing = listing.drop_columns(["problem", "advice"]).append_column(_KNOWN_ROW, pa.array(rows))
    for group, need in needs.items():
        listing = listing.append_column(f"read {group}", pa.array(need[: len(rows)]))
    return listing


def assemble_rows(listing: pa.Table, results: list[dict[str, Any]], known: KnownRows | None) -> pa.Table:
    """Rows of the media table from rows of `ListingDiff.todo` and what was read of each, if anything."""
    before = (
        known.take(known_row_numbers(listing), MEDIA_SCHEMA.names)
        if known
        else null_columns(len(listing), MEDIA_SCHEMA.names)
    )
    rows = results or [{}] * len(listing)
    read = pa.table(
        {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in _READ_SCHEMA}
        if results
        else {field.name: pa.nulls(len(listing), field.type) for field in _READ_SCHEMA}
    )
    columns: dict[str, Any] = {name: listing[name] for name in _LISTED_COLUMNS}
    for group, names in COLUMN_GROUPS.items():
        anew = listing[f"read {group}"]
        columns |= {name: pc.if_else(anew, read[name], before[name]) for name in names}
    size = pc.if_else(listing["read media"], read["size"], before["size"])
    columns["size"] = pc.coalesce(listing["size"], size)
    columns["captions"] = pc.coalesce(listing["captions"], columns["captions"])
    for role in ("source", "mask"):  # a companion that has gone leaves nothing behind
        for name in COLUMN_GROUPS[role]:
            null = pa.scalar(None, MEDIA_SCHEMA.field(name).type)
            columns[name] = pc.if_else(pc.is_valid(listing[role]), columns[name], null)
    table = pa.table({name: columns[name] for name in MEDIA_SCHEMA.names}, schema=MEDIA_SCHEMA)
    for name in _extra_columns(listing):
        table = table.append_column(listing.schema.field(name), listing[name])
    return table


def rejects_of_listing(listing: pa.Table, dataset: str) -> pa.Table:
    """Rows of REJECTS_SCHEMA from those of a listing with a problem, "reason: what is wrong"."""
    found = pc.extract_regex(listing["problem"], r"(?s)^(?P<reason>[^:]*): (?P<what>.*)$")
    reason, what = (pc.struct_field(found, index) for index in (0, 1))
    path, advice = listing["path"], listing["advice"]
    message = pc.binary_join_element_wise(path, ": ", what, "; ", advice, "")
    columns = {
        "stage": pa.repeat("discover", len(listing)),
        "item": pc.binary_join_element_wise(f"{dataset}/", path, ""),
        "path": path,
        "reason": reason,
        "message": message,
        "retry": pa.repeat(False, len(listing)),
    }
    return pa.table({name: columns[name] for name in REJECTS_SCHEMA.names}, schema=REJECTS_SCHEMA)
