"""From pydantic's errors to sentences with the value, the valid choices and the next step. Pure."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from schemas import foreign
from schemas.config.pipeline import Config
from schemas.config.types import PATTERNS
from schemas.report import shortened
from schemas.section import Incoherent, Problem, Section
from schemas.yamlfile import Key, parse


def dotted(path: Key) -> str:
    return ".".join(map(str, path))


def fields_of(section: type[Section]) -> dict[str, Any]:
    """The section's keys as they are written in YAML, and the type of each."""
    return {info.alias or name: info.annotation for name, info in section.model_fields.items()}


def type_at(path: Key) -> Any:
    """The type of the value at `path` ("datasets", 0, "id"); None where there is no such key."""
    here: Any = Config
    for step in path:
        if isinstance(step, int):
            here = next(iter(get_args(here)), None) if get_origin(here) is tuple else None
        else:
            here = fields_of(here).get(step) if is_section(here) else None
        if get_origin(here) in (Union, UnionType):
            here = next(kind for kind in get_args(here) if kind is not type(None))
    return here


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def places_of(key: str, section: type[Section] = Config, above: str = "") -> Iterator[str]:
    """The sections that have a key of this name, as dotted paths."""
    for name, kind in fields_of(section).items():
        if name == key:
            yield above or "the top level"
        inner, item = kind, ""
        if get_origin(kind) is tuple:
            inner, item = get_args(kind)[0], ".N"
        if is_section(inner):
            yield from places_of(key, inner, f"{above}.{name}{item}".lstrip("."))


def explain(error: ErrorDetails) -> list[Problem]:
    """What is wrong, in words, and where (one pydantic error can hold several)."""
    path, context = error["loc"], error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Incoherent):
        return [((*path, *below), message) for below, message in cause.problems]
    if cause is not None:
        return [(path, str(cause))]
    if error["type"] == "too_short" and error["input"]:
        return []  # items that are wrong are not counted, and have errors of their own
    return [(path, _sentence(error["type"], path, error["input"], context, error["msg"]))]


def _sentence(kind: str, path: Key, value: Any, context: Mapping[str, Any], message: str) -> str:
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return "an item is missing" if isinstance(path[-1], int) else "this key is required and missing"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{_shown(value)} is not valid{_nearest(value, choices)}; valid: {', '.join(choices)}"
    if kind == "string_pattern_mismatch":
        return f"{value!r} is not valid; {PATTERNS[context['pattern']]}"
    if kind in _EXPECTED:
        return _wrong_type(kind, value)
    if kind in ("model_type", "model_attributes_type"):
        section = type_at(path)
        return f"expected a section, got {_shown(value)}; valid keys: {', '.join(fields_of(section))}"
    if kind == "too_short":
        return "needs at least one item"
    return f"{message.removeprefix('Input ')}, got {_shown(value)}"


_EXPECTED = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "a whole number",
    "string_type": "text",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_KINDS: dict[str, Any] = {"bool_type": bool, "float_type": (int, float), "int_type": int}


def _wrong_type(kind: str, value: Any) -> str:
    expected = f"expected {_EXPECTED[kind]}, got {_shown(value)}"
    if kind == "string_type" and isinstance(value, int | float):
        return f"{expected}; put it in quotes"
    if isinstance(value, str) and kind in _KINDS and isinstance(_unquoted(value), _KINDS[kind]):
        return f"{expected}; write it without quotes"
    return f"{expected}; valid: true, false" if kind == "bool_type" else expected


def _unquoted(text: str) -> Any:
    """What the text would be in YAML without its quotes."""
    try:
        return parse(text).value
    except ValueError:
        return text


def _unknown_key(path: Key) -> str:
    key = str(path[-1])
    valid = list(fields_of(type_at(path[:-1])))
    if said := foreign.hint(path):  # before near misses: type is not the crop_style that it looks like
        return f"unknown key; {said}"
    hint = _nearest(key, valid)
    if not hint and (places := list(places_of(key))):
        hint = f"; it belongs to {' or '.join(places)}"
    return f"unknown key{hint}; valid: {', '.join(valid)}"


def _nearest(value: Any, choices: list[str]) -> str:
    close = get_close_matches(str(value), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = shortened(repr(value))
    return f"the text {text}" if isinstance(value, str) else text
