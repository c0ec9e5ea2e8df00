"""Pydantic's errors as sentences with the value, the valid choices and the next step. Pure."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from schemas.config.pipeline import Config
from schemas.config.section import ONE_TAG, PATTERNS, SEVERAL_TAG, InconsistentValues, Problem, Section
from schemas.config.sharing import URL_ADVICE
from schemas.config.yaml_reader import KeyPath, parse_yaml
from schemas.text_format import shorten


def dotted_path(path: KeyPath) -> str:
    return ".".join(map(str, path))


def section_fields(section: type[Section]) -> dict[str, Any]:
    """The section's keys as written in YAML, and their types."""
    return {info.alias or name: info.annotation for name, info in section.model_fields.items()}


def type_at(path: KeyPath) -> Any:
    """The type of the value at `path` ("datasets", 0, "id"); None where there is no such key."""
    here: Any = Config
    for step in path:
        if isinstance(step, int):
            here = next(iter(get_args(here)), None) if get_origin(here) is tuple else None
        else:
            here = section_fields(here).get(step) if is_section(here) else None
        if get_origin(here) in (Union, UnionType):
            here = next(kind for kind in get_args(here) if kind is not type(None))
    return here


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def find_sections_with(key: str, section: type[Section] = Config, above: str = "") -> Iterator[str]:
    """The sections that have a key of this name, as dotted paths."""
    for name, kind in section_fields(section).items():
        if name == key:
            yield above or "the top level"
        inner, item = (get_args(kind)[0], ".N") if get_origin(kind) is tuple else (kind, "")
        if is_section(inner):
            yield from find_sections_with(key, inner, f"{above}.{name}{item}".lstrip("."))


def explain_error(error: ErrorDetails) -> list[Problem]:
    """The problems of one pydantic error, in words."""
    path = tuple(step for step in error["loc"] if step not in (ONE_TAG, SEVERAL_TAG))
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, InconsistentValues):
        return [((*path, *below), message) for below, message in cause.problems]
    if cause is not None:
        return [(path, str(cause))]
    if error["type"] == "too_short" and error["input"]:
        return []  # pydantic does not count invalid items, which have errors of their own
    return [(path, _describe(error["type"], path, error["input"], context, error["msg"]))]


def _describe(kind: str, path: KeyPath, value: Any, context: Mapping[str, Any], message: str) -> str:
    if kind == "extra_forbidden":
        key, valid = str(path[-1]), list(section_fields(type_at(path[:-1])))
        if path[0] == "notify" and key in ("url", "webhook_url"):
            return f"unknown key; here url_env; {URL_ADVICE}"
        hint = _suggest(key, valid)
        if not hint and (sections := list(find_sections_with(key))):
            hint = f"; it belongs to {' or '.join(sections)}"
        return f"unknown key{hint}; valid: {', '.join(valid)}"
    if kind == "missing":
        return "an item is missing" if isinstance(path[-1], int) else "this key is required and missing"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{_format_value(value)} is not valid{_suggest(value, choices)}; valid: {', '.join(choices)}"
    if kind == "string_pattern_mismatch":
        return f"{value!r} is not valid; {PATTERNS[context['pattern']]}"
    if kind in _EXPECTED_TYPES:
        expected = f"expected {_EXPECTED_TYPES[kind]}, got {_format_value(value)}"
        if kind == "string_type" and isinstance(value, int | float):
            return f"{expected}; put it in quotes"
        if isinstance(value, str) and kind in _PYTHON_TYPES:
            with suppress(ValueError):
                if isinstance(parse_yaml(value).value, _PYTHON_TYPES[kind]):
                    return f"{expected}; write it without quotes"
        return f"{expected}; valid: true, false" if kind == "bool_type" else expected
    if kind in ("model_type", "model_attributes_type"):
        section = type_at(path)
        return f"expected a section, got {_format_value(value)}; valid keys: {', '.join(section_fields(section))}"
    if kind == "too_short":
        return "needs at least one item"
    return f"{message.removeprefix('Input ')}, got {_format_value(value)}"


_EXPECTED_TYPES = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "a whole number",
    "string_type": "text",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_PYTHON_TYPES: dict[str, Any] = {"bool_type": bool, "float_type": (int, float), "int_type": int}


def _suggest(value: Any, choices: list[str]) -> str:
    close = get_close_matches(str(value), choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _format_value(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = shorten(repr(value))
    if isinstance(value, bool):
        return text.lower()
    return f"the text {text}" if isinstance(value, str) else text
