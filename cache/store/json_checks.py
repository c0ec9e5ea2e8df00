"""Checks of values from files of unknown origin: their type, size and printable characters. Functions check single
values and raise ValueError. `Foreign` is the base class of models of JSON objects, and `Stored` of models of JSON files
in a store.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, StringConstraints, ValidationError

from schemas.family import SOURCE_ROLES
from schemas.json_records import Record

MAX_NAME_CHARS = 200  # characters of an id or another name
MAX_DESCRIPTION_BYTES = 1 << 28  # limit for JSON that is read at once; the description of a million rows has 200 MiB
MAX_SHOWN_CHARS = 300  # characters of a foreign value in a message
MAX_PATH_NAME = 70  # characters
#: Limit for a name that becomes part of a path.
PATH_NAME_PATTERN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_PATH_NAME - 1}}}", re.ASCII)


def check_object(value: Any, label: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{label} is not an object")
    return value


def check_list(value: Any, label: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{label} is not a list")
    return value


def check_text(value: Any, label: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{label} is not a text")
    return value


def check_name(value: Any, label: str, empty: bool = False) -> str:
    """Return `value` if it is one printable line of at most MAX_NAME_CHARS characters, so that messages may quote
    it."""
    if len(check_text(value, label)) > MAX_NAME_CHARS or not value.isprintable() or not (value or empty):
        raise ValueError(f"{label} is not a name: {printable(repr(value[:MAX_NAME_CHARS]))}")
    return value


def check_count(value: Any, label: str) -> int:
    """Return `value` if it is an integer from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{label} is not a count: {printable(repr(value))}")
    return value


def check_shape(value: Sequence[Any]) -> tuple[int, ...]:
    """Return a tuple of integers; `Array` checks that the shape fits its bytes."""
    if not isinstance(value, (list, tuple)) or not all(type(size) is int for size in value):
        raise ValueError(f"{printable(repr(value))} is not a shape")
    return tuple(value)


def printable(value: object) -> str:
    """Return a foreign value, or an error that quotes one, in the form of one short printable line for a message."""
    if isinstance(value, ValidationError):
        first = value.errors(include_url=False, include_input=False, include_context=False)[0]
        value = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    line = str(value)[:MAX_SHOWN_CHARS]
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _check_distinct(values: list[str]) -> list[str]:
    if len(set(values)) != len(values):
        raise ValueError("a name appears twice")
    return values


Name = Annotated[str, Strict(), AfterValidator(lambda value: check_name(value, "it"))]
EmptyName = Annotated[str, Strict(), AfterValidator(lambda value: check_name(value, "it", empty=True))]
Names = Annotated[list[Name], AfterValidator(_check_distinct)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Span = Annotated[list[Count], Field(min_length=2, max_length=2)]
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$", max_length=32)]


class Foreign(BaseModel):
    """An object in a file. Values are not converted; keys that the model does not have are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    def values(self) -> dict[str, Any]:
        """Return the values that were set, in the form in which they are written."""
        return self.model_dump(mode="json", exclude_unset=True)


class Stored(Foreign, Record):
    """The content of a JSON file of a store. Values that were not set are not written."""

    def values(self) -> dict[str, Any]:
        return super().values() | ({} if self.version is None else {"format_version": self.version})


class PromptImage(Foreign):
    """An image of the data that a validation prompt starts from, or one of its references."""

    dataset: str
    path: str
    role: Literal["media", *SOURCE_ROLES]  # type: ignore[valid-type]
    start: float | None = None


class ImagedPrompt(Foreign):
    """A validation prompt, which may have images."""

    image: PromptImage | list[PromptImage] | None = None
