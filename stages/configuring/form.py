"""The form of a configuration: fields in groups, made from the JSON Schema and filled from a text; and the changes of
the text by its fields, its lists of items and its presets."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from schemas.catalog import FAMILIES
from schemas.config.generated import json_schema
from schemas.config.yaml_editor import CannotEdit, YamlEditor, read_values, value_at
from schemas.config.yaml_reader import KeyPath, YamlError, parse_yaml

Schema = Mapping[str, Any]
FLAVOUR = "model.flavour"
FOLDERS = ("instance_data_dir", "conditioning_data", "mask_data", "media_root")  # options with a browser for folders
MAX_NAME = 24  # characters of a new item's name
#: The options that most people change -> their names in words. They stand above the folded groups.
BASIC = {
    "model.flavour": "Model",
    "datasets.instance_data_dir": "Folder of pictures",
    "datasets.trigger": "Trigger: words for what is trained",
    "datasets.resolution": "Size of pictures",
    "train.steps": "Steps",
    "train.adapter.rank": "Rank: size of the adapter",
    "train.optimizer.lr": "Learning rate",
    "validation.every": "Steps between sample pictures",
}
#: Section -> its name in words.
TITLES = {
    "cache": "Cache: files of encoded pictures and captions",
    "model": "Model",
    "datasets": "Pictures and captions",
    "features": "Duplicates and measures of pictures",
    "caption": "Captions by a model",
    "masks": "Masks by a model",
    "text": "Encoding of captions",
    "latents": "Encoding of pictures",
    "vision": "Features of pictures",
    "stages": "Stages: processes and limits",
    "train": "Training",
    "train.adapter": "Adapter",
    "train.optimizer": "Optimizer",
    "train.offload": "Offloading to the host's memory",
    "validation": "Sample pictures and eval loss",
    "notify": "Messages about a run",
    "hub": "Upload to the Hub",
}
#: Preset -> option -> value, None for the default.
PRESETS: Mapping[str, Mapping[KeyPath, Any]] = {
    "Less memory": {
        ("train", "batch_size"): 1,
        ("train", "gradient_checkpointing"): True,
        ("train", "base_precision"): None,
        ("train", "quantize_via"): None,
        ("train", "offload", "blocks"): True,
        ("train", "offload", "streams"): True,
    },
    "Better quality": {
        ("train", "base_precision"): None,
        ("train", "quantize_via"): None,
        ("train", "adapter", "rank"): 32,
        ("train", "steps"): 3000,
        ("validation", "every"): 250,
    },
}


@dataclass(frozen=True)
class NewItem:
    """A kind of item that the form adds to a list. typed_key: the key whose value the user types; name_key: the key
    whose value, a name, is derived from the typed value."""

    path: str
    label: str
    typed_key: str
    name_key: str


NEW_ITEMS = {
    item.path: item
    for item in (
        NewItem("datasets", "Folder of a new dataset", "instance_data_dir", "id"),
        NewItem("validation.prompts", "New prompt", "prompt", "name"),
    )
}


@dataclass(eq=False)
class Field:
    """A field of the form, for one option.

    path: dotted path, such as "datasets.0.repeats". value: value as written in the text, "" if the text does not set
    the option. choices: valid values of an option with a fixed set of values; for the flavour, the flavours of the
    family in the text, or of all families. is_text: whether the value is a string, which is quoted if YAML needs it.
    is_text_only: whether the value has several lines and can only be edited in the text. is_hidden: whether the field
    does not match a search."""

    path: str
    name: str
    about: str
    default: str
    choices: list[str]
    is_text: bool
    is_number: bool
    value: str = ""
    is_text_only: bool = False
    is_hidden: bool = False

    @property
    def label(self) -> str:
        """The name in words."""
        return BASIC.get(_general_path(self.path), self.name.replace("_", " "))

    @property
    def is_folder(self) -> bool:
        return self.name in FOLDERS

    @property
    def is_set(self) -> bool:
        return bool(self.value) or self.is_text_only


@dataclass
class Group:
    """A section: its own fields and the sections in it. is_item: whether the section is an item of a list of NEW_ITEMS
    and can be removed. basic: the fields of BASIC, only in the whole form. adds: lists in the section to which items
    can be added."""

    path: str
    title: str
    fields: list[Field] = field(default_factory=list)
    groups: list["Group"] = field(default_factory=list)
    is_item: bool = False
    is_hidden: bool = False
    basic: list[Field] = field(default_factory=list)
    adds: list[NewItem] = field(default_factory=list)

    @property
    def is_set(self) -> bool:
        return any(field_.is_set for field_ in self.all_fields())

    @property
    def label(self) -> str:
        """The title in words."""
        key, _, name = self.title.partition(": ")
        words = TITLES.get(self.path if not name else key, self.title.replace("_", " "))
        return f"{words}: {name}" if name and words != self.title else words

    def all_fields(self) -> Iterator[Field]:
        yield from self.basic
        yield from self.fields
        for group in self.groups:
            yield from group.all_fields()


def build_form(text: str) -> Group:
    """Make the form of a text, with a group for each item of a list of sections. Raises YamlError if the text is not
    YAML."""
    value = parse_yaml(text).value
    form = _build_group("", "", _schema(), value)
    fields = list(form.all_fields())
    values = read_values(text, [split_path(field_.path) for field_ in fields])
    for field_ in fields:
        path = split_path(field_.path)
        yaml_value = values[path]
        field_.is_text_only = yaml_value is None and value_at(value, path) is not None
        field_.value = "" if yaml_value is None else yaml_value
        if field_.path == FLAVOUR:
            _name_flavours(field_, value_at(value, ("model", "family")))
    form.basic = sorted(_take_basic(form), key=lambda one: [*BASIC].index(_general_path(one.path)))
    return form


def _general_path(path: str) -> str:
    """A path without the numbers of items; "" for an item after the first one."""
    return re.sub(r"\.0\.", ".", path)


def _take_basic(group: Group) -> list[Field]:
    """Remove the fields of BASIC from a group and the groups in it."""
    taken = [one for one in group.fields if _general_path(one.path) in BASIC]
    group.fields = [one for one in group.fields if one not in taken]
    return taken + [one for inner in group.groups for one in _take_basic(inner)]


def compare_preset(text: str, name: str) -> list[tuple[str, str, str]]:
    """The options that a preset changes in a text: (path, value now, new value). Values are JSON. Raises YamlError if
    the text is not YAML."""
    form = {one.path: one for one in build_form(text).all_fields()}
    changes = []
    for path, value in PRESETS[name].items():
        one = form[".".join(map(str, path))]
        now, new = one.value or one.default, json.dumps(value) if value is not None else one.default
        if now != new and (one.is_set or value is not None):
            changes.append((one.path, now, new))
    return changes


def apply_preset(text: str, name: str) -> str:
    """Write a preset into a text. Raises CannotEdit if it can't be written, YamlError if the text is not YAML."""
    editor = YamlEditor(text)
    for path, _, _ in compare_preset(text, name):
        if (value := PRESETS[name][split_path(path)]) is None:
            editor.remove(split_path(path))
        else:
            editor.set(split_path(path), json.dumps(value))
    return editor.text()


def _name_flavours(flavour: Field, family: Any) -> None:
    specs = [spec for name, spec in FAMILIES.items() if name == family] or list(FAMILIES.values())
    flavour.choices = [name for spec in specs for name in spec.flavours]
    flavour.default = specs[0].default_flavour if len(specs) == 1 else ""


def apply_changes(text: str, base: str, form_values: Mapping[str, str]) -> tuple[str, list[str]]:
    """Write changed fields into a text. A field has changed if its value in `form_values` differs from its value in
    `base`, the text that the form was filled from. Returns (changed text, problems: why some fields can't be
    written)."""
    problems: list[str] = []
    try:
        fields = [field_ for field_ in build_form(base).all_fields() if not field_.is_text_only]
    except YamlError:
        return text, []  # the page had no form
    changed = {
        field_: value for field_ in fields if (value := form_values.get(field_.path, field_.value)) != field_.value
    }
    if not changed:
        return text, []
    try:
        editor = YamlEditor(text)
        for field_, value in changed.items():
            try:
                if value.strip():
                    editor.set(split_path(field_.path), value, field_.is_text)
                else:
                    editor.remove(split_path(field_.path))
            except YamlError:
                problems.append(f"{field_.path}: {value!r} is not valid YAML")
            except CannotEdit as error:
                problems.append(f"{field_.path}: {error}")
        return editor.text(), problems
    except YamlError:
        return text, ["the fields were not written: the text is not valid YAML"]
    except CannotEdit as error:
        return text, [f"the fields were not written: {error}"]


def split_path(path: str) -> KeyPath:
    return tuple(int(step) if step.isdecimal() else step for step in path.split(".")) if path else ()


@lru_cache(maxsize=1)
def _schema() -> Schema:
    return json_schema()


def _resolve(schema: Schema) -> Schema:
    """Follow a reference; for a type "section or null", return the section."""
    if "$ref" in schema:
        return _schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    sections = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    return _resolve(sections[0]) if len(sections) == 1 and "$ref" in sections[0] else schema


def _build_group(path: str, title: str, schema: Schema, value: Any) -> Group:
    group = Group(path, title)
    for name, field_schema in schema["properties"].items():
        section, key = _resolve(field_schema), f"{path}.{name}".lstrip(".")
        current = value.get(name) if isinstance(value, dict) else None
        if "properties" in section:
            group.groups.append(_build_group(key, name, section, current))
        elif (item := _item_section(section)) is not None:
            items = current if isinstance(current, list) else []
            for number, item_value in enumerate(items):
                item_name = next(
                    (item_value[key] for key in ("id", "name") if isinstance(item_value, dict) and key in item_value),
                    number,
                )
                item_group = _build_group(f"{key}.{number}", f"{name}: {item_name}", item, item_value)
                item_group.is_item = key in NEW_ITEMS
                group.groups.append(item_group)
            group.adds += [NEW_ITEMS[key]] if key in NEW_ITEMS else []
        else:
            group.fields.append(_build_field(key, name, field_schema))
    return group


def _item_section(schema: Schema) -> Schema | None:
    """The schema of a list's items if these are sections, else None."""
    item = _resolve(schema.get("items", {})) if schema.get("type") == "array" else {}
    return item if "properties" in item else None


def _build_field(path: str, name: str, schema: Schema) -> Field:
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    single = kinds[0] if len(kinds) == 1 else {}
    choices = (
        ["true", "false"] if single.get("type") == "boolean" else [str(kind) for kind in single.get("enum", ()) if kind]
    )
    default = schema.get("default")
    return Field(
        path,
        name,
        schema.get("description", ""),
        "" if default is None else default if isinstance(default, str) else json.dumps(default),
        choices,
        is_text=single.get("type") == "string",
        is_number=single.get("type") in ("number", "integer"),
    )


def search(group: Group, words: str, only_set: bool) -> None:
    """Hide fields whose path and description do not contain each of the words (case-insensitive). only_set: hide fields
    that the text does not set, too."""
    search_words = words.casefold().split()
    for inner in group.groups:
        search(inner, words, only_set)
    for field_ in (*group.basic, *group.fields):
        text = f"{field_.path} {field_.label} {field_.about}".casefold()
        field_.is_hidden = (only_set and not field_.is_set) or not all(word in text for word in search_words)
    group.is_hidden = all(field_.is_hidden for field_ in group.all_fields())


def add_item(text: str, path: str, value: str) -> str:
    """Add an item with a unique name to a list of NEW_ITEMS, and return the text. Raises CannotEdit if the item has to
    be added by hand, YamlError if the text is not YAML."""
    new_item, keys = NEW_ITEMS[path], split_path(path)
    items = value_at(parse_yaml(text).value, keys)
    names = (
        {item.get(new_item.name_key) for item in items if isinstance(item, dict)} if isinstance(items, list) else set()
    )
    name = (
        re.sub(r"[^a-z0-9]+", "-", value.rstrip("/").rpartition("/")[2].casefold())[:MAX_NAME].strip("-")
        or new_item.name_key
    )
    number = next(n for n in range(1, len(names) + 2) if (f"{name}-{n}" if n > 1 else name) not in names)
    editor = YamlEditor(text)
    editor.add_item(keys, {new_item.name_key: f"{name}-{number}" if number > 1 else name, new_item.typed_key: value})
    return editor.text()


def remove_item(text: str, typed: str, base: str, path: str) -> str:
    """Remove an item from a list of NEW_ITEMS, and return the text. typed: the text before the form's fields changed
    it. base: the text that the form was filled from."""
    list_path, _, number = path.rpartition(".")
    keys = split_path(path)
    if list_path not in NEW_ITEMS or not number.isdecimal():
        raise CannotEdit("the form can't remove this item")
    if value_at(parse_yaml(typed).value, keys[:-1]) != value_at(parse_yaml(base).value, keys[:-1]):
        raise CannotEdit("the list was changed in the text; press Check, then remove the item")
    editor = YamlEditor(text)
    editor.remove(keys)
    return editor.text()
