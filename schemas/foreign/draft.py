"""Keys of other trainers' configurations, and what becomes of them. Tables for each of their sections, a row for each
key; and the draft into which they are carried: what each key became, and the values so far.

`latentpress import-config`, the hints in errors of the configuration, and the tables of docs/coming-from.md all read
these rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal, Protocol

Outcome = Literal["carried over", "not needed", "refused", "unknown", "secret"]
Path = tuple[str | int, ...]
#: Names of keys whose values are never shown, whatever table they are in.
SECRET_NAME = re.compile(r"token$|secret|passw|api_?key|access_key|credential|webhook_url", re.IGNORECASE)
#: An address with a password, or with a signature.
_SECRET_ADDRESS = re.compile(r"://[^/\s]*@|[?&][^=\s]*(sign|sig|token|key|secret|credential)[^=\s]*=", re.IGNORECASE)
WRONG_KIND = "its value is of another kind than this key takes there"
SECRET_ADVICE = "secrets stay in the environment, and are never written into a configuration"
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
    """The answer to a key. to: of one that is carried over ours, as a dotted path; in tables of datasets, of a dataset.
    drop, refuse, secret: why it is not carried over, and the nearest thing. note: how the value differs."""

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
    the trainer's own, where they differ from ours: a section without the key means this value. first: keys of which
    others are computed."""

    title: str
    rows: Table
    defaults: Mapping[str, Any] = field(default_factory=dict)
    in_dataset: bool = False
    first: Sequence[str] = ()


def dropped(reason: str, *keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys, Row(drop=reason))


def refused(reason: str, *keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys, Row(refuse=reason))


def secret(instead: str, *keys: str) -> dict[str, Row]:
    return dict.fromkeys(keys, Row(secret=instead))


class Files(Protocol):
    """The files beside a configuration; paths are as written in it."""

    def read(self, path: str) -> Any:
        """Its content: parsed JSON, TOML or YAML, the text of another file; None where it isn't found."""

    def folders_in(self, path: str) -> list[str]:
        """Names of the folders in a folder, sorted; none where it isn't found."""

    def count_media(self, datasets: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
        """Draws of an epoch, files x (repeats + 1); None and the reason where a folder can't be counted here."""


@dataclass
class Line:
    """The outcome of one key. paths: ours, where it was carried over. default: it is not in the file, and means this
    value in the other trainer."""

    key: str
    outcome: Outcome
    text: str
    paths: list[Path] = field(default_factory=list)
    default: bool = False


@dataclass
class Draft:
    """given: of the section that is carried over now, with the trainer's defaults. samples: draws of an epoch, once the
    datasets are known and all their files could be counted."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    given: Mapping[str, Any] = field(default_factory=dict)
    at: Path = ()
    samples: float | None = None
    uncounted: str = ""

    def put(self, path: Path, value: Any) -> None:
        """Set a value; sections and items of lists that are missing are made."""
        if isinstance(value, str) and _SECRET_ADDRESS.search(value):
            raise Refused(f"it holds a password or a signature; {SECRET_ADVICE}")
        here: Any = self.values
        for step, following in pairwise(path):
            if isinstance(here, list):
                while len(here) <= int(step):
                    here.append({})
                here = here[int(step)]
            else:
                here = here.setdefault(step, [] if isinstance(following, int) else {})
        here[path[-1]] = value

    def assume(self, key: str, dotted: str, value: Any) -> None:
        """Set what the other trainer always does, where no key says otherwise."""
        path = tuple(dotted.split("."))
        if self.get(dotted) is None:
            self.put(path, value)
            self.lines.append(Line(key, "carried over", "", [path], default=True))

    def set(self, key: str, path: Path, value: Any, text: str = "") -> None:
        """Carry over one key."""
        self.put(path, value)
        self.say(key, "carried over", text, path)

    def get(self, dotted: str, default: Any = None) -> Any:
        here: Any = self.values
        for step in dotted.split("."):
            here = here.get(step) if isinstance(here, dict) else None
        return default if here is None else here

    def say(self, key: str, outcome: Outcome, text: str, *paths: Path) -> None:
        self.lines.append(Line(key, outcome, text, list(paths)))

    def section(self, value: Any, name: str) -> dict[str, Any]:
        """A section of the file, with texts for keys; none of its keys where it is of another kind, which is named."""
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
        if value is not None:
            self.say(name, "refused", "expected a section")
        return {}

    def sections(self, value: Any, name: str) -> list[dict[str, Any]]:
        """The sections of a list; items of another kind are named."""
        if not isinstance(value, list):
            return [self.section(value, name)] if value else []
        return [self.section(item, f"{name} {number}") for number, item in enumerate(value, 1) if item is not None]

    def attempt(self, key: str, convert: Callable[[Any], Any], value: Any, default: Any) -> Any:
        """A converted value; `default` where it is of another kind, which is named."""
        try:
            return convert(value)
        except (TypeError, ValueError, OverflowError):
            self.say(key, "refused", WRONG_KIND)
            return default

    def carry(self, section: Section, given: Mapping[str, Any], label: str = "", at: Path = ()) -> None:
        """Carry over every key of a section. label: before its keys in the report. at: the dataset's path."""
        there = {key: value for key, value in given.items() if value is not None}
        self.given, self.at = {**section.defaults, **there}, at
        for key, value in {**{key: given[key] for key in section.first if key in given}, **given}.items():
            if not key.startswith("("):  # which is not of the file, as a command's program
                self._carry_key(section, key, value, label)
        for key, value in section.defaults.items():
            if key not in there:
                self._carry_key(section, key, value, label, default=True)

    def _carry_key(self, section: Section, key: str, value: Any, label: str, default: bool = False) -> None:
        row, name = section.rows.get(key), f"{label}{key}"
        if row is None:
            if SECRET_NAME.search(key):
                self.say(name, "secret", f"not copied: {SECRET_ADVICE}")
            else:
                close = get_close_matches(key, section.rows, 1)
                meant = f"; did you mean {close[0]}?" if close else ""
                self.say(name, "unknown", f"no key of {section.title} that is known here{meant}")
        elif row.drop or row.refuse or row.secret:
            outcome: Outcome = "not needed" if row.drop else "refused" if row.refuse else "secret"
            if outcome == "refused" and is_off(value):
                outcome = "not needed"
                self.say(name, outcome, "it is off")
            elif not default:
                self.say(name, outcome, row.drop or row.refuse or f"not copied: {row.secret}")
        elif value is None:
            self.say(name, "not needed", "it has no value")
        else:
            self._convert(row, name, value, default)

    def _convert(self, row: Row, name: str, value: Any, default: bool) -> None:
        try:
            result = row.convert(value, self)
            several = result.values if isinstance(result, Several) else {row.to: result}
            paths = []
            for to, item in several.items():
                steps = tuple(int(step) if step.isdecimal() else step for step in to.split("."))
                paths.append(path := (*self.at, *steps))
                self.put(path, item)
        except NotNeeded as reason:
            if not default:
                self.say(name, "not needed", str(reason))
        except Refused as reason:
            self.say(name, "refused", str(reason))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            self.say(name, "refused", WRONG_KIND)
        else:
            note = row.note if paths else row.note or "it is the default"
            self.lines.append(Line(name, "carried over" if paths else "not needed", note, paths, default))

    def refuse(self, path: Path, reason: str) -> Iterator[Line]:
        """Take back what stands at `path` or below, which the configuration refuses; yields the lines of these keys."""
        for line in self.lines:
            hit = [ours for ours in line.paths if ours[: len(path)] == path or path[: len(ours)] == ours]
            if hit:
                for ours in hit:
                    self.remove(ours)
                line.paths = [ours for ours in line.paths if ours not in hit]
                line.outcome, line.text = "refused", reason
                yield line

    def remove(self, path: Path) -> None:
        """Without the value at `path`, and without sections that are empty then."""
        above: list[Any] = [self.values]
        for step in path[:-1]:
            above.append(above[-1][step])
        for section, step in zip(reversed(above), reversed(path), strict=True):
            section.pop(step, None)
            if section:
                break


def is_off(value: Any) -> bool:
    return value is None or value is False or value in (0, "", "false", "False", "none", "None", "no", "0", [], {})
