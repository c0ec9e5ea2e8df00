"""What becomes of the keys of other trainers' configurations: a table for each of their sections, a row for each key.

`latentpress import-config`, the hints in errors of the configuration, and the tables of docs/coming-from.md all read
these rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: (value of the key, the Draft, whose `given` are all keys of the section) -> our value, or `Several`. Raises Refused
#: or NotNeeded for a value that is not carried over.
Convert = Callable[[Any, Any], Any]


class Refused(ValueError):
    """A value that has no counterpart; the reason, and the nearest thing."""


class NotNeeded(ValueError):
    """A value that asks for nothing, or for what is always so."""


@dataclass(frozen=True)
class Several:
    """Values of several keys, by dotted path as of `Row.to`."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Of a key that is carried over, `to` is ours, as a dotted path; in tables of datasets it is a key of a dataset.
    drop, refuse, secret: why a key is not carried over, and the nearest thing. note: how the value differs."""

    to: str = ""
    convert: Convert = field(default=lambda value, draft: value)
    note: str = ""
    drop: str = ""
    refuse: str = ""
    secret: str = ""

    def describe(self, above: str = "") -> str:
        """For people: "here train.steps; counted in optimizer steps". above: the section of `to`."""
        if self.drop:
            return f"not needed: {self.drop}"
        if self.refuse:
            return f"not possible: {self.refuse}"
        if self.secret:
            return f"never copied: {self.secret}"
        return f"here {above}{self.to}{f': {self.note}' if self.note else ''}"


Table = Mapping[str, Row]


@dataclass(frozen=True)
class Section:
    """A section of a trainer's configuration. title: as in docs. in_dataset: its rows name keys of a dataset. defaults:
    the trainer's own, where they differ from ours: a section without the key means this value."""

    title: str
    rows: Table
    defaults: Mapping[str, Any] = field(default_factory=dict)
    in_dataset: bool = False


def dropped(reason: str, *keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys, Row(drop=reason))


def refused(reason: str, *keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys, Row(refuse=reason))


def secret(instead: str, *keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys, Row(secret=instead))
