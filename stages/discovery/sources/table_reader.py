"""Tables of captions and paths: CSV, JSON lines and Parquet, at a path or a URL, read as columns.

A table that can't be read completely is an error that names the file and the line: with half a table, half the training
set would be missing unnoticed. All text is `string`, whatever text type the file has; empty cells of CSV are null.

When pyarrow can't read a table it seldom says where the fault is, so the file is then read again line by line. And its
CSV reader does not detect the separator, nor rows that a wrong quote merges into a cell. Python's own CSV reader is
strict and counts lines, but takes about a second for a million rows: it reads only files with quotes and those that
pyarrow refused.
"""

import csv
import io
import json
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import LatentpressError
from schemas.regular_files import open_regular
from schemas.text_format import shorten
from stages.discovery.sources.columns import is_scalar, refuse_invalid_text, require_columns, simplify_column
from stages.discovery.sources.urls import display_location, open_filesystem, scrub_secrets
from stages.discovery.sources.walk import BACKSLASH_ADVICE

TABLE_EXTENSIONS = (".csv", ".jsonl", ".parquet")
#: The column of the media if none is configured: the first of these that a table has.
USUAL_MEDIA_COLUMNS = ("file_name", "path", "file", "image", "video", "filename")

_BLOCK_BYTES = 1 << 24  # of text at a time; also the longest line
MAX_DEPTH = 100  # levels of arrays and objects in a line of JSON
#: Cells that mean "no value" in a column of numbers, besides empty ones.
_NULL_NUMBERS = pa.array(["NA", "N/A", "n/a", "null", "NULL", "None", "-"])
MAX_CELL_BYTES = 1 << 24
_DELIMITER_NAMES = {";": "';'", "\t": "tab", "|": "'|'"}
_DOUBLE_QUOTES = 'write a quote within quotes as ""'
_BOM = b"\xef\xbb\xbf"
_FILE_NAME = re.compile(r"\S+(\.[A-Za-z0-9]{2,5})")


def read_table(
    location: str, columns: Sequence[str] | None = None, text: Sequence[str] = (), kind: str | None = None
) -> pa.Table:
    """The table at a path or fsspec URL, in the order of its rows.

    columns: read only these; None: all except those of bytes. text: columns that are text even if all their cells look
    like numbers (file names). kind: "csv", "jsonl" or "parquet", for a location without such an extension. Raises
    LatentpressError.
    """
    kind = _table_format(location, kind)
    try:
        if kind == "csv":
            table = _read_csv(location, columns, text)
        elif kind == "jsonl":
            table = _read_jsonl(location, columns)
        else:
            table = _read_parquet(location, columns)
    except pa.ArrowInvalid as error:
        problem = f"{display_location(location)}: can't be read as {kind} ({_arrow_message(error)})"
        raise LatentpressError(problem, "correct it, or make the table again") from None
    except OSError as error:
        raise not_opened(location, error) from None
    columns_read = {name: simplify_column(table.column(name)) for name in table.column_names}
    columns_read |= {
        name: columns_read[name].cast(pa.string())
        for name in text
        if name in columns_read and is_scalar(columns_read[name].type)
    }
    return pa.table(columns_read)


def find_media_column(table: pa.Table, configured: str | None, location: str, also: Sequence[str] = ()) -> str:
    """The column of the media: the configured one, or the first usual one. Raises LatentpressError."""
    usual = (*USUAL_MEDIA_COLUMNS, *also)
    name = configured or next((name for name in usual if name in table.column_names), None)
    refuse_binary_columns(location, [configured] if configured else usual if name is None else [], media=True)
    if name is None:
        raise LatentpressError(
            f"{display_location(location)}: no column is called {', '.join(usual)}; there are: "
            f"{', '.join(table.column_names)}",
            "name the column of the media files with media_column",
        )
    require_columns(table.column_names, [name], "media_column", location)
    kind = table.schema.field(name).type
    if not pa.types.is_string(kind) and not pa.types.is_null(kind):
        raise LatentpressError(
            f"{display_location(location)}: column {name!r} holds {kind}, not names of files",
            "name another with media_column; for a table with the images in it: source: huggingface",
        )
    return name


def refuse_binary_columns(location: str, names: Sequence[str], media: bool = False) -> None:
    """Raise LatentpressError if one of the columns `names` of a Parquet file holds bytes, which `read_table` leaves
    out. media: they are configured as media or companions, else as captions."""
    if not names or _table_format(location, "") != "parquet":
        return
    import pyarrow.parquet as pq

    with open_location(location) as file:
        binary = {field.name: field.type for field in pq.read_schema(file) if _has_bytes(field.type)}
    name = next((name for name in names if name in binary), None)
    if name is None:
        return
    problem, step = f"bytes ({binary[name]}), not text", "write it as strings"
    if media:
        problem = f"the files themselves ({binary[name]}), not their names"
        step = f"set source: huggingface and media_column: {name}; it reads media out of the table"
    raise LatentpressError(f"{display_location(location)}: column {name!r} holds {problem}", step)


# -- formats ---------------------------------------------------------------------------------------------------------


def _read_csv(location: str, columns: Sequence[str] | None, text: Sequence[str]) -> pa.Table:
    """All cells are read as text first: pyarrow infers a column's type from its first block, and a later cell of
    another type would be an error."""
    from pyarrow import csv as arrow_csv

    delimiter, quotes = detect_delimiter(location), has_quotes(location)
    if quotes:
        check_csv(location, delimiter)
    read = arrow_csv.ReadOptions(block_size=_BLOCK_BYTES)
    parse = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        with open_location(location) as file, arrow_csv.open_csv(file, read, parse) as reader:
            names = reader.schema.names
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            problem = f"{display_location(location)}: two columns are called {twice[0]!r}"
            raise LatentpressError(problem, "rename one of them")
        included = names if columns is None else [name for name in columns if name in names]
        convert = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            include_columns=included or names[:1],  # none would mean all
        )
        with open_location(location) as file:
            table = arrow_csv.read_csv(file, read, parse, convert)
    except pa.ArrowInvalid:
        for _ in decode_lines(location):  # raises for a line that is not UTF-8
            pass
        if not quotes:
            check_csv(location, delimiter)
        raise
    return pa.table({name: table[name] if name in text else _infer_type(table[name]) for name in included})


def _infer_type(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells of CSV as int64, float64 or bool if all of them are, else as text."""
    sample = _clean_numbers(column.slice(0, 64))
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            sample.cast(kind)  # first, so that a long column of captions is given up at once
            converted = _clean_numbers(column).cast(kind)
        except pa.ArrowInvalid:
            continue
        return converted if converted.null_count < len(converted) else column
    return column


def _clean_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trimmed cells; those that mean "no value" are null."""
    trimmed = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.is_in(trimmed, value_set=_NULL_NUMBERS), None, trimmed)


def _read_jsonl(location: str, columns: Sequence[str] | None) -> pa.Table:
    refuse_depth(location)
    try:
        with open_location(location) as file:
            table = _parse_jsonl(file)
    except pa.ArrowInvalid:
        check_jsonl(location)
        _raise_bad_line(location)
        raise
    return table if columns is None else table.select([name for name in table.column_names if name in columns])


def refuse_depth(location: str) -> None:
    """Raise LatentpressError that names the line where values are nested more than MAX_DEPTH levels deep: pyarrow
    crashes at 3,000 levels and stalls at 8,000, on one line or on several."""
    depth, by_lines = 0, True  # by_lines: no value has gone on beyond a line; one that did could not be followed by "{"
    for number, line in lines_of(location):
        text = line.strip()
        by_lines = by_lines and (not text or text[:1] + text[-1:] == b"{}")
        if by_lines and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
            continue
        depth, deepest = _measure_depth(text, depth)
        if deepest > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} levels deep"
            raise line_error(location, number, problem, "keep what is nested so deep out of the table")


def _measure_depth(text: bytes, depth: int) -> tuple[int, int]:
    """The levels of arrays and objects at the end of a line of JSON that begins in `depth` of them, and the most."""
    marks = np.frombuffer(re.sub(rb'"(?:[^"\\]|\\.)*"|[^"\[{\]}]+', b"", text), np.uint8)
    steps = np.isin(marks, list(b"[{")).astype(np.int32) - np.isin(marks, list(b"]}"))
    depths = depth + np.cumsum(steps, dtype=np.int32)
    depths -= np.minimum.accumulate(np.minimum(depths, 0))  # what is closed was opened
    return (int(depths[-1]), max(depth, int(depths.max()))) if len(depths) else (depth, depth)


def _read_parquet(location: str, columns: Sequence[str] | None) -> pa.Table:
    import pyarrow.parquet as pq

    with open_location(location) as file, pq.ParquetFile(file) as parquet:
        fields = parquet.schema_arrow
        chosen = columns if columns is not None else [f.name for f in fields if not _has_bytes(f.type)]
        table = parquet.read([name for name in fields.names if name in chosen])
    refuse_invalid_text(table, location)
    return table


def _parse_jsonl(file: BinaryIO) -> pa.Table:
    from pyarrow import json as arrow_json

    read = arrow_json.ReadOptions(block_size=_BLOCK_BYTES)
    table = arrow_json.read_json(file, read)
    texts = []  # columns of text that pyarrow took for dates, so that their spelling would be lost
    for field in table.schema:
        if pa.types.is_temporal(field.type):
            texts.append((field.name, pa.string()))
        elif pa.types.is_list(field.type) and pa.types.is_temporal(field.type.value_type):
            texts.append((field.name, pa.list_(pa.string())))
    if texts:
        file.seek(0)
        table = arrow_json.read_json(file, read, arrow_json.ParseOptions(explicit_schema=pa.schema(texts)))
    table.validate(full=True)  # the parser does not check that text is UTF-8
    return table


def _raise_bad_line(location: str) -> None:
    """For what pyarrow alone refuses: name the last line of the shortest beginning of the file that it refuses."""
    lines = [line for _, line in lines_of(location)]

    def refusal(count: int) -> str:
        try:
            _parse_jsonl(BytesIO(b"".join(lines[:count])))
        except pa.ArrowInvalid as error:
            return _arrow_message(error)
        return ""

    number = bisect_left(range(len(lines)), True, lo=1, key=lambda count: bool(refusal(count)))
    step = "write each key once, with values of one kind"
    raise line_error(location, number, f"can't be read ({refusal(number)})", step)


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_bytes(kind.value_type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _table_format(location: str, default: str | None) -> str:
    ending = os.path.splitext(location.partition("?")[0] if "://" in location else location)[1].lower()
    if ending in TABLE_EXTENSIONS:
        return ending[1:]
    if default is None:
        raise LatentpressError(
            f"{display_location(location)}: its format is unknown",
            f"valid endings: {', '.join(TABLE_EXTENSIONS)}; or caption_strategy",
        )
    return default


def _arrow_message(error: Exception) -> str:
    """pyarrow quotes the line that it can't read, which may hold URLs with secrets."""
    return scrub_secrets(str(error).partition("\n")[0])


def check_jsonl(location: str) -> None:
    """Raise LatentpressError that names the first line that is not UTF-8 or no JSON object, or where a column changes
    its type."""
    refuse_encoding(location)
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in decode_lines(location):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = "" if isinstance(row, dict) else f"is {_json_kind(row)}, not an object"
        except ValueError as error:
            problem = f"is no JSON ({error})"
        if problem:
            raise line_error(location, number, problem, "write one object a line")
        for name, value in row.items():
            if value is None:
                continue
            kind, since = kinds.setdefault(name, (_json_kind(value), number))
            if kind != _json_kind(value):
                problem = f"{name!r} is {_json_kind(value)} here and {kind} on line {since}"
                raise line_error(location, number, problem, "make every line of the column the same")


def _json_kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


# -- lines ------------------------------------------------------------------------------------------------------------


def open_location(location: str) -> BinaryIO:
    """A reader of a path or URL. Raises LatentpressError without secrets."""
    try:
        if "://" not in location:
            return open_regular(location)
        fs, path = open_filesystem(location)
        return fs.open(path, "rb")
    except LatentpressError:
        raise
    except Exception as error:  # each store's library has exceptions of its own
        raise not_opened(location, error) from None


def not_opened(location: str, error: Exception) -> LatentpressError:
    if isinstance(error, FileNotFoundError):
        step = BACKSLASH_ADVICE if "\\" in location else "correct the path in the configuration"
        return LatentpressError(f"{display_location(location)}: is not there", step)
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    reason = scrub_secrets(reason, location if "://" in location else "")
    step = "check the place and the right to read it, then run again"
    return LatentpressError(f"{display_location(location)}: can't be read ({reason})", step)


def line_error(location: str, line: int, problem: str, step: str) -> LatentpressError:
    return LatentpressError(f"{display_location(location)}, line {line}: {problem}", step)


def lines_of(location: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1, with their ends and without a byte order mark."""
    with open_location(location) as file:
        lines = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
        first = lines.readline().removeprefix(_BOM)
        yield from enumerate(chain([first], lines), 1)


def decode_lines(location: str) -> Iterator[tuple[int, str]]:
    """The same as text. Raises LatentpressError for a line that is not UTF-8."""
    for number, line in lines_of(location):
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            raise line_error(location, number, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from None


def refuse_encoding(location: str) -> None:
    """Raise LatentpressError for a text whose beginning shows that it is not UTF-8."""
    with open_location(location) as file:
        data = file.read(1024)
    utf_16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if utf_16 or b"\0" in data:
        encoding = "UTF-16" if utf_16 else "UTF-16 or no text (it holds zero bytes)"
        raise line_error(location, 1, f"is {encoding}, not UTF-8", "save it as UTF-8")


def detect_delimiter(location: str) -> str:
    """A comma, unless the header has none and exactly one of ; tab |. Raises LatentpressError if the header has none
    and several of these, or is not UTF-8."""
    refuse_encoding(location)
    header = next((line for _, line in decode_lines(location) if line.strip()), "")
    text = re.sub(r'"[^"]*("|$)', "", header)
    delimiters = [delimiter for delimiter in _DELIMITER_NAMES if delimiter in text]
    if "," in text or not delimiters:
        return ","
    if len(delimiters) > 1:
        named = " and ".join(_DELIMITER_NAMES[delimiter] for delimiter in delimiters)
        problem = f"the separator is ambiguous: the header has no comma, but {named}"
        raise line_error(location, 1, problem, "separate the cells by commas")
    return delimiters[0]


def has_quotes(location: str) -> bool:
    with open_location(location) as file:
        return any(b'"' in data for data in iter(lambda: file.read(MAX_CELL_BYTES), b""))


def check_csv_files(root: str) -> None:
    """Check a CSV file, or all in a folder, for a reader that knows only commas and merges rows behind a wrong quote:
    pandas, in the `datasets` library."""
    for file in list_files(root, (".csv",)):
        if (delimiter := detect_delimiter(file)) != ",":
            step = "separate them by commas, or use source: manifest, which takes the file as it is"
            raise line_error(file, 1, f"the cells are separated by {_DELIMITER_NAMES[delimiter]}", step)
        check_csv(file, delimiter)


def list_files(root: str, endings: tuple[str, ...]) -> list[str]:
    """A file, or all in a folder, with one of these endings."""
    files = [root] if os.path.isfile(root) else Path(root).rglob("*") if os.path.isdir(root) else []
    return sorted(str(path) for path in files if str(path).lower().endswith(endings))


def check_csv(location: str, delimiter: str) -> None:
    """Raise LatentpressError that names the first line whose quotes or number of cells are wrong."""
    csv.field_size_limit(MAX_CELL_BYTES)
    reader = csv.reader((line for _, line in decode_lines(location)), delimiter=delimiter, strict=True)
    start, count = 1, 0
    try:
        for row in reader:
            count = count or len(row)
            if row and len(row) != count:
                cells = f"{len(row)} cell{'' if len(row) == 1 else 's'}"
                content = scrub_secrets(shorten(_raw_lines(location, start, reader.line_num).strip(), 200))
                step = "put a cell that holds the separator into quotes, or correct the row"
                raise line_error(location, start, f"has {cells}, and the header has {count}: {content}", step)
            if reader.line_num > start and (line := _merged_line(row, delimiter)):
                problem = f"a quoted cell continues over line {start + line}, which is a row of its own"
                raise line_error(location, start, problem, f"close it; {_DOUBLE_QUOTES}")
            start = reader.line_num + 1
    except csv.Error as error:
        raise line_error(location, start, *_explain_quote(location, start, reader.line_num, str(error))) from None


def _merged_line(row: list[str], delimiter: str) -> int:
    """The line of a multi-line cell that looks like a row: as many cells, and a file name where this row has one; 0
    for none. Two rows that each lack a quote make one row that no reader refuses."""
    for cell in row:
        for number, line in enumerate(cell.split("\n")[1:], 1):
            cells = line.split(delimiter)
            endings = [(_FILE_NAME.fullmatch(a), _FILE_NAME.fullmatch(b)) for a, b in zip(cells, row, strict=False)]
            if len(cells) == len(row) and any(a and b and a[1] == b[1] for a, b in endings):
                return number
    return 0


def _explain_quote(location: str, start: int, line: int, message: str) -> tuple[str, str]:
    """The fault in the quotes of a row from line `start` to `line`, and what to do. message: the reader's."""
    close = f"close it; {_DOUBLE_QUOTES}"
    if "end of data" in message:
        return f"a quote is opened and not closed before the end, line {line}", close
    if "new-line" in message:
        return "it holds a carriage return", "save it with line ends of one kind"
    if "field limit" in message:
        return "a cell is longer than 16 MiB: a quote is opened and not closed", close
    if '\\"' in _raw_lines(location, start, line):
        return r"CSV has no \": the quote ends the cell", _DOUBLE_QUOTES
    if line > start:
        return f"a quote is opened and not closed before the next one, in line {line}", close
    return "there is text behind a closing quote", _DOUBLE_QUOTES


def _raw_lines(location: str, start: int, end: int) -> str:
    return b"".join(line for number, line in lines_of(location) if start <= number <= end).decode(errors="replace")
