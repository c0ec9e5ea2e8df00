"""Opening a table line by line, and what pyarrow's CSV reader passes over: which separator a file has, and rows that a
wrong quote takes into a cell.

The readers of pyarrow say that something is wrong, seldom where. So when one has failed, the file is read again line
by line. Python's own CSV reader is strict and counts lines, and takes about a second for a million rows: it looks at
files that hold quotes, and at those that pyarrow refused.
"""

import csv
import io
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NoReturn

from schemas.errors import LatentpressError
from schemas.text_format import shorten
from stages.discovery.sources.urls import display_location, scrub_secrets

MAX_CELL_BYTES = 1 << 24
_DELIMITER_NAMES = {";": "';'", "\t": "tab", "|": "'|'"}
_QUOTING_ADVICE = 'close it; write a quote within quotes as ""'
_BOM = b"\xef\xbb\xbf"
_FILE_NAME = re.compile(r"\S+(\.[A-Za-z0-9]{2,5})")


def open_location(location: str) -> BinaryIO:
    """A reader of a path or URL. Raises LatentpressError without secrets."""
    try:
        if "://" not in location:
            return open(location, "rb")
        from stages.discovery.sources.object_store import open_filesystem

        fs, path = open_filesystem(location)
        return fs.open(path, "rb")
    except LatentpressError:
        raise
    except Exception as error:  # every store's library has its own; all of them become this one
        raise not_opened(location, error) from None


def not_opened(location: str, error: Exception) -> LatentpressError:
    if isinstance(error, FileNotFoundError):
        return LatentpressError(f"{display_location(location)}: is not there", "correct the path in the configuration")
    said = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    return LatentpressError(
        f"{display_location(location)}: can't be read ({scrub_secrets(said, location if '://' in location else '')})",
        "check the place and the right to read it, then run again",
    )


def lines_of(location: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1, with their ends and without a byte order mark."""
    with open_location(location) as file:
        lines = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
        first = lines.readline().removeprefix(_BOM)
        yield from enumerate(chain([first], lines), 1)


def refuse_encoding(location: str) -> None:
    """Raise LatentpressError for a text whose beginning shows that it is not UTF-8."""
    with open_location(location) as file:
        data = file.read(1024)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        what = "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "UTF-16 or no text (it holds zero bytes)"
        raise LatentpressError(f"{display_location(location)}, line 1: is {what}, not UTF-8", "save it as UTF-8")


def raise_not_utf8(location: str) -> None:
    for number, line in lines_of(location):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            message = f"{display_location(location)}, line {number}: is not UTF-8 (byte {error.start})"
            raise LatentpressError(message, "save it as UTF-8") from None


def detect_delimiter(location: str) -> str:
    """A comma, unless the header has none and one of ; tab | alone. Raises LatentpressError for no UTF-8 text, and for
    a header from which it can't be told."""
    refuse_encoding(location)
    header = next((line for _, line in lines_of(location) if line.strip()), b"")
    try:
        text = re.sub(r'"[^"]*("|$)', "", header.decode())
    except UnicodeDecodeError:
        raise_not_utf8(location)
        raise
    found = [delimiter for delimiter in _DELIMITER_NAMES if delimiter in text]
    if "," in text or not found:
        return ","
    if len(found) > 1:
        named = " and ".join(_DELIMITER_NAMES[delimiter] for delimiter in found)
        raise LatentpressError(
            f"{display_location(location)}, line 1: the separator can't be told: the header has no comma, but {named}",
            "separate the cells by commas",
        )
    return found[0]


def has_quotes(location: str) -> bool:
    with open_location(location) as file:
        while data := file.read(MAX_CELL_BYTES):
            if b'"' in data:
                return True
    return False


def check_csv_files(root: str) -> None:
    """Check a CSV file, or all in a folder, for a reader that takes commas alone, and rows behind a wrong quote into a
    cell: pandas, in the `datasets` library."""
    files = [root] if os.path.isfile(root) else Path(root).rglob("*") if os.path.isdir(root) else []
    for file in sorted(str(path) for path in files if str(path).lower().endswith(".csv")):
        if (delimiter := detect_delimiter(file)) != ",":
            step = "separate them by commas, or use source: manifest, which takes the file as it is"
            raise LatentpressError(f"{file}, line 1: the cells are separated by {_DELIMITER_NAMES[delimiter]}", step)
        check_csv(file, delimiter)


def check_csv(location: str, delimiter: str) -> None:
    """Raise LatentpressError that names the first line whose quotes or number of cells are wrong."""
    csv.field_size_limit(MAX_CELL_BYTES)
    reader = csv.reader(_decoded_lines(location), delimiter=delimiter, strict=True)
    start, count = 1, 0
    try:
        for row in reader:
            count = count or len(row)
            if row and len(row) != count:
                _raise_ragged(location, start, reader.line_num, len(row), count)
            if reader.line_num > start and (line := _swallowed_line(row, delimiter)):
                _raise_at_line(
                    location,
                    start,
                    f"a quoted cell goes on over line {start + line}, a row of its own",
                    _QUOTING_ADVICE,
                )
            start = reader.line_num + 1
    except csv.Error as error:
        _raise_bad_quote(location, start, reader.line_num, str(error))


def _decoded_lines(location: str) -> Iterator[str]:
    for _, line in lines_of(location):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise_not_utf8(location)


def _swallowed_line(row: list[str], delimiter: str) -> int:
    """Which line of a cell with several looks like a row: as many cells, and a file's name where this row has one; 0
    for none. Two rows that each lack a quote make one row that no reader can object to."""
    for cell in row:
        for number, line in enumerate(cell.split("\n")[1:], 1):
            cells = line.split(delimiter)
            endings = [(_FILE_NAME.fullmatch(a), _FILE_NAME.fullmatch(b)) for a, b in zip(cells, row, strict=False)]
            if len(cells) == len(row) and any(a and b and a[1] == b[1] for a, b in endings):
                return number
    return 0


def _raise_ragged(location: str, start: int, end: int, found: int, count: int) -> NoReturn:
    cells = f"{found} cell{'' if found == 1 else 's'}"
    said = scrub_secrets(shorten(_raw_lines(location, start, end).strip(), 200))
    step = "put a cell that holds the separator into quotes, or correct the row"
    _raise_at_line(location, start, f"has {cells}, and the header has {count}: {said}", step)


def _raise_bad_quote(location: str, start: int, line: int, said: str) -> NoReturn:
    if "end of data" in said:
        _raise_at_line(
            location, start, f"a quote is opened and not closed before the end, line {line}", _QUOTING_ADVICE
        )
    if "new-line" in said:
        _raise_at_line(location, start, "a carriage return stands within it", "save it with line ends of one kind")
    if "field limit" in said:
        _raise_at_line(
            location, start, "a cell is longer than 16 MiB: a quote is opened and not closed", _QUOTING_ADVICE
        )
    if '\\"' in _raw_lines(location, start, line):
        _raise_at_line(
            location, start, r"CSV knows no \": the quote ends the cell", 'write a quote within quotes as ""'
        )
    if line > start:
        _raise_at_line(
            location, start, f"a quote is opened and not closed before the next one, in line {line}", _QUOTING_ADVICE
        )
    _raise_at_line(location, start, "text stands behind a closing quote", 'write a quote within quotes as ""')


def _raw_lines(location: str, start: int, end: int) -> str:
    return b"".join(line for number, line in lines_of(location) if start <= number <= end).decode(errors="replace")


def _raise_at_line(location: str, line: int, reason: str, step: str) -> NoReturn:
    raise LatentpressError(f"{display_location(location)}, line {line}: {reason}", step)
