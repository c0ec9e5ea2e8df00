"""The configuration page: the text with the errors at their lines, next to a form that changes the same text. The form
has groups of fields made from the JSON Schema, and lists to which items can be added; values from the form are written
into the text."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cache.store.files import explained, replacing
from schemas.catalog import FAMILIES
from schemas.config.generated import json_schema
from schemas.config.loading import ConfigError, parse_config, read_text
from schemas.config.yaml_editor import CannotEdit, YamlEditor, read_values, value_at
from schemas.config.yaml_reader import KeyPath, YamlError, parse_yaml
from schemas.errors import LatentpressError
from stages.pages.ui.app import Page, Site, get, read_form, render, serve_file, site_of
from stages.pages.ui.child_programs import Refused

Schema = Mapping[str, Any]
FLAVOUR = "model.flavour"
FOLDERS = ("instance_data_dir", "conditioning_data", "mask_data", "media_root")  # options with a browser for folders
MAX_NAME = 24  # characters of a new item's name


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
    def is_folder(self) -> bool:
        return self.name in FOLDERS

    @property
    def is_set(self) -> bool:
        return bool(self.value) or self.is_text_only


@dataclass
class Group:
    """A section: its own fields and the sections in it. is_item: whether the section is an item of a list of NEW_ITEMS
    and can be removed. adds: lists in the section to which items can be added."""

    path: str
    title: str
    fields: list[Field] = field(default_factory=list)
    groups: list["Group"] = field(default_factory=list)
    is_item: bool = False
    is_hidden: bool = False
    adds: list[NewItem] = field(default_factory=list)

    @property
    def is_set(self) -> bool:
        return any(field_.is_set for field_ in self.all_fields())

    def all_fields(self) -> Iterator[Field]:
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
    return form


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
    for field_ in group.fields:
        text = f"{field_.path} {field_.about}".casefold()
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


PATH = "/configuration"
FIELD = "field:"  # prefix of a field's path in the form's names


def show(request: Request) -> Response:
    return _render(request, read_text(site_of(request).options.config), request.query_params)


def _render(
    request: Request,
    text: str,
    query: Mapping[str, str],
    message: str = "",
    problems: tuple[str, ...] = (),
    status: int = 200,
) -> Response:
    """query: query parameters: "find", search words for fields, and "only_set". problems: messages about changes that
    were not made."""
    site = site_of(request)
    find, only_set = query.get("find", ""), "only_set" in query
    form = _form_of(text)
    if form is not None:
        search(form, find, only_set)
    saved = read_text(site.options.config)
    return render(
        request,
        "configuration.html",
        status,
        title="Configuration",
        text=text,
        form=form,
        find=find,
        only_set=only_set,
        errors=find_errors(site, text),
        stamp=_stamp(saved),
        is_saved=text == saved,
        overrides=site.options.overrides,
        message=message,
        problems=problems,
        field=FIELD,
    )


def _form_of(text: str) -> Group | None:
    try:
        return build_form(text)
    except YamlError:
        return None


def find_errors(site: Site, text: str) -> list[tuple[int, str]]:
    """Returns (line, error message) pairs, with the messages of the command line. The line is 0 if the error is not at
    a line of this text."""
    path = site.options.config
    try:
        parse_config(text, path, site.options.overrides, lambda file: why_not_read(site, file))
    except ConfigError as error:
        pattern = re.compile(rf"{re.escape(str(path))}:(\d+): (.*)", re.DOTALL)
        matches = [(pattern.fullmatch(line), line) for line in error.errors]
        return [(int(match[1]), match[2]) if match else (0, line) for match, line in matches]
    except LatentpressError as error:
        return [(0, error.message)]
    return []


def why_not_read(site: Site, file: Path) -> str:
    """The reason why the page does not read a prompts file, or "" if it may. Error messages repeat parts of a prompts
    file. So a file that only a request names is not opened, unless it is in a folder that this page reads anyway."""
    if str(file) == site.config().validation.prompts_file:
        return ""
    folders = [site.options.config.absolute().parent, site.output]
    folders += [Path(site.root)] if "://" not in site.root else []
    try:
        target = file.resolve()
        if not target.is_symlink() and any(target.is_relative_to(folder.resolve()) for folder in folders):
            return ""
    except (OSError, RuntimeError):  # links in a circle; Python 3.13 returns one of the links instead
        pass
    allowed_folders = "root, output and the configuration's folder"
    return f"is outside of {allowed_folders}, and this page reads only files in them; move it there, or edit it by hand"


def _stamp(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


async def check(request: Request) -> Response:
    """Answer with the text after the form's changes, and its errors; nothing is written."""
    return await run_in_threadpool(_answer, request, await read_form(request), save=False)


async def save(request: Request) -> Response:
    """Like `check`, and write the file if it has no errors and did not change since the page was loaded."""
    return await run_in_threadpool(_answer, request, await read_form(request), save=True)


def _answer(request: Request, form_values: Mapping[str, str], save: bool) -> Response:
    site = site_of(request)
    text, base = (form_values.get(name, "").replace("\r\n", "\n") for name in ("text", "base"))
    fields = {name.removeprefix(FIELD): value for name, value in form_values.items() if name.startswith(FIELD)}
    typed = text
    text, problems = apply_changes(text, base, fields)
    text = _change_lists(text, typed, base, form_values, problems)
    errors, message = find_errors(site, text), ""
    if save and not problems:
        if problem := _refuse(site.options.config, errors, form_values.get("stamp", "")):
            problems.append(problem)
        else:
            message = _write(site.options.config, text, problems)
    status = 409 if save and problems else 200
    if "application/json" not in request.headers.get("accept", ""):
        return _render(request, text, form_values, message, tuple(problems), status)
    form = _form_of(text)
    fields_now = {} if form is None else {field_.path: field_ for field_ in form.all_fields()}
    values = {path: field_.value for path, field_ in fields_now.items()}
    choices = {path: fields_now[path].choices for path in (FLAVOUR,) if path in fields_now}
    answer = {"text": text, "errors": errors, "values": values, "choices": choices, "problems": problems}
    return JSONResponse(
        answer | {"message": message, "stamp": _stamp(text) if message else form_values.get("stamp", "")}, status
    )


def _change_lists(text: str, typed: str, base: str, form_values: Mapping[str, str], problems: list[str]) -> str:
    """Add or remove the item that a button of the form names. typed: the text before the form's fields changed it."""
    try:
        if (path := form_values.get("add", "")) in NEW_ITEMS:
            if not (value := form_values.get(f"new:{path}", "").strip()):
                raise CannotEdit(f"nothing was added: fill in {NEW_ITEMS[path].label!r} first")
            return add_item(text, path, value)
        if path := form_values.get("remove", ""):
            return remove_item(text, typed, base, path)
    except YamlError:
        problems.append("nothing was added or removed: the text is not valid YAML")
    except CannotEdit as error:
        problems.append(str(error))
    return text


def _refuse(path: Path, errors: list[tuple[int, str]], stamp: str) -> str:
    """The reason why the text is not saved; "" if it can be saved."""
    if errors:
        return f"not saved: the text has {len(errors)} error{'s' if len(errors) > 1 else ''}"
    if _stamp(read_text(path)) != stamp:
        return "not saved: the file has changed since this page was loaded; copy your text, and load this page again"
    return ""


def _write(path: Path, text: str, problems: list[str]) -> str:
    target = Path(os.path.realpath(path))
    try:
        with explained(str(target)), replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
            temporary.chmod(target.stat().st_mode & 0o777)
    except LatentpressError as error:
        problems.append(f"not saved: {error.message}")
        return ""
    return f"saved to {path}; programs that are started now use it"


def set_options(site: Site, values: Mapping[KeyPath, Any]) -> None:
    """Write options into the project's file. Raises Refused if it can't be changed, or would not be valid."""
    path = site.options.config
    step = "change it on the page Settings"
    try:
        editor = YamlEditor(read_text(path))
        for key, value in values.items():
            editor.set(key, json.dumps(value, ensure_ascii=False))
        text = editor.text()
    except (YamlError, CannotEdit) as error:
        raise Refused(f"{path} can't be changed: {error}", step) from error
    problems = [message for _, message in find_errors(site, text)]
    if not problems:
        _write(path, text, problems)
    if problems:
        raise Refused(f"{path} was not changed: {problems[0]}", step)


PAGE = Page(
    "Configuration",
    PATH,
    (
        get(PATH, show),
        serve_file(f"{PATH}/script.js", "configuration.js"),
        Route(f"{PATH}/check", check, methods=["POST"]),
        Route(f"{PATH}/save", save, methods=["POST"]),
    ),
)
