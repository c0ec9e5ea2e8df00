"""The configuration: its text with the errors at their lines, beside a form that changes the same text."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import xxhash
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cache.store.files import explained, replacing
from schemas.config.loading import ConfigError, parse_config, read_text
from schemas.config.yaml_editor import CannotEdit
from schemas.config.yaml_reader import YamlError
from schemas.errors import LatentpressError
from stages.pages.ui.app import Page, Site, get, read_form, render, serve_file, site_of
from stages.pages.ui.config_form import (
    FLAVOUR,
    NEW_ITEMS,
    Group,
    build_form,
    changed_text,
    search,
    with_item,
    without_item,
)

PATH = "/configuration"
FIELD = "field:"  # before the path of each in the form


def show(request: Request) -> Response:
    return _render(request, read_text(site_of(request).options.config), request.query_params)


def _render(
    request: Request,
    text: str,
    asked: Mapping[str, str],
    message: str = "",
    problems: tuple[str, ...] = (),
    status: int = 200,
) -> Response:
    """asked: "find", words of the fields that are shown, and "only_set". problems: what was not done."""
    site = site_of(request)
    find, only_set = asked.get("find", ""), "only_set" in asked
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
    """(line, or 0 where it is not in the text; what is wrong), as programs say it."""
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
    typed = text
    text, problems = changed_text(text, base, fields)
    text = _change_lists(text, typed, base, given, problems)
    errors, message = find_errors(site, text), ""
    if save and not problems:
        if problem := _refuse(site.options.config, errors, given.get("stamp", "")):
            problems.append(problem)
        else:
            message = _write(site.options.config, text, problems)
    status = 409 if save and problems else 200
    if "application/json" not in request.headers.get("accept", ""):
        return _render(request, text, given, message, tuple(problems), status)
    form = _form_of(text)
    fields_now = {} if form is None else {field_.path: field_ for field_ in form.all_fields()}
    values = {path: field_.value for path, field_ in fields_now.items()}
    choices = {path: fields_now[path].choices for path in (FLAVOUR,) if path in fields_now}
    answer = {"text": text, "errors": errors, "values": values, "choices": choices, "problems": problems}
    return JSONResponse(
        answer | {"message": message, "stamp": _stamp(text) if message else given.get("stamp", "")}, status
    )


def _change_lists(text: str, typed: str, base: str, given: Mapping[str, str], problems: list[str]) -> str:
    """Add or remove the item that a button of the form names. typed: the text before the form's fields changed it."""
    try:
        if (path := given.get("add", "")) in NEW_ITEMS:
            if not (value := given.get(f"new:{path}", "").strip()):
                raise CannotEdit(f"nothing was added: fill in {NEW_ITEMS[path].label!r} first")
            return with_item(text, path, value)
        if path := given.get("remove", ""):
            return without_item(text, typed, base, path)
    except YamlError:
        problems.append("nothing was added or removed: the text is no YAML")
    except CannotEdit as error:
        problems.append(str(error))
    return text


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
