"""Reading a table line by line, and checks that pyarrow's CSV reader lacks: the separator of a file, and rows that a
wrong quote merges into a cell.

When pyarrow can't read a table it seldom says where the fault is, so the file is then read again line by line. Python's
own CSV reader is strict and counts lines, but takes about a second for a million rows: it reads only files with quotes
and those that pyarrow refused.
"""

import csv
import io
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from schemas.errors import LatentpressError
from schemas.regular_files import open_regular
from schemas.text_format import shorten
from stages.discovery.sources.urls import display_location, open_filesystem, scrub_secrets
from stages.discovery.sources.walk import BACKSLASH_ADVICE

MAX_CELL_BYTES = 1 << 24
_DELIMITER_NAMES = {";": "';'", "\t": "tab", "|": "'|'"}
_DOUBLE_QUOTES = 'write a quote within quotes as ""'
_BOM = b"\xef\xbb\xbf"
_FILE_NAME = re.compile(r"\S+(\.[A-Za-z0-9]{2,5})")


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
