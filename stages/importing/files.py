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

from schemas.config.yaml_reader import MAX_CHARACTERS, parse_yaml
from schemas.errors import USAGE, LatentpressError
from schemas.regular_files import open_regular
from stages.importing.shell import ASSIGNMENT, as_arguments, read_options, read_script
from stages.media.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS

PROGRAM = "(program)"  # key of a command's program among its options
DEEPEST = 50  # levels of lists and sections
LARGEST = 2**63  # of whole numbers
WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")


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
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters")
        parsed = _parse(path, text)
        _check(parsed.content)
    except (OSError, ValueError, RecursionError) as error:
        why = "lists or sections are nested too deep" if isinstance(error, RecursionError) else str(error)
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else why
        raise ImportConfigError(f"{path} can't be read: {why}", "Name the configuration's files.") from error
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


def _check(value: Any, depth: int = 0) -> None:
    """ValueError for what no configuration has, RecursionError for deep nesting."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(item, depth + 1)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("a whole number has more than 19 digits")
    elif isinstance(value, str):
        value.encode()  # no half of a surrogate pair
        if "\0" in value:
            raise ValueError("a text has a zero byte")


@dataclass
class Beside:
    """Files that a configuration names, with paths from a folder that it does not say: `base`, if given, else the first
    of the configuration's folder and the two above it in which the file is. target: folder of the configuration that is
    written."""

    configuration: Path
    base: Path | None
    target: Path
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
        """The content of a file: parsed JSON, TOML or YAML, else its text; None if it is not found."""
        file = self.find(path) or self.find(f"{path}.toml")
        if file is None or not file.is_file():
            return None
        self.read_paths.append(file)
        return read_file(file).content

    def place(self, text: str, look: bool = True) -> str:
        """The path for the new configuration: relative if it is below `target`, else absolute. look: whether to look
        for the file; without `look`, or if no file is found, the path starts at the folder of the configuration."""
        if "://" in text or not text or WINDOWS_PATH.match(text):
            return text
        start = self.found_in or self.folders[0]
        whole = (self.find(text) if look else None) or Path(os.path.normpath(start / os.path.expanduser(text)))
        return f"./{whole.relative_to(self.target)}" if whole.is_relative_to(self.target) else str(whole)

    def count_media(self, datasets: Sequence[Mapping[str, Any]]) -> float | None:
        """Draws of an epoch, files x (repeats + 1), of datasets as they are written; None if a folder can't be counted
        here."""
        total = 0.0
        for dataset in (dataset for dataset in datasets if not dataset.get("disabled")):
            folder, video = self.target / str(dataset.get("instance_data_dir", "")), dataset.get("video", {})
            if not folder.is_dir() or video.get("clip_selection") in ("chunks", "slide"):
                return None
            endings = IMAGE_EXTENSIONS + (VIDEO_EXTENSIONS if dataset.get("dataset_type") == "video" else ())
            count = sum(name.lower().endswith(endings) for _, _, names in os.walk(folder) for name in names)
            resolutions = dataset.get("resolution")
            count *= video.get("clips_per_video", 1) * (len(resolutions) if isinstance(resolutions, list) else 1)
            total += count * (dataset.get("repeats", 0) + 1) * dataset.get("weight", 1)
        return total or None
