"""Columns of listings and other tables: simplify column types, select extra columns, add problems, and look up rows by
a text."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.config.datasets import MediaKind
from schemas.errors import LatentpressError
from schemas.tables import EXTRA_PREFIX
from stages.discovery.sources.urls import display_location
from stages.media.files import extensions_of_kinds

#: Largest number of items that are Python objects at the same time.
CHUNK_ROWS = 16384
_str, _long = pa.string(), pa.int64()

#: One row for each item. path, size, version, kind: as in schemas.tables.MEDIA_SCHEMA; size and version are null if
#: they are unknown until the item is opened. captions: the alternatives if they are part of the listing (a table's
#: column, the file's name, a member of the archive), else null. captions_at, captions_version: path and version of the
#: caption file that must be read, else null. source, mask: paths of the companions below their folder, with their
#: versions; null if no companion is configured or found. Further source images follow as source_2, ... with their
#: versions. problem: reason to reject the item without opening it, as "reason: description" ("no-caption: has no
#: caption"), else null. advice: how to solve the problem. Extra columns follow as "extra.<name>"
#: (schemas.tables.EXTRA_PREFIX).
LISTING_SCHEMA = pa.schema(
    [("path", _str), ("kind", _str), ("size", _long), ("version", _str)]
    + [("captions", pa.list_(_str)), ("captions_at", _str), ("captions_version", _str)]
    + [(name, _str) for name in ("source", "source_version", "mask", "mask_version", "mask_kind", "problem", "advice")]
)
#: Matches the hash that `captions.public_path` appends to a URL with a query or user.
URL_HASH = r"#[0-9a-f]{12}$"
#: Columns of a listing by name.
Columns = dict[str, pa.Array]


def add_problems(columns: Columns, problems: pa.Array, advices: pa.Array | str) -> None:
    """Set "problem" and "advice" in rows of a listing without a problem. problems: (rows,), null for no new problem."""
    null = pa.nulls(len(problems), _str)
    before, advice = columns.get("problem", null), columns.get("advice", null)
    columns["advice"] = pc.if_else(pc.and_(pc.is_null(before), pc.is_valid(problems)), advices, advice)
    columns["problem"] = pc.coalesce(before, problems)


def listing_table(columns: Mapping[str, pa.Array]) -> pa.Table:
    """A table of LISTING_SCHEMA from "path", any further columns of the schema, and extra columns. Missing columns are
    null."""
    count = len(columns["path"])
    arrays = {field.name: columns.get(field.name, pa.nulls(count)).cast(field.type) for field in LISTING_SCHEMA}
    return pa.table(arrays | {name: column for name, column in columns.items() if name not in arrays})


def require_columns(available: Collection[str], names: Sequence[str], option: str, location: str = "the table") -> None:
    """Raise LatentpressError, listing the `available` columns, unless they include all `names`."""
    missing_names = [name for name in names if name not in available]
    if missing_names:
        raise LatentpressError(
            f"{display_location(location)}: it has no column {', '.join(map(repr, missing_names))}; "
            f"its columns: {', '.join(available) or 'none'}",
            f"set {option} to one of its columns",
        )


def refuse_invalid_text(table: pa.Table, location: str) -> None:
    """Raise LatentpressError that names the first column with text that is not UTF-8. Arrow does not check this when it
    reads a file."""
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid as error:
            problem = f"{display_location(location)}: column {name!r} is not UTF-8"
            raise LatentpressError(problem, "write its text as UTF-8") from error


def extra_columns(
    table: pa.Table, used_names: Sequence[str], ignored: Counter[str] | None = None
) -> dict[str, pa.Array]:
    """Every column not in `used_names` with texts (dates, after `simplify_column`), numbers or booleans, as
    "extra.<name>".

    Columns of other types (lists, records, bytes) are left out, and their number is set in `ignored`.
    """
    further_names = [name for name in table.column_names if name not in used_names]
    scalars = {name: table.column(name) for name in further_names if is_scalar(table.column(name).type)}
    if ignored is not None and len(scalars) < len(further_names):
        ignored["column that is neither text nor number"] = len(further_names) - len(scalars)
    return {EXTRA_PREFIX + name: take_rows(column, None) for name, column in scalars.items()}


class TextLookup:
    """Finds rows of a text column by their text; null rows are never found. Takes 16 bytes per row and no
    Python objects."""

    def __init__(self, keys: pa.Array | pa.ChunkedArray) -> None:
        self.keys = take_rows(keys.cast(pa.large_string()), None)
        hashes = _hash_texts(self.keys)
        order = np.argsort(hashes, kind="stable")
        order = order[to_mask(self.keys.is_valid())[order]] if self.keys.null_count else order
        self._order, self._hashes = order, hashes[order]

    def find(self, texts: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
        """(n,) int64: the first row with each text, -1 if none has it."""
        return self.count(texts)[0]

    def count(self, texts: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two (n,) int64: the first row with each text, and the number of rows with it; -1 and 0 if none has it."""
        starts, counts = self._ranges(texts)
        rows = self._order[starts] if len(self._order) else starts
        return np.where(counts > 0, rows, -1), counts

    def pairs(self, texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two (pairs,) int64: the index of a text, and a row with this text; sorted by text index, then by row."""
        starts, counts = self._ranges(texts)
        owner = np.repeat(np.arange(len(texts)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return owner, self._order[starts[owner] + within]

    def _ranges(self, texts: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two (n,) int64: start of each text's rows in the order by hash, and their number."""
        text_hashes = _hash_texts(texts)
        starts = np.searchsorted(self._hashes, text_hashes, "left")
        counts = np.searchsorted(self._hashes, text_hashes, "right") - starts
        if len(self._order):
            starts = np.minimum(starts, len(self._order) - 1)
            found_texts = self.keys.take(pa.array(self._order[starts]))
            counts = np.where(to_mask(pc.equal(found_texts, texts.cast(found_texts.type))), counts, 0)
        return starts, counts


def _hash_texts(texts: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """(n,) uint64 xxh3-64 of texts, null as "". A collision among a million texts has a probability of 1 in 4e7."""
    hashes = np.empty(len(texts), np.uint64)
    for start in range(0, len(texts), CHUNK_ROWS):
        part = pc.fill_null(texts.slice(start, CHUNK_ROWS).cast(pa.large_binary()), b"").to_pylist()
        hashes[start : start + len(part)] = np.fromiter(map(xxhash.xxh3_64_intdigest, part), np.uint64, len(part))
    return hashes


def take_rows(column: pa.Array | pa.ChunkedArray, rows: NDArray[np.int64] | pa.Array | None) -> pa.Array:
    """`column` at the row numbers `rows` (None for all rows) as one array. A null row number gives null."""
    column_rows = column if rows is None else column.take(rows if isinstance(rows, pa.Array) else pa.array(rows))
    return column_rows.combine_chunks() if isinstance(column_rows, pa.ChunkedArray) else column_rows


def to_mask(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """The values as (n,) bool; null becomes False."""
    return take_rows(pc.fill_null(values, False), None).to_numpy(zero_copy_only=False)


def extensions_of_paths(paths: pa.Array) -> pa.Array:
    """Lower-case extensions with a dot, without the hash of a URL; "" for a path without an extension."""
    clean = pc.replace_substring_regex(paths, URL_HASH, "")
    return pc.utf8_lower(pc.replace_substring_regex(clean, r"(?s)^.*?(\.[^./]*)?$", r"\1"))


def kinds_by_extension(paths: pa.Array, default: MediaKind) -> pa.Array:
    kinds_of_extensions = extensions_of_kinds(("image", "video"))
    rows = pc.index_in(extensions_of_paths(paths), value_set=pa.array(list(kinds_of_extensions)))
    return pc.coalesce(pa.array(list(kinds_of_extensions.values()), _str).take(rows), pa.scalar(default, _str))


# -- types of columns ------------------------------------------------------------------------------------------------


def simplify_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as string, int64, float64, bool or list<string>. Columns of other types are returned unchanged."""
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
