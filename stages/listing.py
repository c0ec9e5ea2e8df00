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

from schemas.datasets import Dataset
from schemas.tables import EXTRA, MEDIA, REJECTS

#: Columns of MEDIA by what must be read to know them.
GROUPS = {
    "media": ("media_id", "kind", "width", "height", "frames", "rate", "duration", "constant_rate", "scenes"),
    "captions": ("captions",),
    "source": ("source_id", "source_width", "source_height"),
    "mask": ("mask_id", "mask_kind", "mask_width", "mask_height"),
}
_LISTED = ("path", "version", "captions_version", "source", "source_version", "mask", "mask_version")
_COMPARED = [*_LISTED, "size", "kind", "scenes", "source_id", "mask_id"]
_READ = pa.schema([MEDIA.field("size"), *(MEDIA.field(name) for names in GROUPS.values() for name in names)])
SLICE = 65536  # rows that are copied at a time
_ROW = "row in the known table"


class Rows:
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


class Known(Rows):
    """A media table and where each path stands in it: 16 bytes a row, whatever the order of what is looked up. Of
    several rows of a path the last one counts."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(table)
        heads = np.concatenate([np.empty(0, np.uint64), *map(_heads, slices(table["path"]))])
        self._order = np.argsort(heads, kind="stable")
        self._heads = heads[self._order]

    def find(self, paths: pa.ChunkedArray, names: list[str]) -> tuple[np.ndarray, pa.Table]:
        """(n,) int64: the row of each path, -1 where it has none; and columns at those rows."""
        if not len(self.table):
            return np.full(len(paths), -1, np.int64), nothing(len(paths), names)
        rows = self._order[(np.searchsorted(self._heads, _heads(paths), side="right") - 1).clip(min=0)]
        found = self.take(rows, list(dict.fromkeys([*names, "path"])))
        # Equal hashes of different paths, if that ever happens, cost a file that is read again.
        there = equal(found["path"], paths)
        if there.all():
            return rows, found
        rows = np.where(there, rows, -1)
        return rows, self.take(rows, names)


def _heads(paths: pa.ChunkedArray) -> np.ndarray:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, paths.cast(pa.binary()).to_pylist()), np.uint64, len(paths))


def slices(column: Any) -> Iterator[Any]:
    return (column.slice(start, SLICE) for start in range(0, len(column), SLICE))


@dataclass(frozen=True)
class Split:
    """A chunk of a listing, taken apart. same: numbers of rows of the known table that stay as they are. kept: rows of
    the media table. todo: rows of the listing, with what must be read of each, for `assemble`. rejects: rows of
    schemas.tables.REJECTS."""

    same: np.ndarray
    kept: pa.Table
    todo: pa.Table
    rejects: pa.Table


def split(listing: pa.Table, known: Known | None, dataset: Dataset) -> Split:
    """What of a listing is as known, what must be read, and what is set aside unread."""
    listing = listing.combine_chunks()
    whole = pc.is_null(listing["problem"])
    rejects = listed_rejects(listing.filter(pc.invert(whole)), dataset.id)
    listing = listing if not len(rejects) else listing.filter(whole)
    rows, before = _find(known, listing["path"])
    needs = _needs(listing, before, dataset)
    todo = needs["media"] | needs["captions"] | needs["source"] | needs["mask"]
    same = ~todo & _as_known(listing, known, before)
    if same.all():
        return Split(rows, MEDIA.empty_table(), listing.slice(0, 0), rejects)
    asked = _with_needs(listing, rows, needs)
    rest = asked.filter(pa.array(~todo & ~same))
    kept = assemble(rest, [], known)
    if unchanged(kept, rest, known):
        kept, same = kept.slice(0, 0), ~todo
    return Split(rows[same], kept, asked.filter(pa.array(todo)), rejects)


def _find(known: Known | None, paths: pa.ChunkedArray) -> tuple[np.ndarray, pa.Table]:
    if known is None:
        return np.full(len(paths), -1, np.int64), nothing(len(paths), _COMPARED)
    return known.find(paths, _COMPARED)


def known_at(listing: pa.Table) -> np.ndarray:
    """(n,) int64: the known row of each row of `Split.todo`, or -1."""
    return listing[_ROW].to_numpy()


def unchanged(table: pa.Table, listing: pa.Table, known: Known | None) -> bool:
    """Whether rows of the media table say just what the known rows of the same paths do. listing: as for
    `assemble`, which made them."""
    rows = known_at(listing)
    if known is None or (rows < 0).any() or not table.schema.equals(known.table.schema):
        return False
    return table.equals(known.take(rows, table.schema.names))


def nothing(count: int, names: list[str]) -> pa.Table:
    """Columns of MEDIA that are null throughout."""
    return pa.table({name: pa.nulls(count, MEDIA.field(name).type) for name in names})


def _as_known(listing: pa.Table, known: Known | None, before: pa.Table) -> np.ndarray:
    """(n,) bool: whether the known row, where nothing must be read, says everything that the listing does."""
    if known is None or known.table.schema.names != MEDIA.names or _extras(listing):
        return np.zeros(len(listing), bool)
    same = _true(pc.is_valid(listing["captions_at"])) & _true(pc.is_null(listing["captions"]))
    for role in ("source", "mask"):
        same &= _true(pc.is_valid(listing[role])) == _true(pc.is_valid(before[role]))
    return same


def _extras(table: pa.Table) -> list[str]:
    return [name for name in table.schema.names if name.startswith(EXTRA)]


def _needs(listing: pa.Table, before: pa.Table, dataset: Dataset) -> dict[str, np.ndarray]:
    """(n,) bool for each of GROUPS: whether it must be read."""
    same = equal(listing["version"], before["version"])
    same &= _true(pc.is_null(listing["size"])) | equal(listing["size"], before["size"])
    moving = _true(pc.equal(before["kind"], "video"))
    asked = equal(listing["kind"], before["kind"])
    same &= asked | moving if dataset.animations == "video" else asked
    if dataset.video.scenes:
        same &= ~moving | _true(pc.is_valid(before["scenes"]))
    told = _true(pc.is_valid(listing["captions"]))
    read = equal(listing["captions_version"], before["captions_version"])
    needs = {"media": ~same, "captions": ~told & ~read & _true(pc.is_valid(listing["captions_at"]))}
    for role in ("source", "mask"):
        there = _true(pc.is_valid(listing[role]))
        kept = equal(listing[role], before[role]) & _true(pc.is_valid(before[f"{role}_id"]))
        needs[role] = there & ~(kept & equal(listing[f"{role}_version"], before[f"{role}_version"]))
    return needs


def equal(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    return _true(pc.equal(left, right))


def _true(values: pa.ChunkedArray) -> np.ndarray:
    """(n,) bool; null is no."""
    return pc.fill_null(values, False).to_numpy()


def _with_needs(listing: pa.Table, rows: np.ndarray, needs: dict[str, np.ndarray]) -> pa.Table:
    listing = listing.drop_columns(["problem", "advice"]).append_column(_ROW, pa.array(rows))
    for group, need in needs.items():
        listing = listing.append_column(f"read {group}", pa.array(need[: len(rows)]))
    return listing


def assemble(listing: pa.Table, results: list[dict[str, Any]], known: Known | None) -> pa.Table:
    """Rows of the media table from rows of `Split.todo` and what was read of each (nothing where nothing had to)."""
    before = known.take(known_at(listing), MEDIA.names) if known else nothing(len(listing), MEDIA.names)
    rows = results or [{}] * len(listing)
    read = pa.table(
        {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in _READ}
        if results
        else {field.name: pa.nulls(len(listing), field.type) for field in _READ}
    )
    columns: dict[str, Any] = {name: listing[name] for name in _LISTED}
    for group, names in GROUPS.items():
        anew = listing[f"read {group}"]
        columns |= {name: pc.if_else(anew, read[name], before[name]) for name in names}
    size = pc.if_else(listing["read media"], read["size"], before["size"])
    columns["size"] = pc.coalesce(listing["size"], size)
    columns["captions"] = pc.coalesce(listing["captions"], columns["captions"])
    for role in ("source", "mask"):  # a companion that has gone leaves nothing behind
        for name in GROUPS[role]:
            null = pa.scalar(None, MEDIA.field(name).type)
            columns[name] = pc.if_else(pc.is_valid(listing[role]), columns[name], null)
    table = pa.table({name: columns[name] for name in MEDIA.names}, schema=MEDIA)
    for name in _extras(listing):
        table = table.append_column(listing.schema.field(name), listing[name])
    return table


def listed_rejects(listing: pa.Table, dataset: str) -> pa.Table:
    """Rows of REJECTS from those of a listing with a problem, "reason: what is wrong"."""
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
    return pa.table({name: columns[name] for name in REJECTS.names}, schema=REJECTS)
