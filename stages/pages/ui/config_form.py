"""The configuration as a form: groups of fields made from its JSON Schema, filled from a YAML text, and written back
into it. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from schemas.catalogue import FAMILIES
from schemas.config.loading import json_schema
from schemas.config.yaml_editor import CannotEdit, read_values, set_value, value_at
from schemas.config.yaml_reader import KeyPath, YamlError, parse_yaml

Schema = Mapping[str, Any]
FLAVOUR = "model.flavour"


@dataclass
class Field:
    """path: dotted, such as "datasets.0.repeats". value: as the text has it, "" where it does not. choices: all valid
    ones, of a choice; of the flavour, those of the family that the text has, or of all. is_text: its value is a text,
    so that it is quoted where YAML needs it. by_hand: it stands on several lines, and is edited in the text."""

    path: str
    name: str
    about: str
    default: str
    choices: list[str]
    is_text: bool
    is_number: bool
    value: str = ""
    by_hand: bool = False


@dataclass
class Group:
    """A section: its own fields and the sections in it. is_set: the text sets something in it."""

    path: str
    title: str
    fields: list[Field] = field(default_factory=list)
    groups: list["Group"] = field(default_factory=list)
    is_set: bool = False

    def all_fields(self) -> Iterator[Field]:
        yield from self.fields
        for group in self.groups:
            yield from group.all_fields()


def build_form(text: str) -> Group:
    """The form of a text, with a group for each item of its lists of sections. YamlError where it is no YAML."""
    value = parse_yaml(text).value
    form = _build_group("", "", _schema(), value)
    fields = list(form.all_fields())
    values = read_values(text, [split_path(each.path) for each in fields])
    for each in fields:
        path = split_path(each.path)
        written = values[path]
        each.by_hand = written is None and value_at(value, path) is not None
        each.value = "" if written is None else written
        if each.path == FLAVOUR:
            _name_flavours(each, value_at(value, ("model", "family")))
    _mark_set(form)
    return form


def _name_flavours(flavour: Field, family: Any) -> None:
    own = [spec for name, spec in FAMILIES.items() if name == family] or list(FAMILIES.values())
    flavour.choices = [name for one in own for name in one.flavours]
    flavour.default = own[0].default_flavour if len(own) == 1 else ""


def changed_text(text: str, base: str, given: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with the fields that are `given` others than `base`, the text that they were filled from, has them; and
    why some can't be written."""
    problems: list[str] = []
    try:
        fields = list(build_form(base).all_fields())
    except YamlError:
        return text, []  # there was no form
    for each in fields:
        value = given.get(each.path, each.value)
        if value == each.value or each.by_hand:
            continue
        try:
            text = set_value(text, split_path(each.path), value if value.strip() else None, each.is_text)
        except YamlError:
            problems.append(f"{each.path}: {value!r} is no YAML, or the text is none")
        except CannotEdit as error:
            problems.append(f"{each.path}: {error}")
    return text, problems


def split_path(path: str) -> KeyPath:
    return tuple(int(step) if step.isdecimal() else step for step in path.split(".")) if path else ()


@lru_cache(maxsize=1)
def _schema() -> Schema:
    return json_schema()


def _resolve(schema: Schema) -> Schema:
    """What a reference names; of a section or null, the section."""
    if "$ref" in schema:
        return _schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    others = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return _resolve(others[0]) if len(others) == 1 and "$ref" in others[0] else schema


def _build_group(path: str, title: str, schema: Schema, value: Any) -> Group:
    group = Group(path, title)
    for name, given in schema["properties"].items():
        inner, own = _resolve(given), f"{path}.{name}".lstrip(".")
        here = value.get(name) if isinstance(value, dict) else None
        if "properties" in inner:
            group.groups.append(_build_group(own, name, inner, here))
        elif (item := _item_section(inner)) is not None:
            items = here if isinstance(here, list) else []
            for number, each in enumerate(items):
                known = next((each[key] for key in ("id", "name") if isinstance(each, dict) and key in each), number)
                group.groups.append(_build_group(f"{own}.{number}", f"{name}: {known}", item, each))
        else:
            group.fields.append(_build_field(own, name, given))
    return group


def _item_section(schema: Schema) -> Schema | None:
    """Of a list of sections, the section."""
    item = _resolve(schema.get("items", {})) if schema.get("type") == "array" else {}
    return item if "properties" in item else None


def _build_field(path: str, name: str, schema: Schema) -> Field:
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    one = kinds[0] if len(kinds) == 1 else {}
    choices = ["true", "false"] if one.get("type") == "boolean" else [str(each) for each in one.get("enum", ()) if each]
    default = schema.get("default")
    return Field(
        path,
        name,
        schema.get("description", ""),
        "" if default is None else default if isinstance(default, str) else json.dumps(default),
        choices,
        is_text=one.get("type") == "string",
        is_number=one.get("type") in ("number", "integer"),
    )


def _mark_set(group: Group) -> None:
    for inner in group.groups:
        _mark_set(inner)
    group.is_set = any(each.value or each.by_hand for each in group.fields) or any(it.is_set for it in group.groups)
