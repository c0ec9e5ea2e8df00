"""Files of other trainers: parsed by their content, never run, and found next to each other."""

import io
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from schemas.config.yaml_reader import MAX_CHARACTERS, YamlError, parse_yaml
from schemas.errors import USAGE, LatentpressError
from schemas.regular_files import open_regular
from stages.importing.shell import ASSIGNMENT, ScriptError, as_arguments, read_options, read_script
from stages.media.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS

PROGRAM = "(program)"  # key of a command's program among its options
MOST_FILES = 1_000_000  # that are counted
DEEPEST = 50  # levels of lists and sections
LARGEST = 2**63  # of whole numbers


class ImportConfigError(LatentpressError, ValueError):
    """A configuration that can't be imported."""

    exit_code: ClassVar[int] = USAGE


@dataclass
class Parsed:
    """content: dicts and lists; the options or assignments of a shell script; else the text. problems: (place, why) of
    what was not read."""

    path: Path
    content: Any
    problems: Sequence[tuple[str, str]] = ()


def read_file(path: Path) -> Parsed:
    """The content of a JSON, TOML, YAML or shell file. Raises ImportConfigError."""
    step = "Name the configuration's files."
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        why = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ImportConfigError(f"{path} can't be read: {why}", step) from error
    if len(text) > MAX_CHARACTERS:
        raise ImportConfigError(f"{path} is longer than {MAX_CHARACTERS:,} characters", step)
    try:
        parsed = _parse(path, text)
        _check(parsed.content)
    except YamlError as error:
        line, why = error.problems[0]
        raise ImportConfigError(f"{path}:{line}: {why}") from error
    except json.JSONDecodeError as error:
        raise ImportConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except tomllib.TOMLDecodeError as error:
        raise ImportConfigError(f"{path}: not valid TOML: {error}") from error
    except ScriptError as error:
        raise ImportConfigError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        why = "lists or sections are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ImportConfigError(f"{path}: {why}", step) from error
    return parsed


def _parse(path: Path, text: str) -> Parsed:
    ending = path.suffix.lower()
    if ending == ".json" or (not ending and text.lstrip().startswith(("{", "["))):
        return Parsed(path, json.loads(text))
    if ending == ".toml":
        return Parsed(path, tomllib.loads(text))
    if ending in (".yaml", ".yml"):
        return Parsed(path, parse_yaml(re.sub(r"\A---\s*$", "", text, count=1, flags=re.M)).value)
    if ending in (".env", ".sh", ".bash") or _looks_like_shell(text):
        script = read_script(text)
        if not script.command:
            return Parsed(path, as_arguments(script), script.problems)
        program = next((word for word in script.command if word.endswith(".py")), "")
        return Parsed(path, {PROGRAM: program, **read_options(script.command)}, script.problems)
    return Parsed(path, text)


def _looks_like_shell(text: str) -> bool:
    """A command with its program, or assignments; prompts of a text file have options behind them, too."""
    program = text.find(".py ")
    has_options = program >= 0 and text.find(" --", program) >= 0
    return text.startswith("#!") or has_options or bool(ASSIGNMENT.match(text.lstrip()))


def _check(content: Any) -> None:
    """ValueError for what no configuration has: deep nesting, very large numbers, a zero byte."""
    level = [content]
    for _ in range(DEEPEST):
        if not level:
            return
        for item in level:
            if isinstance(item, int) and abs(item) > LARGEST:
                raise ValueError("a whole number has more than 19 digits")
            if isinstance(item, str) and "\0" in item:
                raise ValueError("a text has a zero byte")
        lists = [item for item in level if isinstance(item, list)]
        sections = [item for item in level if isinstance(item, dict)]
        level = [inner for item in lists for inner in item]
        level += [inner for item in sections for pair in item.items() for inner in pair]
    raise RecursionError


@dataclass
class Beside:
    """Files that a configuration names, with paths from a folder that it does not say: `base`, if given, else the first
    of the configuration's folder and the two above it in which the file is."""

    configuration: Path
    base: Path | None
    read_paths: list[Path] = field(default_factory=list)
    found_in: Path | None = None  # the folder from which a path was found

    @property
    def folders(self) -> list[Path]:
        here = self.configuration.absolute().parent
        return [self.base.absolute()] if self.base else [here, here.parent, here.parent.parent]

    def find(self, name: str) -> Path | None:
        given = Path(os.path.expanduser(name))
        for folder in self.folders:
            if os.path.exists(folder / given):  # False for a name that no file can have
                self.found_in = self.found_in or (None if given.is_absolute() else folder)
                return Path(os.path.normpath(folder / given))
        beside = self.folders[0] / given.name
        return beside if os.path.isfile(beside) else None

    def read(self, path: str) -> Any:
        file = self.find(path) or self.find(f"{path}.toml")
        if file is None or not file.is_file():
            return None
        self.read_paths.append(file)
        return read_file(file).content

    def place(self, text: str, look: bool = True) -> str:
        """A path as an absolute one: where it is, if it is looked for, else from the folder that paths start at."""
        if "://" in text or not text:
            return text
        file = self.find(text) if look else None
        return str(file or os.path.normpath((self.found_in or self.folders[0]) / os.path.expanduser(text)))

    def count_media(self, datasets: Sequence[Mapping[str, Any]]) -> float | None:
        total = 0.0
        for dataset in (dataset for dataset in datasets if not dataset.get("disabled")):
            name, video = str(dataset.get("instance_data_dir", "")), dataset.get("video", {})
            folder = self.find(name) if "://" not in name else None
            if folder is None or not folder.is_dir() or video.get("clip") in ("chunks", "slide"):
                return None
            endings = IMAGE_EXTENSIONS + (VIDEO_EXTENSIONS if dataset.get("dataset_type") == "video" else ())
            count = sum(
                name.lower().endswith(endings) for _, _, names in os.walk(folder) for name in names[:MOST_FILES]
            )
            resolutions = dataset.get("resolution")
            count *= video.get("clips", 1) * (len(resolutions) if isinstance(resolutions, list) else 1)
            total += count * (dataset.get("repeats", 0) + 1) * dataset.get("weight", 1)
        return total or None
