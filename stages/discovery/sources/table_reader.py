"""Tables of captions and paths: CSV, JSON lines and Parquet, at a path or a URL, read as columns.

A table that can't be read completely is an error that names the file and the line, because with half a table, half the
training set would be missing unnoticed. All text is `string`, for any text type of the file; empty cells of CSV are
null.

CSV and JSON lines are read by Python's readers, which are strict and count lines; a million rows take seconds.
pyarrow's readers seldom report the line of an error, and merge the rows after a wrong quote into a cell.
"""

import csv
import io
import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import LatentpressError
from schemas.json_records import parse_json
from schemas.regular_files import open_regular
from schemas.text_format import shorten
from stages.discovery.sources.columns import (
    CHUNK_ROWS,
    is_scalar,
    refuse_invalid_text,
    require_columns,
    simplify_column,
)
from stages.discovery.sources.urls import display_location, open_filesystem, scrub_secrets

TABLE_EXTENSIONS = (".csv", ".jsonl", ".parquet")
#: If no media column is configured, the first of these columns that a table has is used.
USUAL_MEDIA_COLUMNS = ("file_name", "path", "file", "image", "video", "filename", "url")

_text = pa.string()
MAX_DEPTH = 100  # nested arrays and objects in JSON
#: Cells that, like empty cells, mean "no value" in a column of numbers.
_NULL_NUMBERS = pa.array(["NA", "N/A", "n/a", "null", "NULL", "None", "-"])
MAX_CELL_BYTES = 1 << 24
_FILE_NAME = re.compile(r"\S+(\.[A-Za-z0-9]{2,5})")
_BOM = b"\xef\xbb\xbf"


def read_table(location: str, text: Sequence[str] = (), kind: str | None = None) -> pa.Table:
    """The table at a path or fsspec URL, in the order of its rows.

    Columns of bytes are null. text: columns that stay text even if all their cells look like numbers (file names).
    kind: "csv", "jsonl" or "parquet", for a location without such an extension. Raises LatentpressError.
    """
    kind = _table_format(location, kind)
    try:
        if kind == "csv":
            table = _read_csv(location, text)
        else:
            table = _read_jsonl(location) if kind == "jsonl" else _read_parquet(location)
    except pa.ArrowInvalid as error:
        message = scrub_secrets(str(error).partition("\n")[0])
        problem = f"{display_location(location)}: can't be read as {kind} ({message})"
        raise LatentpressError(problem, "correct the table, or write it again") from None
    except OSError as error:
        raise not_opened(location, error) from None
    columns = {name: simplify_column(table.column(name)) for name in table.column_names}
    for name in (name for name in text if name in columns and is_scalar(columns[name].type)):
        columns[name] = columns[name].cast(_text)
    return pa.table(columns).combine_chunks()  # taking rows is fast in one chunk


def find_media_column(table: pa.Table, configured: str | None, location: str) -> str:
    """The media column: the configured column, else the first of USUAL_MEDIA_COLUMNS, columns of scalars preferred.
    Raises LatentpressError."""
    present = [name for name in USUAL_MEDIA_COLUMNS if name in table.column_names]
    texts = [name for name in present if is_scalar(table.schema.field(name).type)]
    name = configured or next(iter([*texts, *present]), None)
    if name is None:
        raise LatentpressError(
            f"{display_location(location)}: the table has no column named {', '.join(USUAL_MEDIA_COLUMNS)}; its "
            f"columns: {', '.join(table.column_names)}",
            "set media_column to the column of the media files",
        )
    require_names(table, name, "media_column", location)
    return name


def require_names(table: pa.Table, name: str, option: str, location: str) -> None:
    """Raise LatentpressError unless the column `name`, set by `option`, contains file names."""
    require_columns(table.column_names, [name], option, location)
    kind = table.schema.field(name).type
    if not pa.types.is_string(kind) and not pa.types.is_null(kind):
        raise LatentpressError(
            f"{display_location(location)}: column {name!r} contains {kind}, not file names",
            f"set {option} to another column; for a table that contains the files, set source: huggingface",
        )


# -- formats ---------------------------------------------------------------------------------------------------------


def _read_csv(location: str, text: Sequence[str]) -> pa.Table:
    """Read a CSV file. A column's type is inferred from all its cells, unless it is in `text`; empty cells are null."""
    rows = csv_rows(location, detect_delimiter(location))
    names = next(rows, None)
    if names is None:
        raise LatentpressError(f"{display_location(location)}: is empty", "write a header and rows into it")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        problem = f"{display_location(location)}: two columns are named {repeated[0]!r}"
        raise LatentpressError(problem, "rename one of them")
    chunks: dict[str, list[pa.Array]] = {name: [] for name in names}
    while part := list(islice(rows, CHUNK_ROWS)):
        for name, cells in zip(names, zip(*part, strict=True), strict=True):
            chunks[name].append(pa.array([cell or None for cell in cells], _text))
    table = {name: pa.chunked_array(arrays, _text) for name, arrays in chunks.items()}
    return pa.table({name: column if name in text else _infer_type(column) for name, column in table.items()})


def _infer_type(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a CSV column to int64, float64 or bool if all its cells can be converted; else it stays text."""
    sample = _clean_numbers(column.slice(0, 64))
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            sample.cast(kind)  # first, so that a long column of captions fails fast
            converted = _clean_numbers(column).cast(kind)
        except pa.ArrowInvalid:
            continue
        return converted if converted.null_count < len(converted) else column
    return column


def _clean_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The trimmed cells; cells that mean "no value" become null."""
    trimmed = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.is_in(trimmed, value_set=_NULL_NUMBERS), None, trimmed)


def csv_rows(location: str, delimiter: str) -> Iterator[list[str]]:
    """The rows of a CSV file, starting with the header. Raises LatentpressError that names the first line with wrong
    quotes or a wrong number of cells."""
    csv.field_size_limit(MAX_CELL_BYTES)
    reader = csv.reader((line for _, line in decode_lines(location)), delimiter=delimiter, strict=True)
    start, count = 1, 0
    try:
        for row in reader:
            count = count or len(row)
            if row and len(row) != count:
                cells = f"{len(row)} cell{'' if len(row) == 1 else 's'}"
                content = scrub_secrets(shorten(delimiter.join(row), 200))
                step = "put a cell that contains the separator into quotes, or correct the row"
                raise line_error(location, start, f"has {cells}, but the header has {count}: {content}", step)
            if reader.line_num > start and (line := _merged_line(row, delimiter)):
                problem = f"a quoted cell continues over line {start + line}, which looks like a separate row"
                raise line_error(location, start, problem, 'close the cell; write a quote within quotes as ""')
            if row:
                yield row
            start = reader.line_num + 1
    except csv.Error as error:
        problem = f"a quote is wrong between this line and line {reader.line_num} ({error})"
        step = 'close each quote, write a quote within quotes as "", and save the file with line ends of one kind'
        raise line_error(location, start, problem, step) from None


def _merged_line(row: list[str], delimiter: str) -> int:
    """The number of the line in a multi-line cell that looks like a row; 0 if no line does. Such a line has as
    many cells as the row, and in the same column a file name with the same extension. This finds two rows that each
    lack a quote; together they are one valid row for every reader."""
    for cell in row:
        for number, line in enumerate(cell.split("\n")[1:], 1):
            cells = line.split(delimiter)
            endings = [(_FILE_NAME.fullmatch(a), _FILE_NAME.fullmatch(b)) for a, b in zip(cells, row, strict=False)]
            if len(cells) == len(row) and any(a and b and a[1] == b[1] for a, b in endings):
                return number
    return 0


def _read_jsonl(location: str) -> pa.Table:
    rows, parts = jsonl_rows(location), [pa.table({})]
    while part := list(islice(rows, CHUNK_ROWS)):
        parts.append(record_table(part))
    return pa.concat_tables(parts, promote_options="permissive")


def jsonl_rows(location: str) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines. Raises LatentpressError that names the first line that is not UTF-8, is not
    a JSON object, or changes the type of a column."""
    refuse_encoding(location)
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in decode_lines(location):
        if not line.strip():
            continue
        try:
            row = parse_json(line.encode())
            problem = "" if isinstance(row, dict) else f"is {_json_kind(row)}, not an object"
        except ValueError as error:
            problem = f"is not JSON ({error})"
        if problem:
            raise line_error(location, number, problem, "write one object per line")
        for name, value in row.items():
            if value is None:
                continue
            kind, since = kinds.setdefault(name, (_json_kind(value), number))
            if kind != _json_kind(value):
                problem = f"{name!r} is {_json_kind(value)} in this line and {kind} in line {since}"
                raise line_error(location, number, problem, "use the same type in every line")
        yield row


def _json_kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def record_table(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Convert JSON objects to columns of numbers, booleans, texts or lists of texts. A field with several scalar types
    becomes text; a field with other lists or objects becomes an empty struct."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record.get(name) for record in records] for name in names}
    return pa.table({replace_surrogates(name): _record_column(values[name]) for name in names})


def _record_column(values: list[Any]) -> pa.Array:
    types = {type(value) for value in values} - {type(None)}
    if types and types <= {int, float}:
        is_int64 = types == {int} and all(value is None or -(1 << 63) <= value < 1 << 63 for value in values)
        return pa.array([None if v is None else v if is_int64 else float(v) for v in values])
    if types == {bool}:
        return pa.array(values)
    if types == {list} and all(text is None or isinstance(text, str) for row in values for text in row or ()):
        texts = [row and [text and replace_surrogates(text) for text in row] for row in values]
        return pa.array(texts, pa.list_(_text))
    if types & {list, dict}:
        return pa.nulls(len(values), pa.struct([]))
    texts = [None if v is None else replace_surrogates(v) if isinstance(v, str) else json.dumps(v) for v in values]
    return pa.array(texts, _text)


def replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which are valid in JSON but not in UTF-8, by "?"."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _read_parquet(location: str) -> pa.Table:
    import pyarrow.parquet as pq

    with open_location(location) as file, pq.ParquetFile(file) as parquet:
        has_bytes = {field.name: _has_bytes(field.type) for field in parquet.schema_arrow}
        table = parquet.read([name for name, is_binary in has_bytes.items() if not is_binary])
    refuse_invalid_text(table, location)
    for name in (name for name, is_binary in has_bytes.items() if is_binary):  # only their names are read
        table = table.append_column(name, pa.nulls(len(table), pa.binary()))
    return table


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
            f"use a file with the ending {', '.join(TABLE_EXTENSIONS)}, or set caption_strategy",
        )
    return default


# -- files of the `datasets` library ---------------------------------------------------------------------------------


def check_for_datasets(root: str) -> None:
    """Check a CSV or JSON file, or all of them in a folder, before the `datasets` library reads it. pandas assumes
    commas and merges the rows after a wrong quote, and pyarrow crashes if values are deeply nested."""
    for file in list_files(root, (".csv",)):
        if (delimiter := detect_delimiter(file)) != ",":
            step = "separate them by commas, or use source: manifest, which reads the file unchanged"
            raise line_error(file, 1, f"the cells are separated by {delimiter!r}", step)
        deque(csv_rows(file, delimiter), 0)
    for file in list_files(root, (".jsonl",)):
        deque(jsonl_rows(file), 0)
    for file in list_files(root, (".json",)):
        _refuse_depth(file)


def list_files(root: str, endings: tuple[str, ...]) -> list[str]:
    """Paths of `root`, or of all files below it if it is a folder, that have one of these endings."""
    files = [root] if os.path.isfile(root) else Path(root).rglob("*") if os.path.isdir(root) else []
    return sorted(str(path) for path in files if str(path).lower().endswith(endings))


def _refuse_depth(location: str) -> None:
    """Raise LatentpressError that names the first line with values nested more than MAX_DEPTH levels deep. pyarrow
    crashes at 3,000 levels and stalls at 8,000, on one line or on several."""
    depth = 0
    for number, line in lines_of(location):
        for match in re.finditer(rb'"(?:[^"\\]|\\.)*"|[\[{\]}]', line):
            depth = max(0, depth + (match[0] in b"[{") - (match[0] in b"]}"))  # ignore surplus closing brackets
            if depth > MAX_DEPTH:
                problem = f"is nested more than {MAX_DEPTH} levels deep"
                raise line_error(location, number, problem, "remove the deeply nested values from the table")


# -- lines ------------------------------------------------------------------------------------------------------------


def open_location(location: str) -> BinaryIO:
    """A binary reader of a path or URL. Raises LatentpressError; its message contains no secrets."""
    try:
        if "://" not in location:
            return open_regular(location)
        fs, path = open_filesystem(location)
        return fs.open(path, "rb")
    except LatentpressError:
        raise
    except Exception as error:  # each store's library has its own exceptions
        raise not_opened(location, error) from None


def not_opened(location: str, error: Exception) -> LatentpressError:
    if isinstance(error, FileNotFoundError):
        return LatentpressError(f"{display_location(location)}: does not exist", "correct its path")
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    reason = scrub_secrets(reason, location if "://" in location else "")
    step = "check the place and its permissions, then run again"
    return LatentpressError(f"{display_location(location)}: can't be read ({reason})", step)


def line_error(location: str, line: int, problem: str, step: str) -> LatentpressError:
    return LatentpressError(f"{display_location(location)}, line {line}: {problem}", step)


def lines_of(location: str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) for the lines of a file, with line ends and without a byte order mark."""
    with open_location(location) as file:
        lines = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
        first = lines.readline().removeprefix(_BOM)
        yield from enumerate(chain([first], lines), 1)


def decode_lines(location: str) -> Iterator[tuple[int, str]]:
    """(number from 1, text) for the lines of a file. Raises LatentpressError for a line that is not UTF-8."""
    for number, line in lines_of(location):
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            raise line_error(location, number, f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from None


def refuse_encoding(location: str) -> None:
    """Raise LatentpressError if the first 1,024 bytes of a file show that it is not UTF-8."""
    with open_location(location) as file:
        data = file.read(1024)
    utf_16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if utf_16 or b"\0" in data:
        encoding = "UTF-16" if utf_16 else "UTF-16, or not text (it contains zero bytes)"
        raise line_error(location, 1, f"is {encoding}, not UTF-8", "save it as UTF-8")


def detect_delimiter(location: str) -> str:
    """The first of comma, semicolon, tab and | that the header contains, else a comma. Raises LatentpressError if the
    file is not UTF-8."""
    refuse_encoding(location)
    header = next((line for _, line in decode_lines(location) if line.strip()), "")
    text = re.sub(r'"[^"]*("|$)', "", header)
    return next((delimiter for delimiter in ",;\t|" if delimiter in text), ",")
