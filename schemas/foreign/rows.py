"""How the configuration of another trainer is carried over: tables of rows "key there: option here, conversion", and
the draft of a configuration that is made with them.

A key in a table's rows is converted. A key in its `idle` set needs nothing. Any other key is not carried over, and
reported with its value, unless its value means "off".
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

from schemas.text_format import shorten

Outcome = Literal["carried over", "needs nothing", "not carried over", "secret"]
Path = tuple[str | int, ...]
#: (value there, the draft, whose `given` has all keys of the section) -> value here, `Several`, `Nearest` or NOTHING.
#: ValueError, TypeError and so on for a value that is not usable.
Convert = Callable[[Any, "Draft"], Any]
Rows = Mapping[str, tuple[str, Convert]]
#: What a value means that asks for nothing, or for what is always so here.
NOTHING = object()
UNUSABLE = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)
#: Names of keys whose values are never shown.
SECRET_NAME = re.compile(r"token$|secret|passw|api_?key|access_key|credential|webhook|publishing_config", re.IGNORECASE)
#: An address with a password, or with a signature.
SECRET_ADDRESS = re.compile(r"://[^/\s]*@|[?&][^=\s]*(sign|sig|token|key|secret|credential)[^=\s]*=", re.IGNORECASE)


@dataclass(frozen=True)
class Several:
    """Values of several options, by dotted path; options of a dataset are relative to it."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Nearest:
    """The nearest value that is valid here, or `Several`, for one that has no counterpart."""

    value: Any


@dataclass(frozen=True)
class Table:
    """The keys of a section. rows: in the order in which they are converted. idle: keys that need nothing, with
    spaces between. defaults: the
    other trainer's defaults that differ from ours, by its keys. fixed: what it always does, by our options."""

    rows: Rows
    idle: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


class Files(Protocol):
    """The files next to a configuration; paths are as written in it."""

    def read(self, path: str) -> Any:
        """The content of a file: parsed JSON, TOML or YAML, else its text; None if it is not found."""

    def count_media(self, datasets: Sequence[Mapping[str, Any]]) -> float | None:
        """Draws of an epoch, files x (repeats + 1); None if a folder can't be counted here."""


@dataclass(frozen=True)
class Trainer:
    """name: as people write it. tables: by section. claims: the role of a file by its content, "" for another trainer's
    file. carry: puts the files' content, by role, into a draft."""

    name: str
    tables: Mapping[str, Table]
    claims: Callable[[Any], str]
    carry: Callable[["Draft", Mapping[str, Any], Files], None]


@dataclass
class Line:
    """What became of a key. to: the option of its row. paths: the options that have a value of it. note: for people.
    default: the key is not in the file, and this is the other trainer's default."""

    key: str
    outcome: Outcome
    note: str = ""
    to: str = ""
    paths: list[Path] = field(default_factory=list)
    default: bool = False


@dataclass
class Draft:
    """values: of the configuration so far. given: the keys of the present section, with the other trainer's defaults.
    at: path of its dataset. samples: draws of an epoch, if all files could be counted."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    given: Mapping[str, Any] = field(default_factory=dict)
    at: Path = ()
    samples: float | None = None

    def get(self, dotted: str, default: Any = None) -> Any:
        here: Any = self.values
        for step in dotted.split("."):
            here = here.get(step) if isinstance(here, dict) else None
        return default if here is None else here

    def put(self, path: Path, value: Any) -> None:
        """Set a value; sections and items of lists that are missing are made."""
        if isinstance(value, str) and SECRET_ADDRESS.search(value):
            raise ValueError("a password or signature")
        here: Any = self.values
        for step, following in pairwise(path):
            if isinstance(here, list):
                while len(here) <= int(step):
                    here.append({})
                here = here[int(step)]
            else:
                here = here.setdefault(step, [] if isinstance(following, int) else {})
        here[path[-1]] = value

    def remove(self, path: Path) -> None:
        """Remove the value at `path`, and sections that are empty then."""
        above: list[Any] = [self.values]
        for step in path[:-1]:
            above.append(above[-1][step])
        for section, step in zip(reversed(above), reversed(path), strict=True):
            section.pop(step, None)
            if section:
                break

    def say(self, key: str, outcome: Outcome, note: str = "", *paths: Path) -> None:
        self.lines.append(Line(key, outcome, note, "", list(paths)))

    def assume(self, key: str, dotted: str, value: Any) -> None:
        """Set what the other trainer always does, unless the file says otherwise. key: in the comment."""
        path = self._path(dotted)
        if not any(path in line.paths for line in self.lines):
            self.put(path, value)
            self.lines.append(Line(key, "carried over", "", dotted, [path], default=True))

    def section(self, value: Any, name: str) -> dict[str, Any]:
        """A section of the file, with texts for keys; an empty one if it is of another kind, which is reported."""
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
        if value is not None:
            self.say(name, "not carried over", shown(value))
        return {}

    def sections(self, value: Any, name: str) -> list[dict[str, Any]]:
        """The sections of a list; items of another kind are reported."""
        if not isinstance(value, list):
            return [self.section(value, name)] if value else []
        return [self.section(item, f"{name} {number}") for number, item in enumerate(value, 1) if item is not None]

    def carry(
        self,
        table: Table,
        given: Mapping[str, Any],
        label: str = "",
        at: Path = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Carry over every key of a section. label: before its keys in the report. at: the dataset's path. defaults: in
        place of the table's."""
        there = {key: value for key, value in given.items() if value is not None and value not in ("", [], {})}
        usual = table.defaults if defaults is None else defaults
        self.given, self.at = {**usual, **there}, at
        for key, row in table.rows.items():
            if key in there:
                if not self._convert(label + key, row, there[key]) and key in usual:
                    self._convert(label + key, row, usual[key], default=True)
            elif key in usual:
                self._convert(label + key, row, usual[key], default=True)
        for key, value in given.items():
            if key not in there or key not in table.rows:
                self._leave(table, key, value, label)
        for dotted, value in table.fixed.items():
            self.assume(f"{label}always", dotted, value)

    def _leave(self, table: Table, key: str, value: Any, label: str) -> None:
        """Report a key without a row, or without a value."""
        if key.startswith("("):  # "(program)" is not of the file
            return
        if SECRET_NAME.search(key):
            self.say(label + key, "secret", "secrets stay in the environment")
        elif key in table.idle.split() or is_off(value):
            self.say(label + key, "needs nothing")
        else:
            self.say(label + key, "not carried over", shown(value))

    def _convert(self, name: str, row: tuple[str, Convert], value: Any, default: bool = False) -> bool:
        """Whether the value is usable."""
        to, convert = row
        try:
            result = convert(value, self)
            nearest = isinstance(result, Nearest)
            result = result.value if isinstance(result, Nearest) else result
            several = {} if result is NOTHING else result.values if isinstance(result, Several) else {to: result}
            paths = []
            for dotted, item in several.items():
                paths.append(path := self._path(dotted))
                self.put(path, item)
        except UNUSABLE:
            if not default:
                self.lines.append(Line(name, "not carried over", shown(value), to))
            return False
        if paths or not default:
            note = f"nearest to {shown(value)}" if nearest else ""
            self.lines.append(Line(name, "carried over" if paths else "needs nothing", note, to, paths, default))
        return True

    def _path(self, dotted: str) -> Path:
        """The path of an option: below the dataset that is carried over, unless it is an option of training."""
        return (*(() if dotted.startswith("train.") else self.at), *dotted.split("."))

    def take_back(self, path: Path, outcome: Outcome, note: str) -> Iterator[Line]:
        """Remove what stands at `path` or below, which is not valid; yields the lines of its keys."""
        for line in self.lines:
            hit = [ours for ours in line.paths if ours[: len(path)] == path or path[: len(ours)] == ours]
            if hit:
                for ours in hit:
                    self.remove(ours)
                line.paths = [ours for ours in line.paths if ours not in hit]
                if not line.paths:
                    line.outcome, line.note = "needs nothing" if line.default else outcome, note
                yield line


def is_off(value: Any) -> bool:
    """Whether a value means "off" in every trainer."""
    return value in (None, 0, "", "0", "0.0", "false", "False", "none", "None", "no", [], {})


def shown(value: Any) -> str:
    """A value for a message, shortened and without secrets."""
    word = ("true" if value else "false") if isinstance(value, bool) else str(value)
    return "a secret" if SECRET_ADDRESS.search(word) else shorten(word)
