"""Read pipeline.yaml: overrides applied, relative paths resolved, every error with its file, line and key.

Relative paths in the configuration (and in --set) are relative to the folder of the configuration file. URLs
(`s3://...`, `memory://...`) are unchanged; `file://` is a path. `model.path` and the places of a model's parts may name
a repo: they are unchanged unless such a path exists or they begin with "." or "~".

`python -m schemas.config.loading` prints the JSON Schema that editors use.
"""

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML

from schemas.config.encoding import PART_OPTIONS, PUBLISHED
from schemas.config.pipeline import Config
from schemas.config.prompt_library import LibraryPrompt, PromptLibraryError, read_prompts
from schemas.config.section import ONE_TAG, PATTERNS, SEVERAL_TAG, InconsistentValues, Problem, Section
from schemas.config.training import URL_ADVICE
from schemas.config.yaml_reader import MAX_CHARACTERS, MAX_DEPTH, Document, KeyPath, YamlError, parse_yaml
from schemas.errors import USAGE, LatentpressError
from schemas.regular_files import open_regular
from schemas.text_format import shorten, suggest


def dotted_path(path: KeyPath) -> str:
    return ".".join(map(str, path))


def section_fields(section: type[Section]) -> dict[str, Any]:
    """The section's keys as written in YAML, and their types."""
    return {info.alias or name: info.annotation for name, info in section.model_fields.items()}


def type_at(path: KeyPath) -> Any:
    """The type of the value at `path` ("datasets", 0, "id"); None if the key does not exist."""
    kind: Any = Config
    for step in path:
        if isinstance(step, int):
            kind = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
        else:
            kind = section_fields(kind).get(step) if is_section(kind) else None
        if get_origin(kind) in (Union, UnionType):
            kind = next(inner for inner in get_args(kind) if inner is not type(None))
    return kind


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def find_sections_with(key: str, section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """The sections that have a key of this name, as dotted paths."""
    for name, kind in section_fields(section).items():
        if name == key:
            yield prefix or "the top level"
        inner, item = (get_args(kind)[0], ".N") if get_origin(kind) is tuple else (kind, "")
        if is_section(inner):
            yield from find_sections_with(key, inner, f"{prefix}.{name}{item}".lstrip("."))


def explain_error(error: ErrorDetails) -> list[Problem]:
    """The problems of one pydantic error, in words."""
    path = tuple(step for step in error["loc"] if step not in (ONE_TAG, SEVERAL_TAG))
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, InconsistentValues):
        return [((*path, *steps), message) for steps, message in cause.problems]
    if cause is not None:
        return [(path, str(cause))]
    if error["type"] == "too_short" and error["input"]:
        return []  # pydantic does not count invalid items, which have errors of their own
    return [(path, _describe(error["type"], path, error["input"], context, error["msg"]))]


def _describe(kind: str, path: KeyPath, value: Any, context: Mapping[str, Any], message: str) -> str:
    if kind == "extra_forbidden":
        key, valid = str(path[-1]), list(section_fields(type_at(path[:-1])))
        if path[0] == "notify" and key in ("url", "webhook_url"):
            return f"unknown key, use url_env; {URL_ADVICE}"
        if hint := suggest(key, valid):
            return f"unknown key{hint}"
        if sections := list(find_sections_with(key)):
            return f"unknown key; it is an option of {' or '.join(sections)}"
        return f"unknown key; valid: {', '.join(valid)}"
    if kind == "missing":
        return "an item is missing" if isinstance(path[-1], int) else "is required; add it"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{_format_value(value)} is not valid{suggest(value, choices)}; valid: {', '.join(choices)}"
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
        return f"{expected}; write each item after '- '" if kind == "tuple_type" else expected
    if kind in ("model_type", "model_attributes_type"):
        section = type_at(path)
        return f"expected a section, got {_format_value(value)}; valid keys: {', '.join(section_fields(section))}"
    if kind == "too_short":
        return "is empty; add at least one item"
    if kind == "string_too_short":
        return "is empty; set it, or remove it"
    if kind in _LIMITS:
        return f"{_format_value(value)} is not valid; valid: {_LIMITS[kind].format(**context)}"
    return f"{message.removeprefix('Input ')}, got {_format_value(value)}"


_EXPECTED_TYPES = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "an integer",
    "string_type": "text",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "less than {lt:g}",
    "multiple_of": "multiples of {multiple_of:g}",
    "string_too_long": "at most {max_length} characters",
}
_PYTHON_TYPES: dict[str, Any] = {"bool_type": bool, "float_type": (int, float), "int_type": int}


def _format_value(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} items" if len(value) != 1 else "a list of one item"
    text = shorten(repr(value))
    if isinstance(value, bool):
        return text.lower()
    return f"the text {text}" if isinstance(value, str) else text


def parse_override(text: str) -> tuple[str, Any]:
    """Read "train.optimizer.lr=1e-4" as ("train.optimizer.lr", 0.0001); the value is YAML.

    ValueError if "=" or the key is missing, or if the value is not valid YAML.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ValueError("is not KEY=VALUE; write for example train.optimizer.lr=1e-4")
    if key.count(".") >= MAX_DEPTH:
        raise ValueError(f"has more than {MAX_DEPTH} parts")
    try:
        return key, parse_yaml(value).value
    except YamlError as error:
        message = error.problems[0][1]
        needs_quotes = message.startswith(("not valid YAML", "tag "))
        raise ValueError(f"{message}; put the value in quotes" if needs_quotes else message) from error


def set_value(config: dict[str, Any], key: str, value: Any) -> KeyPath:
    """Put `value` at `key` into nested dicts and lists, in place; returns the key's path.

    Missing sections are created. Items of a list are addressed by id, name or number (from 0). ValueError if the
    path leads through a plain value or to a missing item.
    """
    holder: Any = config
    step: Any
    path: KeyPath = ()
    words = key.split(".")
    while words:
        step, words = (words[0], words[1:]) if isinstance(holder, dict) else _find_item(holder, words, path)
        path = (*path, step)
        if not words:
            holder[step] = value
            break
        inner = holder[step] if isinstance(holder, list) else holder.get(step)
        if inner is None:
            if get_origin(type_at(path)) is tuple:
                name = dotted_path(path)
                raise ValueError(f"the list {name} is not in the file; set the whole list: {name}=[...]")
            inner = holder[step] = {}
        holder = inner
    return path


def _find_item(items: Any, words: Sequence[str], path: KeyPath) -> tuple[int, list[str]]:
    """The item of the list that the first words address (an id may contain dots), and the remaining words."""
    if not isinstance(items, list):
        raise ValueError(
            f"{dotted_path(path)} is the value {items!r}, not a section; remove the further parts of the key"
        )
    names = [item.get("id", item.get("name")) if isinstance(item, dict) else None for item in items]
    for count in range(len(words), 0, -1):
        if (name := ".".join(words[:count])) in names:
            return names.index(name), list(words[count:])
    if words[0].isdecimal() and int(words[0]) < len(items):
        return int(words[0]), list(words[1:])
    valid = [str(name) for name in names if name is not None] + [str(i) for i in range(len(items))]
    hint = f"valid: {', '.join(valid)}" if valid else "the list is empty"
    raise ValueError(f"{dotted_path(path)} has no item {words[0]!r}; {hint}")


MAX_ERRORS = 100  # most errors to explain: finding similar keys takes a millisecond per error
PORTABLE_PATHS = ("instance_data_dir", "caption_file")  # paths that identify a dataset


class ConfigError(LatentpressError, ValueError):
    """An invalid configuration; `errors` has one line per problem."""

    exit_code: ClassVar[int] = USAGE

    def __init__(self, errors: Sequence[str], next_step: str = "") -> None:
        super().__init__("\n".join(errors), next_step)
        self.errors = list(errors)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "errors": self.errors}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file `path` and apply `overrides` ("train.steps=10").

    ConfigError contains every error found, in the form "pipeline.yaml:17: train.optimizer.lr: message".
    """
    path = Path(path)
    return parse_config(read_text(path), path, overrides)


def parse_config(
    text: str, path: Path, overrides: Sequence[str] = (), find_read_obstacle: Callable[[Path], str] = lambda file: ""
) -> Config:
    """Like `load_config`, for a text that is or will be the content of the file `path`. find_read_obstacle: function
    that returns the reason why a file named in the text must not be opened, or "" if it may be opened."""
    try:
        document = parse_yaml(text)
    except YamlError as error:
        raise ConfigError([f"{path}:{line}: {message}" for line, message in error.problems[:MAX_ERRORS]]) from error
    if document.value is None:
        document.value = {}
    if not isinstance(document.value, dict):
        raise ConfigError([f"{path}:1: expected keys and values; valid keys: {', '.join(section_fields(Config))}"])
    set_paths: dict[KeyPath, str] = {}  # path of each override -> its key as written
    errors = []
    for override in overrides:
        try:
            key, value = parse_override(override)
            set_paths[set_value(document.value, key, value)] = key
        except ValueError as error:
            errors.append(f"--set {override.partition('=')[0].strip()}: {error}")
    _drop_empty_sections(document.value, Config)
    portable = [_portable_paths(dataset, path.absolute().parent) for dataset in _list_items(document.value, "datasets")]
    _resolve_paths(document.value, path.absolute().parent)
    library, prompt_errors = _add_library(document.value, find_read_obstacle)
    errors += prompt_errors
    try:
        config = Config.model_validate(document.value)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [problem for detail in details[:MAX_ERRORS] for problem in explain_error(detail)]
        located = {
            library.locate(*problem) or _locate_error(path, document, set_paths, *problem) for problem in problems
        }
        errors += [line for _, line in sorted(located)]
        if len(details) > MAX_ERRORS:
            errors.append(f"{path}: {len(details) - MAX_ERRORS} further errors")
    if errors:
        raise ConfigError(errors)
    for dataset, paths in zip(config.datasets, portable, strict=True):
        dataset._portable_paths.update(paths)
    return config


def dump_yaml(config: Config) -> str:
    """The configuration with its defaults, as YAML from which `load_config` reads an equal one."""
    out = io.StringIO()
    yaml = YAML(pure=True)
    yaml.width = 4096
    yaml.dump(config.model_dump(mode="json", by_alias=True), out)
    return out.getvalue()


@dataclass(frozen=True)
class _Library:
    """The prompts of validation.prompts_file, which are the items of validation.prompts from number `first` on."""

    file: str = ""
    first: int = 0
    prompts: Sequence[LibraryPrompt] = ()

    def locate(self, path: KeyPath, message: str) -> tuple[int, str] | None:
        """The line to sort by, and the error with its place in the file; None if the error is in a different file."""
        if path[:2] != ("validation", "prompts") or len(path) < 3 or not isinstance(path[2], int):
            return None
        if not self.first <= path[2] < self.first + len(self.prompts):
            return None
        prompt, inner = self.prompts[path[2] - self.first], path[3:]
        line = prompt.lines.get(str(inner[0]), prompt.line) if inner else prompt.line
        key = f"{dotted_path(inner)}: " if inner else ""
        return line, f"{self.file}:{line}: {prompt.describe()}: {key}{message}"


def _add_library(config: dict[str, Any], find_read_obstacle: Callable[[Path], str]) -> tuple[_Library, list[str]]:
    """Append the prompts of validation.prompts_file to validation.prompts. Returns the prompts and the errors."""
    section = config.get("validation")
    file = section.get("prompts_file") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(file, str) or not file:
        return _Library(), []
    if "://" in file:
        return _Library(), [f"validation.prompts_file: {file!r} is a URL; set it to a file on this machine"]
    if obstacle := find_read_obstacle(Path(file)):
        return _Library(), [f"validation.prompts_file: {file!r} {obstacle}"]
    values = section.get("placeholders")
    texts = {key: value for key, value in values.items() if isinstance(value, str)} if isinstance(values, dict) else {}
    try:
        prompts = read_prompts(Path(file), texts)
    except PromptLibraryError as error:
        return _Library(), [f"{file}:{line}: {message}" for line, message in error.problems[:MAX_ERRORS]]
    inline = section.get("prompts")
    if inline is not None and not isinstance(inline, list):
        return _Library(), []  # an error that the checks of the configuration report
    section["prompts"] = [*(inline or []), *(prompt.values for prompt in prompts)]
    return _Library(file, len(inline or []), prompts), []


def read_text(path: Path) -> str:
    """Read a configuration file. From a file that is too long, only enough is read for the parser to report this.
    ConfigError if the file can't be read."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            return file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError as error:
        raise ConfigError([f"{path}: no such file"], _advise_missing(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8"]) from error
    except IsADirectoryError as error:
        raise ConfigError([f"{path}: is a folder"], "Name the YAML file in it with --config.") from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except ValueError as error:  # a zero byte in the name
        raise ConfigError([f"{str(path)!r}: cannot be read: {error}"]) from error


def _advise_missing(path: Path) -> str:
    """Name the configuration with the most similar name in the folder, if there is one."""
    files = {file.stem: file for file in sorted(path.parent.glob("[!.]*.y*ml")) if _has_datasets(file)}
    if nearest := get_close_matches(path.stem, files, n=1, cutoff=0.0):
        return f"Did you mean --config {files[nearest[0]]}?"
    return "`latentpress new FOLDER` writes one for a folder of media; or name yours with --config."


def _has_datasets(path: Path) -> bool:
    with suppress(ConfigError):
        return "datasets" in read_text(path)
    return False


def _locate_error(
    file: Path, document: Document, set_paths: dict[KeyPath, str], path: KeyPath, message: str
) -> tuple[int, str]:
    """The line to sort by, and the error after its location: the --set option that caused it, or file and line."""
    for set_path, key in set_paths.items():
        if path == set_path or (set_path[: len(path)] == path and path not in document.lines):
            return 0, f"--set {key}: {message}"
        if path[: len(set_path)] == set_path:
            return 0, f"--set {key}: {dotted_path(path)}: {message}"
    located = next(path[:n] for n in range(len(path), -1, -1) if path[:n] in document.lines)
    line = document.lines[located]
    return line, f"{file}:{line}: {dotted_path(path)}: {message}"


def _drop_empty_sections(value: Any, kind: Any) -> None:
    """Remove sections in which every key is commented out; YAML reads them as null."""
    if is_section(kind) and isinstance(value, dict):
        for key, inner in section_fields(kind).items():
            if is_section(inner) and key in value and value[key] is None:
                del value[key]
            _drop_empty_sections(value.get(key), inner)
    elif get_origin(kind) is tuple and isinstance(value, list):
        for item in value:
            _drop_empty_sections(item, get_args(kind)[0])


def _resolve_paths(config: dict[str, Any], folder: Path) -> None:
    def absolute(text: str) -> str:
        text = text.removeprefix("file://")
        return text if "://" in text else os.path.abspath(folder / os.path.expanduser(text))

    def absolute_if_exists(text: str) -> str:
        path = absolute(text)
        return path if text.startswith((".", "~")) or os.path.exists(path) else text

    _map_texts(config, ("root", "output"), absolute)
    config.setdefault("output", absolute("output"))
    _map_texts(config.get("model"), ("path", *PART_OPTIONS), absolute_if_exists)
    _map_texts(config.get("model"), ("assistant",), lambda text: text if text == PUBLISHED else absolute(text))
    for section in ("vision", "features", "caption", "masks"):
        _map_texts(config.get(section), ("model",), absolute_if_exists)
    _map_texts(config.get("train"), ("set",), lambda text: absolute(text) if "/" in text else text)
    train = config.get("train")
    _map_texts(train.get("adapter") if isinstance(train, dict) else None, ("init_from",), absolute)
    _map_texts(train.get("local_cache") if isinstance(train, dict) else None, ("folder",), absolute)
    for dataset in _list_items(config, "datasets"):
        may_be_repo = isinstance(dataset, dict) and dataset.get("source") == "huggingface"
        _map_texts(dataset, ("instance_data_dir",), absolute_if_exists if may_be_repo else absolute)
        _map_texts(dataset, ("media_root", "caption_file", "conditioning_data", "mask_data", "face_detector"), absolute)
    validation = config.get("validation")
    _map_texts(validation, ("prompts_file",), absolute)
    _map_texts(validation.get("scores") if isinstance(validation, dict) else None, ("clip",), absolute_if_exists)
    _map_texts(validation, ("preview_autoencoder",), absolute_if_exists)
    _map_texts(validation.get("adapter") if isinstance(validation, dict) else None, ("path",), absolute)
    for prompt in _list_items(config.get("validation"), "prompts"):
        _map_texts(prompt, ("image",), absolute)


def _portable_paths(dataset: Any, folder: Path) -> dict[str, str]:
    """A dataset's PORTABLE_PATHS, relative to the configuration's folder if they are relative in the file or below
    this folder, so that a project can be moved. URLs are without their query, which may be a signature."""
    portable = dict[str, str]()
    for key in PORTABLE_PATHS:
        text = dataset.get(key) if isinstance(dataset, dict) else None
        if isinstance(text, str) and text:
            text = text.removeprefix("file://")
            path = Path(os.path.expanduser(text)) if "://" not in text else Path()
            location = path.relative_to(folder) if path.is_relative_to(folder) else path
            portable[key] = text.partition("?")[0] if "://" in text else os.path.normpath(location)
    return portable


def _list_items(section: Any, key: str) -> list[Any]:
    items = section.get(key) if isinstance(section, dict) else None
    return items if isinstance(items, list) else []


def _map_texts(section: Any, keys: Sequence[str], change: Callable[[str], str]) -> None:
    """Change the texts at `keys`, and the texts in lists there; validation reports other values."""

    def change_text(value: Any) -> Any:
        return change(value) if isinstance(value, str) and value else value

    for key in keys if isinstance(section, dict) else ():
        value = section.get(key)
        if isinstance(value, str | list):
            section[key] = [*map(change_text, value)] if isinstance(value, list) else change_text(value)
