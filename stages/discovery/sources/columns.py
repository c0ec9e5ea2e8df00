"""Columns of any table: simplify their types, take captions and extra columns from them, look rows up by a text."""

from collections import Counter
from collections.abc import Collection, Sequence

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


def require_columns(available: Collection[str], names: Sequence[str], option: str, location: str = "the table") -> None:
    """Raise LatentpressError, listing the `available` columns, unless `names` are among them."""
    missing = [name for name in names if name not in available]
    if missing:
        raise LatentpressError(
            f"{display_location(location)}: there is no column {', '.join(map(repr, missing))}; "
            f"there are: {', '.join(available) or 'none'}",
            f"set {option} to one of them",
        )


def caption_lists(table: pa.Table, columns: Sequence[str], location: str = "the table") -> pa.Array:
    """list<string>, one list a row: the alternatives in `columns`, in their order, each text or a list of texts.

    Whitespace around them is removed; empty texts and repetitions within a row are dropped. A row without captions has
    an empty list. Raises LatentpressError for a column that is missing or holds no text.
    """
    require_columns(table.column_names, columns, "caption_column", location)
    rows, values = [], []
    for name in columns:
        column = take_rows(table.column(name), None)
        if pa.types.is_list(column.type) and is_scalar(column.type.value_type):
            rows.append(pc.list_parent_indices(column).to_numpy(zero_copy_only=False).astype(np.int64))
            column = column.flatten()
        elif is_scalar(column.type):
            rows.append(np.arange(len(column)))
        else:
            raise LatentpressError(
                f"{display_location(location)}: column {name!r} holds {column.type}, not captions",
                "set caption_column to a column of text, or of lists of texts",
            )
        values.append(column.cast(pa.string()))
    return group_texts(np.concatenate(rows), pa.concat_arrays(values), table.num_rows)


def group_texts(rows: NDArray[np.int64], values: pa.Array, count: int) -> pa.Array:
    """list<string> of `count` lists: `values` (text) by the row that each belongs to, trimmed, without empty texts and
    repetitions within a row, otherwise in the order given."""
    trimmed = pc.utf8_trim_whitespace(values.cast(pa.string()))
    keep = np.flatnonzero(to_mask(pc.greater(pc.binary_length(trimmed), 0)))
    rows = rows[keep]
    if np.any(np.diff(rows) <= 0):  # a row has several, or rows are not in order
        order = np.argsort(rows, kind="stable")
        keep, rows = keep[order], rows[order]
        codes = trimmed.take(pa.array(keep)).dictionary_encode().indices.to_numpy().astype(np.int64)
        first = np.sort(np.unique(rows * (len(keep) + 1) + codes, return_index=True)[1])
        keep, rows = keep[first], rows[first]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), trimmed.take(pa.array(keep)))


def refuse_invalid_text(table: pa.Table, location: str) -> None:
    """LatentpressError that names the first column with text that is not UTF-8: Arrow does not check it when it reads a
    file."""
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid as error:
            problem = f"{display_location(location)}: column {name!r} is not UTF-8"
            raise LatentpressError(problem, "write its text as UTF-8") from error


def extra_columns(table: pa.Table, used: Sequence[str], ignored: Counter[str] | None = None) -> dict[str, pa.Array]:
    """Every column not in `used`, as "extra.<name>": text, numbers and truth values; dates as text.

    Other types (lists, records, bytes) are left out, and `ignored` gets their number.
    """
    others = [name for name in table.column_names if name not in used]
    scalars = {name: table.column(name) for name in others if is_scalar(table.column(name).type)}
    if ignored is not None and len(scalars) < len(others):
        ignored["column that is neither text nor number"] = len(others) - len(scalars)
    return {EXTRA_PREFIX + name: take_rows(column, None) for name, column in scalars.items()}


def cast_to_kind(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of texts, numbers or truth values as another such type; null where a text can't be read as that type."""
    if column.type == kind or pa.types.is_null(column.type):
        return column.cast(kind)
    if is_number(column.type) and is_number(kind):
        return column
    texts = column.cast(pa.string())
    if pa.types.is_string(kind):
        return texts
    is_boolean = pa.types.is_boolean(kind)
    readable = pc.match_substring_regex(texts, r"^(true|false)$" if is_boolean else _NUMBER)
    return pc.if_else(readable, texts, None).cast(kind if is_boolean else pa.float64())


class TextLookup:
    """Finds the rows of a column of texts by their text (null: not found); 16 bytes a row, no Python objects."""

    def __init__(self, keys: pa.Array | pa.ChunkedArray) -> None:
        self.keys = keys if isinstance(keys, pa.ChunkedArray) else pa.chunked_array([keys])
        hashes = hash_texts(self.keys)
        order = np.argsort(hashes, kind="stable")
        if self.keys.null_count:
            order = order[to_mask(self.keys.is_valid())[order]]
        self._order, self._hashes = order, hashes[order]

    def find(self, texts: pa.Array) -> NDArray[np.int64]:
        """(n,) the first row of each text, -1 if there is none."""
        return self.count(texts)[0]

    def guess_last(self, texts: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
        """(n,) the last row whose text has the hash of each text; any row if there is none."""
        return self._order[(np.searchsorted(self._hashes, hash_texts(texts), "right") - 1).clip(min=0)]

    def count(self, texts: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(n,) the first row of each text, and how many rows have it; -1 and 0 if there is none."""
        if not len(self._hashes):
            return np.full(len(texts), -1), np.zeros(len(texts), np.int64)
        wanted = hash_texts(texts)
        left = np.searchsorted(self._hashes, wanted, "left")
        counts = np.searchsorted(self._hashes, wanted, "right") - left
        rows = self._order[np.minimum(left, len(self._order) - 1)]
        counts = np.where(to_mask(pc.equal(take_rows(self.keys, rows), texts)), counts, 0)
        return np.where(counts > 0, rows, -1), counts

    def pairs(self, texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every (number of a text, row that has it), by text and then by row."""
        _, counts = self.count(texts)
        owner = np.repeat(np.arange(len(texts)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        left = np.searchsorted(self._hashes, hash_texts(texts), "left")
        return owner, self._order[left[owner] + within]


def hash_texts(texts: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """(n,) xxh3-64 of texts, null as "". Of a million different ones, two are equal with odds of 1 to 4e7."""
    hashes = np.empty(len(texts), np.uint64)
    for start in range(0, len(texts), CHUNK_ROWS):
        part = pc.fill_null(texts.slice(start, CHUNK_ROWS).cast(pa.binary()), b"").to_pylist()
        hashes[start : start + len(part)] = np.fromiter(map(xxhash.xxh3_64_intdigest, part), np.uint64, len(part))
    return hashes


def take_rows(column: pa.Array | pa.ChunkedArray, rows: NDArray[np.int64] | pa.Array | None) -> pa.Array:
    """`column` at `rows` (None: all) as one array; null rows give null."""
    taken = column if rows is None else column.take(rows if isinstance(rows, pa.Array) else pa.array(rows))
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


def to_mask(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """(n,) bool; null is False."""
    return take_rows(pc.fill_null(values, False), None).to_numpy(zero_copy_only=False)


# -- types of columns ------------------------------------------------------------------------------------------------


def simplify_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as string, int64, float64, bool or list<string>; any other type as it is."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return simplify_column(column.cast(kind.value_type))
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_temporal(kind):
        return column.cast(pa.string())
    if pa.types.is_integer(kind):
        return column.cast(pa.float64() if pa.types.is_uint64(kind) else pa.int64(), safe=False)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.float64())
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        text_types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if any(is_type(kind.value_type) for is_type in text_types):
            return column.cast(pa.list_(pa.string()))
    return column


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def is_scalar(kind: pa.DataType) -> bool:
    return is_number(kind) or any(test(kind) for test in (pa.types.is_string, pa.types.is_boolean, pa.types.is_null))
