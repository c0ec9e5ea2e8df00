"""Checks of values from files of unknown origin: of the right kind, of a sane size and safe to print, or ValueError."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.references import SOURCE_ROLES

MAX_NAME_CHARS = 200  # characters of an id or another name
MAX_DESCRIPTION_BYTES = 1 << 28  # of what is read at once; the description of a million rows has 200 MiB
MAX_SHOWN_CHARS = 300  # characters of a foreign value in a message
CHECKSUM_PATTERN = re.compile(r"[0-9a-f]{32}", re.ASCII)
MAX_PATH_NAME = 70  # characters
#: Of a name that becomes part of a path.
PATH_NAME_PATTERN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_PATH_NAME - 1}}}", re.ASCII)


def check_object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is no object")
    return value


def check_list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{what} is no list")
    return value


def check_text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{what} is no text")
    return value


def check_name(value: Any, what: str, empty: bool = False) -> str:
    """One printable line of at most MAX_NAME_CHARS characters, which can forge no message that quotes it."""
    if len(check_text(value, what)) > MAX_NAME_CHARS or not value.isprintable() or not (value or empty):
        raise ValueError(f"{what} is no name: {printable(repr(value[:MAX_NAME_CHARS]))}")
    return value


def check_path_name(value: Any, what: str) -> str:
    """A name of letters, digits, "-" and "_", which is safe as a part of a path."""
    if not PATH_NAME_PATTERN.fullmatch(check_text(value, what)):
        raise ValueError(f"{what} is no plain name: {printable(repr(value[:MAX_NAME_CHARS]))}")
    return value


def check_names(values: Any, what: str) -> list[str]:
    """A list of distinct names."""
    for value in check_list(values, what):
        check_name(value, f"one of {what}")
    if len(set(values)) != len(values):
        raise ValueError(f"{what}: a name appears twice")
    return values


def check_count(value: Any, what: str) -> int:
    """A whole number from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is no count: {printable(repr(value))}")
    return value


def check_checksum(value: Any, what: str) -> str:
    if type(value) is not str or not CHECKSUM_PATTERN.fullmatch(value):
        raise ValueError(f"{what} is no checksum")
    return value


def check_span(value: Any, what: str) -> tuple[int, int]:
    """Two counts."""
    if len(check_list(value, what)) != 2:
        raise ValueError(f"{what} is no pair of numbers")
    return check_count(value[0], what), check_count(value[1], what)


def check_shape(value: Sequence[Any]) -> tuple[int, ...]:
    """A tuple of whole numbers; `Array` checks that the shape fits its bytes."""
    if not isinstance(value, (list, tuple)) or not all(type(size) is int for size in value):
        raise ValueError(f"{printable(repr(value))} is no shape")
    return tuple(value)


def printable(value: object) -> str:
    """A foreign value, or an error that quotes one, as one short printable line for a message."""
    line = str(value)[:MAX_SHOWN_CHARS]
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def check_prompt_image(prompt: Mapping[str, Any]) -> None:
    """Check the image of the data that a validation prompt starts from, or its references, where it names any."""
    given = prompt.get("image", [])
    for value in given if isinstance(given, list) else [given]:
        image = check_object(value, "an image")
        for key in ("dataset", "path"):
            check_text(image[key], key)
        if image["role"] not in ("media", *SOURCE_ROLES):
            raise ValueError(f"{image['role']!r} is no role of an image")
        start = image.get("start")
        if start is not None and (isinstance(start, bool) or not isinstance(start, int | float)):
            raise ValueError(f"{start!r} is no time")
