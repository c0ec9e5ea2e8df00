"""Opening tables wherever they lie, and saying where one is broken: the file, the line, what to do.

The readers of pyarrow say that something is wrong, seldom where. So when one has failed, the file is read again line
by line: slow, and only then.
"""

import io
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO

from schemas.errors import LatentpressError
from stages.sources.urls import scrub, shown

_BOM = b"\xef\xbb\xbf"


def open_location(location: str) -> BinaryIO:
    """A reader of a path or URL. Raises LatentpressError without secrets."""
    try:
        if "://" not in location:
            return open(location, "rb")
        from stages.sources.objects import filesystem

        fs, path = filesystem(location)
        return fs.open(path, "rb")
    except LatentpressError:
        raise
    except Exception as error:  # every store's library has its own; all of them become this one
        raise not_opened(location, error) from None


def not_opened(location: str, error: Exception) -> LatentpressError:
    if isinstance(error, FileNotFoundError):
        return LatentpressError(f"{shown(location)}: is not there", "correct the path in the configuration")
    said = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    return LatentpressError(
        f"{shown(location)}: can't be read ({scrub(said, location if '://' in location else '')})",
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
        raise LatentpressError(f"{shown(location)}, line 1: is {what}, not UTF-8", "save it as UTF-8")


def raise_not_utf8(location: str) -> None:
    for number, line in lines_of(location):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            message = f"{shown(location)}, line {number}: is not UTF-8 (byte {error.start})"
            raise LatentpressError(message, "save it as UTF-8") from None


def raise_bad_json(location: str) -> None:
    """Name the first line that is no UTF-8, no JSON object, or where a column changes its kind."""
    refuse_encoding(location)
    raise_not_utf8(location)
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in lines_of(location):
        if not line.strip():
            continue
        where = f"{shown(location)}, line {number}"
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
