"""How the configuration of another trainer is carried over: tables of rows "key there: option here, conversion", and
the draft of a configuration that is made with them.

A key in a table's rows is converted. A key that its `idle` patterns match needs nothing. Any other key is not carried
over, and reported with its value, unless its value means "off".
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from schemas.config.yaml_editor import nest
from schemas.config.yaml_reader import KeyPath
from schemas.text_format import shorten
from stages.importing.files import WINDOWS_PATH, Beside

Outcome = Literal["carried over", "needs nothing", "not carried over", "secret"]
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


def below(section: str, **values: Any) -> Several:
    return Several({f"{section}.{key}": value for key, value in values.items()})


@dataclass(frozen=True)
class Nearest:
    """The nearest value that is valid here, or `Several`, for one that has no counterpart."""

    value: Any


@dataclass(frozen=True)
class Table:
    """The keys of a section. rows: in the order in which they are converted. idle: patterns of keys that need nothing,
    with spaces between. defaults: the other trainer's defaults that differ from ours, by its keys. fixed: what it
    always does, by our options."""

    rows: Rows
    idle: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def is_idle(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.idle.split())


@dataclass(frozen=True)
class Trainer:
    """name: as people write it. tables: by section. claims: the role of a file by its content, "" for another trainer's
    file. carry: puts the files' content, by role, into a draft."""

    name: str
    tables: Mapping[str, Table]
    claims: Callable[[Any], str]
    carry: Callable[["Draft", Mapping[str, Any]], None]


@dataclass
class Line:
    """What became of a key. to: the option of its row. paths: the options that have a value of it. note: for people.
    default: the key is not in the file, and this is the other trainer's default."""

    key: str
    outcome: Outcome
    note: str = ""
    to: str = ""
    paths: list[KeyPath] = field(default_factory=list)
    default: bool = False


@dataclass
class Draft:
    """A configuration while it is converted.

    files: files next to the other trainer's configuration. values: values of the new configuration. given: keys of the
    present section, with the other trainer's defaults. at: path of the section's dataset in the new configuration.
    samples: number of samples in an epoch, if all files could be counted. parts: number of the other trainer's steps
    that are one step here.
    """

    files: Beside
    values: dict[KeyPath, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    given: Mapping[str, Any] = field(default_factory=dict)
    at: KeyPath = ()
    samples: float | None = None
    parts: int = 1

    def get(self, dotted: str, default: Any = None) -> Any:
        return self.values.get(tuple(dotted.split(".")), default)

    def put(self, path: KeyPath, value: Any) -> None:
        if isinstance(value, str) and SECRET_ADDRESS.search(value):
            raise ValueError("a password or signature")
        self.values[path] = value

    def datasets(self) -> list[dict[str, Any]]:
        return nest(self.values).get("datasets", [])

    def say(self, key: str, outcome: Outcome, note: str = "", *paths: KeyPath) -> None:
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
        at: KeyPath = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Carry over every key of a section. label: before its keys in the report. at: the dataset's path. defaults: in
        place of the table's."""
        there = {key: value for key, value in given.items() if value is not None and value not in ("", [], {})}
        usual = table.defaults if defaults is None else defaults
        self.given, self.at = {**usual, **there}, at
        for key, row in table.rows.items():
            if not (key in there and self._convert(label + key, row, there[key])) and key in usual:
                self._convert(label + key, row, usual[key], default=True)
        for key, value in given.items():
            if (key in there and key in table.rows) or key.startswith("("):  # "(program)" is not of the file
                continue
            if SECRET_NAME.search(key):
                self.say(label + key, "secret", "secrets stay in the environment")
            elif table.is_idle(key) or is_off(value):
                self.say(label + key, "needs nothing")
            else:
                self.say(label + key, "not carried over", shown(value))
        for dotted, value in table.fixed.items():
            self.assume(f"{label}always", dotted, value)

    def _convert(self, name: str, row: tuple[str, Convert], value: Any, default: bool = False) -> bool:
        """Whether the value is usable."""
        to, convert = row
        try:
            result = convert(value, self)
            note = f"nearest to {shown(value)}" if isinstance(result, Nearest) else ""
            result = result.value if isinstance(result, Nearest) else result
            several = {} if result is NOTHING else result.values if isinstance(result, Several) else {to: result}
            paths = []
            for dotted, item in several.items():
                self.put(path := self._path(dotted), item)
                paths.append(path)
        except UNUSABLE:
            if not default:
                self.lines.append(Line(name, "not carried over", shown(value), to))
            return False
        if paths or not default:
            self.lines.append(Line(name, "carried over" if paths else "needs nothing", note, to, paths, default))
        if isinstance(value, str) and WINDOWS_PATH.match(value):
            self.say(name, "not carried over", f"{value}: a Windows path; name its place on this machine")
        return True

    def _path(self, dotted: str) -> KeyPath:
        """The path of an option: below the dataset that is carried over, unless it is an option of training."""
        return (*(() if dotted.startswith("train.") else self.at), *dotted.split("."))

    def carry_prompts(self, items: Iterable[Mapping[str, Any]], rows: Rows, label: str) -> None:
        """Validation prompts. items: each with `prompt`, perhaps `name`, and keys of `rows`: key here, conversion."""
        prompts: list[dict[str, Any]] = []
        for number, item in enumerate(items, 1):
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(item.get("name", ""))).strip("-._")[:90]
            is_free = name and all(prompt["name"] != name for prompt in prompts)
            prompt = {"name": name if is_free else f"sample-{number}", "prompt": str(item.get("prompt", ""))}
            self.given = item
            for key, (ours, convert) in rows.items():
                if item.get(key):
                    try:
                        prompt[ours] = convert(item[key], self)
                    except UNUSABLE:
                        self.say(f"{label} {number}: {key}", "not carried over", shown(item[key]))
            prompts.append(prompt)
        if prompts:
            self.put(path := ("validation", "prompts"), prompts)
            self.say(label, "carried over", "", path)

    def take_back(self, path: KeyPath, outcome: Outcome, note: str) -> bool:
        """Remove the value of a key that is at `path`, above it or below it; whether there was one."""
        changed = False
        for line in self.lines:
            gone = [ours for ours in line.paths if ours[: len(path)] == path or path[: len(ours)] == ours]
            for ours in gone:
                self.values.pop(ours, None)
                line.paths.remove(ours)
            if gone and not line.paths:
                line.outcome, line.note = "needs nothing" if line.default else outcome, note
            changed = changed or bool(gone)
        return changed


def is_off(value: Any) -> bool:
    """Whether a value means "off" in every trainer."""
    return value in (None, 0, "", "0", "0.0", "false", "False", "none", "None", "no", [], {})


def shown(value: Any) -> str:
    """A value for a message, shortened and without secrets."""
    word = ("true" if value else "false") if isinstance(value, bool) else str(value)
    return "a secret" if SECRET_ADDRESS.search(word) else shorten(word)
