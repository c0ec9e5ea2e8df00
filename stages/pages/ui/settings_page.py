"""The page Settings: the text of the configuration with the errors at their lines, next to a form that changes the same
text. The form has groups of fields made from the JSON Schema, and lists to which items can be added; values from the
form are written into the text."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cache.store.files import explained, replacing
from schemas.config.loading import ConfigError, parse_config, read_text
from schemas.config.yaml_editor import CannotEdit, YamlEditor
from schemas.config.yaml_reader import KeyPath, YamlError
from schemas.errors import LatentpressError
from stages.configuring.form import (
    FLAVOUR,
    NEW_ITEMS,
    PRESETS,
    Group,
    add_item,
    apply_changes,
    apply_preset,
    build_form,
    compare_preset,
    remove_item,
    search,
)
from stages.pages.ui.app import Page, Site, get, read_form, render, serve_file, site_of
from stages.pages.ui.child_programs import Refused

PATH = "/settings"
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
        "settings.html",
        status,
        title="Settings",
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
        presets={name: compare_preset(text, name) for name in PRESETS} if form is not None else {},
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
        if (preset := form_values.get("preset", "")) in PRESETS:
            return apply_preset(text, preset)
        if (path := form_values.get("add", "")) in NEW_ITEMS:
            if not (value := form_values.get(f"new:{path}", "").strip()):
                raise CannotEdit(f"nothing was added: fill in {NEW_ITEMS[path].label!r} first")
            return add_item(text, path, value)
        if path := form_values.get("remove", ""):
            return remove_item(text, typed, base, path)
    except YamlError:
        problems.append("nothing was changed: the text is not valid YAML")
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
    "Settings",
    PATH,
    (
        get(PATH, show),
        serve_file(f"{PATH}/script.js", "settings.js"),
        Route(f"{PATH}/check", check, methods=["POST"]),
        Route(f"{PATH}/save", save, methods=["POST"]),
    ),
)
