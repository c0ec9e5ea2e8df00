"""The configuration: its text with the errors at their lines, beside a form that changes the same text. The form has
groups of fields made from the JSON Schema, filled from the text, and written back into it."""

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
from schemas.config.yaml_editor import CannotEdit, read_values, set_value, value_at
from schemas.config.yaml_reader import KeyPath, YamlError, parse_yaml
from schemas.errors import LatentpressError
from stages.pages.ui.app import Page, Site, get, read_form, render, serve_file, site_of

Schema = Mapping[str, Any]
FLAVOUR = "model.flavour"
PATH = "/configuration"
FIELD = "field:"  # before the path of each in the form


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
    values = read_values(text, [split_path(field_.path) for field_ in fields])
    for field_ in fields:
        path = split_path(field_.path)
        written = values[path]
        field_.by_hand = written is None and value_at(value, path) is not None
        field_.value = "" if written is None else written
        if field_.path == FLAVOUR:
            _name_flavours(field_, value_at(value, ("model", "family")))
    _mark_set(form)
    return form


def _name_flavours(flavour: Field, family: Any) -> None:
    specs = [spec for name, spec in FAMILIES.items() if name == family] or list(FAMILIES.values())
    flavour.choices = [name for spec in specs for name in spec.flavours]
    flavour.default = specs[0].default_flavour if len(specs) == 1 else ""


def changed_text(text: str, base: str, given: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with the fields that are `given` others than `base`, the text that they were filled from, has them; and
    why some can't be written."""
    problems: list[str] = []
    try:
        fields = list(build_form(base).all_fields())
    except YamlError:
        return text, []  # there was no form
    for field_ in fields:
        value = given.get(field_.path, field_.value)
        if value == field_.value or field_.by_hand:
            continue
        try:
            text = set_value(text, split_path(field_.path), value if value.strip() else None, field_.is_text)
        except YamlError:
            problems.append(f"{field_.path}: {value!r} is no YAML, or the text is none")
        except CannotEdit as error:
            problems.append(f"{field_.path}: {error}")
    return text, problems


def split_path(path: str) -> KeyPath:
    return tuple(int(step) if step.isdecimal() else step for step in path.split(".")) if path else ()


@lru_cache(maxsize=1)
def _schema() -> Schema:
    return json_schema()


def _resolve(schema: Schema) -> Schema:
    """Follow a reference; of a section or null, return the section."""
    if "$ref" in schema:
        return _schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    others = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    return _resolve(others[0]) if len(others) == 1 and "$ref" in others[0] else schema


def _build_group(path: str, title: str, schema: Schema, value: Any) -> Group:
    group = Group(path, title)
    for name, given in schema["properties"].items():
        inner, key = _resolve(given), f"{path}.{name}".lstrip(".")
        current = value.get(name) if isinstance(value, dict) else None
        if "properties" in inner:
            group.groups.append(_build_group(key, name, inner, current))
        elif (item := _item_section(inner)) is not None:
            items = current if isinstance(current, list) else []
            for number, item_value in enumerate(items):
                item_name = next(
                    (item_value[key] for key in ("id", "name") if isinstance(item_value, dict) and key in item_value),
                    number,
                )
                group.groups.append(_build_group(f"{key}.{number}", f"{name}: {item_name}", item, item_value))
        else:
            group.fields.append(_build_field(key, name, given))
    return group


def _item_section(schema: Schema) -> Schema | None:
    """The section of a list of sections."""
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


def _mark_set(group: Group) -> None:
    for inner in group.groups:
        _mark_set(inner)
    group.is_set = any(field_.value or field_.by_hand for field_ in group.fields) or any(
        inner.is_set for inner in group.groups
    )


def show(request: Request) -> Response:
    return _render(request, read_text(site_of(request).options.config))


def _render(
    request: Request, text: str, message: str = "", problems: tuple[str, ...] = (), status: int = 200
) -> Response:
    """problems: what was not done."""
    site = site_of(request)
    return render(
        request,
        "configuration.html",
        status,
        title="Configuration",
        text=text,
        form=_form_of(text),
        errors=find_errors(site, text),
        stamp=_stamp(read_text(site.options.config)),
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
    """(line, or 0 where it is not in the text; what is wrong), as programs say it."""
    path = site.options.config
    try:
        parse_config(text, path, site.options.overrides, lambda file: _why_not_read(site, file))
    except ConfigError as error:
        pattern = re.compile(rf"{re.escape(str(path))}:(\d+): (.*)", re.DOTALL)
        matches = [(pattern.fullmatch(line), line) for line in error.errors]
        return [(int(match[1]), match[2]) if match else (0, line) for match, line in matches]
    except LatentpressError as error:
        return [(0, error.message)]
    return []


def _why_not_read(site: Site, file: Path) -> str:
    """Errors repeat parts of a prompts file. So none is opened because a request names it, unless it is where this page
    reads anyway, or the configuration that is in force names it."""
    if str(file) == site.config().validation.prompts_file:
        return ""
    folders = [site.options.config.absolute().parent, site.output]
    folders += [Path(site.root)] if "://" not in site.root else []
    try:
        target = file.resolve()
        if not target.is_symlink() and any(target.is_relative_to(folder.resolve()) for folder in folders):
            return ""
    except (OSError, RuntimeError):  # links in a circle, of which Python 3.13 returns one instead
        pass
    inside = "root, output and the configuration's folder"
    return f"is outside of {inside}, where this page reads nothing; put it there, or correct the file in an editor"


def _stamp(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


async def check(request: Request) -> Response:
    """The text with the form's changes, and its errors; nothing is written."""
    return await run_in_threadpool(_answer, request, await read_form(request), save=False)


async def save(request: Request) -> Response:
    """The same, and the file is written where there is no error and nobody changed it meanwhile."""
    return await run_in_threadpool(_answer, request, await read_form(request), save=True)


def _answer(request: Request, given: Mapping[str, str], save: bool) -> Response:
    site = site_of(request)
    text, base = (given.get(name, "").replace("\r\n", "\n") for name in ("text", "base"))
    fields = {name.removeprefix(FIELD): value for name, value in given.items() if name.startswith(FIELD)}
    text, problems = changed_text(text, base, fields)
    errors, message = find_errors(site, text), ""
    if save and not problems:
        if problem := _refuse(site.options.config, errors, given.get("stamp", "")):
            problems.append(problem)
        else:
            message = _write(site.options.config, text, problems)
    status = 409 if save and problems else 200
    if "application/json" not in request.headers.get("accept", ""):
        return _render(request, text, message, tuple(problems), status)
    form = _form_of(text)
    fields_now = {} if form is None else {field_.path: field_ for field_ in form.all_fields()}
    values = {path: field_.value for path, field_ in fields_now.items()}
    choices = {path: fields_now[path].choices for path in (FLAVOUR,) if path in fields_now}
    answer = {"text": text, "errors": errors, "values": values, "choices": choices, "problems": problems}
    return JSONResponse(
        answer | {"message": message, "stamp": _stamp(text) if message else given.get("stamp", "")}, status
    )


def _refuse(path: Path, errors: list[tuple[int, str]], stamp: str) -> str:
    """The reason for which it is not saved."""
    if errors:
        return f"it was not saved: it has {len(errors)} error{'s' if len(errors) > 1 else ''}"
    if _stamp(read_text(path)) != stamp:
        return "it was not saved: the file was changed meanwhile; copy your text, and load this page again"
    return ""


def _write(path: Path, text: str, problems: list[str]) -> str:
    target = Path(os.path.realpath(path))
    try:
        with explained(str(target)), replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
            temporary.chmod(target.stat().st_mode & 0o777)
    except LatentpressError as error:
        problems.append(f"it was not saved: {error.message}")
        return ""
    return f"saved to {path}; programs that are started now use it"


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
