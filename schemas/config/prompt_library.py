"""Prompts in a separate file, validation.prompts_file: YAML, JSON, or text with one prompt a line.

YAML and JSON: name -> prompt, or name -> a section with the options of `validation.prompts`; or a list of such
sections. Text: names are made of the prompts' words. `<word>` in a prompt or a name is replaced by a value of
validation.placeholders; "<<" is a "<". A "<" without such a word is unchanged.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.config.section import NAME_PATTERN
from schemas.config.yaml_reader import MAX_CHARACTERS, Document, YamlError, parse_yaml
from schemas.regular_files import open_regular

FORMATS = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".txt": "text"}
PLACEHOLDER = re.compile(r"<<|<([A-Za-z][A-Za-z0-9_-]*)>")
NAME_CHARACTERS = 40  # most characters of a name made of a prompt's words
TEXTS = ("name", "prompt", "negative_prompt")  # in which placeholders are replaced


@dataclass
class LibraryPrompt:
    """values: fields of an item of validation.prompts, not checked yet. line: first line of the prompt in the file.
    lines: key -> line."""

    values: dict[str, Any]
    line: int
    lines: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        name = self.values.get("name")
        return f"prompt {name!r}" if isinstance(name, str) else "a prompt"


class PromptLibraryError(ValueError):
    """problems: (line from 1, message) of each."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        super().__init__("; ".join(f"line {line}: {message}" for line, message in problems))
        self.problems = problems


def read_prompts(path: Path, placeholders: Mapping[str, str]) -> list[LibraryPrompt]:
    """The prompts of a file, placeholders replaced and paths of images absolute. PromptLibraryError contains all
    problems except invalid values, which the checks of the configuration find."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise PromptLibraryError([(1, f"{path.name!r} has no valid suffix; valid: {', '.join(FORMATS)}")])
    text = _read_text(path)
    prompts = list(_text_prompts(text)) if kind == "text" else list(_structured_prompts(_parse(text, kind)))
    if not prompts:
        raise PromptLibraryError([(1, "contains no prompt; add one, or remove validation.prompts_file")])
    problems, first = list[tuple[int, str]](), dict[str, int]()
    for prompt in prompts:
        problems += _replace_placeholders(prompt, placeholders)
        name, image = prompt.values.get("name"), prompt.values.get("image")
        if isinstance(name, str) and first.setdefault(name, prompt.line) != prompt.line:
            problem = f"{prompt.describe()} has the name of the prompt in line {first[name]}; choose a different name"
            problems.append((prompt.line, problem))
        if isinstance(image, str) and image and "://" not in image:
            prompt.values["image"] = os.path.abspath(path.parent / os.path.expanduser(image))
    if problems:
        raise PromptLibraryError(problems)
    return prompts


def _read_text(path: Path) -> str:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise PromptLibraryError([(1, f"is not UTF-8 text (byte {error.start}); save it as UTF-8")]) from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; correct validation.prompts_file"
        raise PromptLibraryError([(1, problem)]) from error
    except ValueError as error:  # a zero byte in the name
        raise PromptLibraryError([(1, f"cannot be read: {error}")]) from error
    if len(text) > MAX_CHARACTERS:
        raise PromptLibraryError([(1, f"is longer than {MAX_CHARACTERS:,} characters; shorten it")])
    return text


def _parse(text: str, kind: str) -> Document:
    if kind == "json":
        try:
            json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise PromptLibraryError([(line, f"not valid JSON: {getattr(error, 'msg', 'nested too deep')}")]) from error
        text = text.replace("\t", " ")  # JSON has no tabs inside texts; YAML does not accept tabs between values
    try:
        return parse_yaml(text)
    except YamlError as error:
        raise PromptLibraryError(error.problems) from error


def _structured_prompts(document: Document) -> Iterator[LibraryPrompt]:
    content, lines = document.value, document.lines
    if not isinstance(content, dict | list) and content is not None:
        problem = (
            "is not a list of prompts; valid: names with their prompts, or a list of sections with name and prompt"
        )
        raise PromptLibraryError([(1, problem)])
    entries = content.items() if isinstance(content, dict) else enumerate(content or ())
    for key, value in entries:
        key_lines = {path[1]: line for path, line in lines.items() if len(path) == 2 and path[0] == key}
        values = dict(value) if isinstance(value, dict) else {"prompt": value}
        if isinstance(content, dict):
            if "name" in values:
                problem = f"{key}.name: the prompt has the name {key!r} by its key; remove `name`"
                raise PromptLibraryError([(key_lines["name"], problem)])
            values = {"name": key, **values}
        elif not isinstance(value, dict):
            problem = f"item {int(key) + 1} of the list is not a section; write a section with name and prompt"
            raise PromptLibraryError([(lines[key,], problem)])
        yield LibraryPrompt(values, lines[key,], {str(name): line for name, line in key_lines.items()})


def _text_prompts(text: str) -> Iterator[LibraryPrompt]:
    for number, line in enumerate(text.split("\n"), 1):  # the reader has made "\n" of all line ends
        prompt = line.strip()
        if "\0" in prompt:
            raise PromptLibraryError([(number, "a zero byte is not a valid character; save the file as UTF-8")])
        if prompt and not prompt.startswith("#"):
            yield LibraryPrompt({"name": name_of(prompt), "prompt": prompt}, number)


def name_of(prompt: str) -> str:
    """A name made of the prompt's words only, independent of other prompts. Long names are cut and end with a hash."""
    words = re.sub(r"[^a-z0-9]+", "-", PLACEHOLDER.sub(lambda match: match[1] or "", prompt).lower()).strip("-")
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:6]
    if not words:
        return f"prompt-{digest}"
    return words if len(words) <= NAME_CHARACTERS else f"{words[:NAME_CHARACTERS].rstrip('-')}-{digest}"


def _replace_placeholders(prompt: LibraryPrompt, placeholders: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    for key in TEXTS:
        if not isinstance(text := prompt.values.get(key), str):
            continue
        for match in PLACEHOLDER.finditer(text):
            if match[1] is not None and match[1] not in placeholders:
                valid = ", ".join(f"<{name}>" for name in placeholders) or "none"
                problem = f"{prompt.describe()}: <{match[1]}> is not in validation.placeholders (valid: {valid})"
                step = f"add `{match[1]}` to it, or write <<{match[1]}> for the text <{match[1]}>"
                yield prompt.lines.get(key, prompt.line), f"{problem}; {step}"
        values = {name: _name_part(value) if key == "name" else value for name, value in placeholders.items()}
        prompt.values[key] = _fill(text, values)


def _fill(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: "<" if match[1] is None else values.get(match[1], match[0]), text)


def _name_part(value: str) -> str:
    """A placeholder's value inside a name; characters that are not valid in names become "-"."""
    return value if re.fullmatch(NAME_PATTERN, value) else re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-")
