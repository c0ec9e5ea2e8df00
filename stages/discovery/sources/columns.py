"""Columns of tables, whatever they came from: their kinds, captions in them, extra ones, and rows found by a text."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.errors import LatentpressError
from schemas.tables import EXTRA_PREFIX
from stages.discovery.sources.base import CHUNK_ROWS
from stages.discovery.sources.urls import display_location

_NUMBER = r"^-?\d+(\.\d*)?([eE][+-]?\d+)?$"


def require_columns(table: pa.Table, names: Sequence[str], what: str, location: str = "the table") -> None:
    """Raise LatentpressError, naming the columns there are, unless the table has `names`. what: the option."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        there = ", ".join(table.column_names) or "none"
        raise LatentpressError(
            f"{display_location(location)}: there is no column {', '.join(map(repr, missing))}; there are: {there}",
            f"set {what} to one of them",
        )


def caption_lists(table: pa.Table, columns: Sequence[str], location: str = "the table") -> pa.Array:
    """list<string>, one list a row: the alternatives in `columns`, in their order, each text or a list of texts.

    Spaces around them are cut; empty ones are left out, and of equal ones in a row all but the first. A row without
    any has an empty list. Raises LatentpressError for a column that is missing or holds no text.
    """
    require_columns(table, columns, "caption_column", location)
    rows, values = [], []
    for name in columns:
        row, value = _texts_with_rows(take_rows(table.column(name), None), name, location)
        rows.append(row)
        values.append(value)
    return group_texts(np.concatenate(rows), pa.concat_arrays(values), table.num_rows)


def group_texts(rows: NDArray[np.int64], values: pa.Array, count: int) -> pa.Array:
    """list<string> of `count` lists: `values` (text) by the row that each belongs to, cut, without empty ones and
    without those that a row has already; otherwise in the order given."""
    trimmed = pc.utf8_trim_whitespace(values.cast(pa.string()))
    keep = np.flatnonzero(pc.fill_null(pc.greater(pc.binary_length(trimmed), 0), False).to_numpy(zero_copy_only=False))
    rows = rows[keep]
    if np.any(np.diff(rows) <= 0):  # several in a row somewhere, or not in order
        order = np.argsort(rows, kind="stable")
        keep, rows = keep[order], rows[order]
        codes = trimmed.take(pa.array(keep)).dictionary_encode().indices.to_numpy().astype(np.int64)
        first = np.sort(np.unique(rows * (len(keep) + 1) + codes, return_index=True)[1])
        keep, rows = keep[first], rows[first]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), trimmed.take(pa.array(keep)))


def extra_columns(table: pa.Table, used: Sequence[str], ignored: Counter[str] | None = None) -> dict[str, pa.Array]:
    """Every column not in `used`, as "extra.<name>": text, numbers and truth values; dates as text.

    Others (lists, records, bytes) are left out, and their number is set in `ignored`.
    """
    found, nested = {}, 0
    for name in table.column_names:
        if name in used:
            continue
        column = table.column(name)
        if is_scalar(column.type):
            found[EXTRA_PREFIX + name] = take_rows(column, None)
        else:
            nested += 1
    if nested and ignored is not None:
        ignored["column that is neither text nor number"] = nested
    return found


def cast_to_kind(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of texts, numbers or truth values as another such kind, null where a text says nothing of that kind."""
    if column.type == kind or pa.types.is_null(column.type):
        return column.cast(kind)
    if is_number(column.type) and is_number(kind):
        return column
    texts = column.cast(pa.string())
    if pa.types.is_string(kind):
        return texts
    said = pc.match_substring_regex(texts, r"^(true|false)$" if pa.types.is_boolean(kind) else _NUMBER)
    texts = pc.if_else(said, texts, pa.scalar(None, pa.string()))
    return texts.cast(kind if pa.types.is_boolean(kind) else pa.float64())


class TextLookup:
    """Rows of a column of texts by their text (null has none): 16 bytes a row and no Python objects kept."""

    def __init__(self, keys: pa.Array | pa.ChunkedArray) -> None:
        self.keys = keys if isinstance(keys, pa.ChunkedArray) else pa.chunked_array([keys])
        hashes = hash_texts(self.keys)
        order = np.argsort(hashes, kind="stable")
        if self.keys.null_count:
            order = order[take_rows(self.keys.is_valid(), None).to_numpy(zero_copy_only=False)[order]]
        self._order, self._hashes = order, hashes[order]

    def find(self, texts: pa.Array) -> NDArray[np.int64]:
        """(n,) the first row of each text, -1 where there is none."""
        return self.count(texts)[0]

    def count(self, texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(n,) the first row of each text, and how many rows have it; -1 and 0 where there is none."""
        if not len(self._hashes):
            return np.full(len(texts), -1), np.zeros(len(texts), np.int64)
        wanted = hash_texts(texts)
        left = np.searchsorted(self._hashes, wanted, "left")
        counts = np.searchsorted(self._hashes, wanted, "right") - left
        rows = self._order[np.minimum(left, len(self._order) - 1)]
        same = pc.fill_null(pc.equal(take_rows(self.keys, rows), texts), False).to_numpy(zero_copy_only=False)
        counts = np.where(same, counts, 0)
        return np.where(counts > 0, rows, -1), counts

    def pairs(self, texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every (number of a text, row that has it), by text and then by row."""
        _, counts = self.count(texts)
        owner = np.repeat(np.arange(len(texts)), counts)
        ends = np.cumsum(counts)
        within = np.arange(len(owner)) - np.repeat(ends - counts, counts)
        left = np.searchsorted(self._hashes, hash_texts(texts), "left")
        return owner, self._order[left[owner] + within]


def hash_texts(texts: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """(n,) xxh3-64 of texts, null as "". Of a million different ones, two are equal with odds of 1 to 4e7."""
    found = np.empty(len(texts), np.uint64)
    for start in range(0, len(texts), CHUNK_ROWS):
        part = texts.slice(start, CHUNK_ROWS)
        part = pc.fill_null(part.cast(pa.binary()), b"").to_pylist()
        found[start : start + len(part)] = np.fromiter(map(xxhash.xxh3_64_intdigest, part), np.uint64, len(part))
    return found


def take_rows(column: pa.Array | pa.ChunkedArray, rows: NDArray[np.int64] | pa.Array | None) -> pa.Array:
    """`column` at `rows` (None: all) as one array; null rows give null."""
    found = column if rows is None else column.take(rows if isinstance(rows, pa.Array) else pa.array(rows))
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


# -- kinds of columns ------------------------------------------------------------------------------------------------


def simplify_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as one of few kinds: string, int64, float64, bool, lists of string; whatever else as it is."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return simplify_column(column.cast(kind.value_type))
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_temporal(kind):
        return column.cast(pa.string())
    if pa.types.is_integer(kind):
        return column.cast(pa.float64() if pa.types.is_uint64(kind) else pa.int64(), safe=False)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.float64())
    if (pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)) and is_text(kind.value_type):
        return column.cast(pa.list_(pa.string()))
    return column


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def is_scalar(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_integer, pa.types.is_floating)) or (
        pa.types.is_boolean(kind) or pa.types.is_null(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _texts_with_rows(column: pa.Array, name: str, location: str) -> tuple[NDArray[np.int64], pa.Array]:
    """The row of each text in a column, and the texts."""
    kind = column.type
    if pa.types.is_list(kind) and is_scalar(kind.value_type):
        rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64)
        return rows, column.flatten().cast(pa.string())
    if is_scalar(kind):
        return np.arange(len(column)), column.cast(pa.string())
    raise LatentpressError(
        f"{display_location(location)}: column {name!r} holds {kind}, not captions",
        "set caption_column to a column of text, or of lists of texts",
    )
