"""Tables of captions and paths: CSV, JSON lines and Parquet, at a path or a URL, columnar from end to end.

What cannot be read whole is an error that names the file and the line: half a table would be a training set that
nobody asked for. Every text is a `string`, whatever kind of text the file holds; cells of CSV that are empty are null.
"""

import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import LatentpressError
from stages.discovery.sources.columns import is_scalar, require_columns, simplify_column
from stages.discovery.sources.csv_checks import (
    check_csv,
    detect_delimiter,
    has_quotes,
    lines_of,
    not_opened,
    open_location,
    raise_not_utf8,
    refuse_encoding,
)
from stages.discovery.sources.urls import display_location, scrub_secrets

TABLE_EXTENSIONS = (".csv", ".jsonl", ".parquet")
#: Columns that name the media of a row, where none is configured; the first that a table has.
USUAL_MEDIA_COLUMNS = ("file_name", "path", "file", "image", "video", "filename")

_BLOCK_BYTES = 1 << 24  # of text at a time; also the longest line
#: What a column of numbers may say for "none", beside an empty cell.
_NULL_NUMBERS = pa.array(["NA", "N/A", "n/a", "null", "NULL", "None", "-"])


def read_table(
    location: str, columns: Sequence[str] | None = None, text: Sequence[str] = (), kind: str | None = None
) -> pa.Table:
    """The table at a path or fsspec URL, in the order of its rows.

    columns: read these only; None: all but those of bytes. text: columns that are text even if all of them look like
    numbers (names of files). kind: "csv", "jsonl" or "parquet", where the ending does not say. Raises
    LatentpressError.
    """
    kind = _table_format(location, kind)
    reader: Callable[..., pa.Table] = {"csv": _read_csv, "jsonl": _read_jsonl, "parquet": _read_parquet}[kind]
    try:
        table = reader(location, columns, text)
    except pa.ArrowInvalid as error:
        step = "correct it, or make the table again"
        raise LatentpressError(
            f"{display_location(location)}: can't be read as {kind} ({_arrow_message(error)})", step
        ) from None
    except OSError as error:
        raise not_opened(location, error) from None
    found = {name: simplify_column(table.column(name)) for name in table.column_names}
    found |= {name: found[name].cast(pa.string()) for name in text if name in found and is_scalar(found[name].type)}
    return pa.table(found)


def find_media_column(table: pa.Table, wanted: str | None, location: str, also: Sequence[str] = ()) -> str:
    """The name of the column that names the media: `wanted`, or the first usual one. Raises LatentpressError."""
    usual = (*USUAL_MEDIA_COLUMNS, *also)
    name = wanted or next((name for name in usual if name in table.column_names), None)
    refuse_binary_columns(location, [wanted] if wanted else usual if name is None else [], media=True)
    if name is None:
        raise LatentpressError(
            f"{display_location(location)}: no column is called {', '.join(usual)}; there are: "
            f"{', '.join(table.column_names)}",
            "name the column of the media files with media_column",
        )
    require_columns(table, [name], "media_column", location)
    kind = table.schema.field(name).type
    if not pa.types.is_string(kind) and not pa.types.is_null(kind):
        raise LatentpressError(
            f"{display_location(location)}: column {name!r} holds {kind}, not names of files",
            "name another with media_column; for a table with the images in it: source: huggingface",
        )
    return name


def refuse_binary_columns(location: str, names: Sequence[str], media: bool = False) -> None:
    """Raise LatentpressError where a Parquet file has one of the columns `names` and it holds bytes, which
    `read_table` leaves out. media: they would be the media or companions of a row, else its text."""
    if not names or _table_format(location, "") != "parquet":
        return
    import pyarrow.parquet as pq

    with open_location(location) as file:
        held = {field.name: field.type for field in pq.read_schema(file) if _has_bytes(field.type)}
    for name in names:
        if name in held and media:
            raise LatentpressError(
                f"{display_location(location)}: column {name!r} holds the files themselves ({held[name]}), not "
                f"their names",
                f"set source: huggingface and media_column: {name}; it reads media out of the table",
            )
        if name in held:
            raise LatentpressError(
                f"{display_location(location)}: column {name!r} holds bytes ({held[name]}), not text",
                "write it as strings",
            )


# -- one function a format -------------------------------------------------------------------------------------------


def _read_csv(location: str, columns: Sequence[str] | None, text: Sequence[str]) -> pa.Table:
    """All cells as text first: pyarrow settles a column's type by its first block and stops at what differs later."""
    delimiter, quotes = detect_delimiter(location), has_quotes(location)
    if quotes:
        check_csv(location, delimiter)
    try:
        table = _parse_csv(location, delimiter, columns)
    except pa.ArrowInvalid:
        raise_not_utf8(location)
        if not quotes:
            check_csv(location, delimiter)
        raise
    keep = table.column_names if columns is None else [name for name in table.column_names if name in columns]
    found = {name: table.column(name) if name in text else _infer_type(table.column(name)) for name in keep}
    return pa.table(found)


def _parse_csv(location: str, delimiter: str, columns: Sequence[str] | None) -> pa.Table:
    """`columns`, or at least one, as text."""
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with open_location(location) as file:
        reader = csv.open_csv(file, csv.ReadOptions(block_size=_BLOCK_BYTES), parse)
        names = reader.schema.names
        reader.close()
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise LatentpressError(
            f"{display_location(location)}: two columns are called {twice[0]!r}", "rename one of them"
        )
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        include_columns=None if columns is None else [name for name in columns if name in names] or names[:1],
        check_utf8=True,
    )
    with open_location(location) as file:
        return csv.read_csv(file, csv.ReadOptions(block_size=_BLOCK_BYTES), parse, convert)


def _infer_type(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells of CSV as what all of them are: whole numbers, numbers, truth values, or text."""
    sample = _clean_numbers(column.slice(0, 64))
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            sample.cast(kind)  # first, so that a long column of captions is left at once
            found = _clean_numbers(column).cast(kind)
        except pa.ArrowInvalid:
            continue
        return found if found.null_count < len(found) else column
    return column


def _clean_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells without the spaces around them, null where they say that there is no number."""
    trimmed = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.is_in(trimmed, value_set=_NULL_NUMBERS), pa.scalar(None, pa.string()), trimmed)


def _read_jsonl(location: str, columns: Sequence[str] | None, text: Sequence[str]) -> pa.Table:
    try:
        with open_location(location) as file:
            table = _parse_jsonl(file)
    except pa.ArrowInvalid:
        raise_bad_json(location)
        _raise_bad_line(location)
        raise
    return table if columns is None else table.select([name for name in table.column_names if name in columns])


def _parse_jsonl(file: BinaryIO) -> pa.Table:
    from pyarrow import json as arrow_json

    read = arrow_json.ReadOptions(block_size=_BLOCK_BYTES)
    table = arrow_json.read_json(file, read)
    dates = [field for field in table.schema if _has_dates(field.type)]
    if dates:  # pyarrow takes text that looks like a date for one, and its spelling would be lost
        texts = pa.schema([(field.name, _text_type(field.type)) for field in dates])
        file.seek(0)
        table = arrow_json.read_json(file, read, arrow_json.ParseOptions(explicit_schema=texts))
    table.validate(full=True)  # the parser does not look whether text is UTF-8
    return table


def _raise_bad_line(location: str) -> None:
    """What pyarrow alone refuses is in the first line without which it reads the lines before."""
    lines = [line for _, line in lines_of(location)]

    def refusal(count: int) -> str:
        try:
            _parse_jsonl(BytesIO(b"".join(lines[:count])))
        except pa.ArrowInvalid as error:
            return _arrow_message(error)
        return ""

    number = bisect_left(range(len(lines)), True, lo=1, key=lambda count: bool(refusal(count)))
    message = f"{display_location(location)}, line {number}: can't be read ({refusal(number)})"
    raise LatentpressError(message, "write each key once, with values of one kind")


def _has_dates(kind: pa.DataType) -> bool:
    return pa.types.is_temporal(kind.value_type if pa.types.is_list(kind) else kind)


def _text_type(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.string()) if pa.types.is_list(kind) else pa.string()


def _read_parquet(location: str, columns: Sequence[str] | None, text: Sequence[str]) -> pa.Table:
    import pyarrow.parquet as pq

    with open_location(location) as file, pq.ParquetFile(file) as parquet:
        fields = parquet.schema_arrow
        return parquet.read(
            [f.name for f in fields if (f.name in columns if columns is not None else not _has_bytes(f.type))]
        )


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_bytes(kind.value_type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _table_format(location: str, otherwise: str | None) -> str:
    ending = os.path.splitext(location.partition("?")[0] if "://" in location else location)[1].lower()
    if ending in TABLE_EXTENSIONS:
        return ending[1:]
    if otherwise is None:
        raise LatentpressError(
            f"{display_location(location)}: is no table that is known",
            f"valid endings: {', '.join(TABLE_EXTENSIONS)}; or caption_strategy",
        )
    return otherwise


def _arrow_message(error: Exception) -> str:
    """pyarrow quotes the line that it can't read, and there may be URLs in it."""
    return scrub_secrets(str(error).partition("\n")[0])


def raise_bad_json(location: str) -> None:
    """Name the first line that is no UTF-8, no JSON object, or where a column changes its kind."""
    refuse_encoding(location)
    raise_not_utf8(location)
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in lines_of(location):
        if not line.strip():
            continue
        where = f"{display_location(location)}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LatentpressError(f"{where}: is no JSON ({error})", "write one object a line") from None
        if not isinstance(row, dict):
            raise LatentpressError(f"{where}: is {_json_kind(row)}, not an object", "write one object a line")
        for name, value in row.items():
            if value is None:
                continue
            kind, since = kinds.setdefault(name, (_json_kind(value), number))
            if kind != _json_kind(value):
                message = f"{where}: {name!r} is {_json_kind(value)} here and {kind} on line {since}"
                raise LatentpressError(message, "make every line of the column the same")


def _json_kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")
