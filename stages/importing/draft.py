"""Conversion of another trainer's configuration: tables of rows "key: option of latentpress, conversion", and the draft
of the new configuration.

A key in a table's rows is converted. A key that matches a pattern in `idle` needs nothing. Any other key is not carried
over, and is reported with its value, unless the value means "off".
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from schemas.config.yaml_editor import nest
from schemas.config.yaml_reader import KeyPath
from schemas.text_format import shorten
from stages.importing.files import WINDOWS_PATH, ReferencedFiles

Outcome = Literal["carried over", "needs nothing", "not carried over", "secret"]
#: (value, draft, whose `entries` has all keys of the section) -> value of the option, `Several`, `Nearest` or NOTHING.
#: Raises one of UNUSABLE if the value can't be converted.
Convert = Callable[[Any, "Draft"], Any]
Rows = Mapping[str, tuple[str, Convert]]
#: Result for a value that needs no option, because it has no effect or latentpress always works in this way.
NOTHING = object()
UNUSABLE = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)
#: Names of keys whose values are never shown.
SECRET_NAME = re.compile(r"token$|secret|passw|api_?key|access_key|credential|webhook|publishing_config", re.IGNORECASE)
#: An address with a password, or with a signature.
SECRET_ADDRESS = re.compile(r"://[^/\s]*@|[?&][^=\s]*(sign|sig|token|key|secret|credential)[^=\s]*=", re.IGNORECASE)


@dataclass(frozen=True)
class Several:
    """Values of several options: dotted path -> value. Paths of a dataset's options are relative to the dataset."""

    values: Mapping[str, Any]


def section_options(section: str, **values: Any) -> Several:
    return Several({f"{section}.{key}": value for key, value in values.items()})


@dataclass(frozen=True)
class Nearest:
    """The nearest valid value, or `Several`, for a value without an exact counterpart."""

    value: Any


@dataclass(frozen=True)
class Table:
    """The keys of a section. rows: key -> (option, conversion), in the order of conversion. idle: patterns of keys that
    need nothing, separated by spaces. defaults: key -> default of the other trainer, if it differs from latentpress.
    fixed: option -> value that the other trainer always uses."""

    rows: Rows
    idle: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def is_idle(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.idle.split())


@dataclass(frozen=True)
class Trainer:
    """Another trainer. name: its usual spelling. tables: section -> table. find_role: function that returns the role of
    a file by its content, "" for a file of another trainer. carry: function that puts the content of the files, by
    role, into a draft."""

    name: str
    tables: Mapping[str, Table]
    find_role: Callable[[Any], str]
    carry: Callable[["Draft", Mapping[str, Any]], None]


@dataclass
class Line:
    """The result for a key. option: the option of its row. paths: the options that got a value from it. note: text for
    the user. is_default: whether the key is not in the file, and the value is the other trainer's default."""

    key: str
    outcome: Outcome
    note: str = ""
    option: str = ""
    paths: list[KeyPath] = field(default_factory=list)
    is_default: bool = False


@dataclass
class Draft:
    """A configuration while it is converted.

    files: files next to the other trainer's configuration. values: values of the new configuration. entries: keys of
    the current section, with the other trainer's defaults. dataset_path: path of the section's dataset in the new
    configuration. samples: number of samples in an epoch, if all files could be counted. step_ratio: number of the
    other trainer's steps per step of latentpress.
    """

    files: ReferencedFiles
    values: dict[KeyPath, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    entries: Mapping[str, Any] = field(default_factory=dict)
    dataset_path: KeyPath = ()
    samples: float | None = None
    step_ratio: int = 1

    def get(self, dotted: str, default: Any = None) -> Any:
        return self.values.get(tuple(dotted.split(".")), default)

    def set(self, path: KeyPath, value: Any) -> None:
        if isinstance(value, str) and SECRET_ADDRESS.search(value):
            raise ValueError("a password or signature")
        self.values[path] = value

    def datasets(self) -> list[dict[str, Any]]:
        return nest(self.values).get("datasets", [])

    def add_line(self, key: str, outcome: Outcome, note: str = "", *paths: KeyPath) -> None:
        self.lines.append(Line(key, outcome, note, "", list(paths)))

    def assume(self, key: str, dotted: str, value: Any) -> None:
        """Set a value that the other trainer always uses, unless a key of the file has set the option. key: name in the
        comment."""
        path = self._path(dotted)
        if not any(path in line.paths for line in self.lines):
            self.set(path, value)
            self.lines.append(Line(key, "carried over", "", dotted, [path], is_default=True))

    def section(self, value: Any, name: str) -> dict[str, Any]:
        """A section of the file, with its keys as text. A value that is not a section is reported, and an empty section
        is returned."""
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
        if value is not None:
            self.add_line(name, "not carried over", show_value(value))
        return {}

    def sections(self, value: Any, name: str) -> list[dict[str, Any]]:
        """The sections of a list. Items that are not sections are reported."""
        if not isinstance(value, list):
            return [self.section(value, name)] if value else []
        return [self.section(item, f"{name} {number}") for number, item in enumerate(value, 1) if item is not None]

    def carry(
        self,
        table: Table,
        entries: Mapping[str, Any],
        label: str = "",
        dataset_path: KeyPath = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Carry over every key of a section. label: prefix of the keys in the report. dataset_path: path of the
        section's dataset. defaults: defaults that replace the table's defaults."""
        set_entries = {key: value for key, value in entries.items() if value is not None and value not in ("", [], {})}
        default_entries = table.defaults if defaults is None else defaults
        self.entries, self.dataset_path = {**default_entries, **set_entries}, dataset_path
        for key, row in table.rows.items():
            is_converted = key in set_entries and self._convert(label + key, row, set_entries[key])
            if not is_converted and key in default_entries:
                self._convert(label + key, row, default_entries[key], default=True)
        for key, value in entries.items():
            if (key in set_entries and key in table.rows) or key.startswith("("):  # such as "(program)"
                continue
            if SECRET_NAME.search(key):
                self.add_line(label + key, "secret", "secrets stay in the environment")
            elif table.is_idle(key) or is_off(value):
                self.add_line(label + key, "needs nothing")
            else:
                self.add_line(label + key, "not carried over", show_value(value))
        for dotted, value in table.fixed.items():
            self.assume(f"{label}always", dotted, value)

    def _convert(self, name: str, row: tuple[str, Convert], value: Any, default: bool = False) -> bool:
        """Convert a value. Returns whether it is usable."""
        to, convert = row
        try:
            result = convert(value, self)
            note = f"nearest to {show_value(value)}" if isinstance(result, Nearest) else ""
            result = result.value if isinstance(result, Nearest) else result
            options = {} if result is NOTHING else result.values if isinstance(result, Several) else {to: result}
            paths = []
            for dotted, item in options.items():
                self.set(path := self._path(dotted), item)
                paths.append(path)
        except UNUSABLE:
            if not default:
                self.lines.append(Line(name, "not carried over", show_value(value), to))
            return False
        if paths or not default:
            self.lines.append(Line(name, "carried over" if paths else "needs nothing", note, to, paths, default))
        if isinstance(value, str) and WINDOWS_PATH.match(value):
            self.add_line(name, "not carried over", f"{value}: a Windows path; use its path on this machine")
        return True

    def _path(self, dotted: str) -> KeyPath:
        """The path of an option: below the current dataset, unless it is an option of training."""
        return (*(() if dotted.startswith("train.") else self.dataset_path), *dotted.split("."))

    def carry_prompts(self, items: Iterable[Mapping[str, Any]], rows: Rows, label: str) -> None:
        """Carry over validation prompts. items: mappings with "prompt", optionally "name", and keys of `rows`."""
        prompts: list[dict[str, Any]] = []
        for number, item in enumerate(items, 1):
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(item.get("name", ""))).strip("-._")[:90]
            is_free = name and all(prompt["name"] != name for prompt in prompts)
            prompt = {"name": name if is_free else f"sample-{number}", "prompt": str(item.get("prompt", ""))}
            self.entries = item
            for key, (option, convert) in rows.items():
                if item.get(key):
                    try:
                        prompt[option] = convert(item[key], self)
                    except UNUSABLE:
                        self.add_line(f"{label} {number}: {key}", "not carried over", show_value(item[key]))
            prompts.append(prompt)
        if prompts:
            self.set(path := ("validation", "prompts"), prompts)
            self.add_line(label, "carried over", "", path)

    def remove_value(self, path: KeyPath, outcome: Outcome, note: str) -> bool:
        """Remove the values of keys at `path`, above it or below it. Returns whether a value was removed."""
        has_changed = False
        for line in self.lines:
            removed_paths = [
                option_path
                for option_path in line.paths
                if option_path[: len(path)] == path or path[: len(option_path)] == option_path
            ]
            for option_path in removed_paths:
                self.values.pop(option_path, None)
                line.paths.remove(option_path)
            if removed_paths and not line.paths:
                line.outcome, line.note = "needs nothing" if line.is_default else outcome, note
            has_changed = has_changed or bool(removed_paths)
        return has_changed


def is_off(value: Any) -> bool:
    """Whether a value means "off" in every trainer."""
    return value in (None, 0, "", "0", "0.0", "false", "False", "none", "None", "no", [], {})


def show_value(value: Any) -> str:
    """A value for a message, shortened and without secrets."""
    word = ("true" if value else "false") if isinstance(value, bool) else str(value)
    return "a secret" if SECRET_ADDRESS.search(word) else shorten(word)
