"""Files of other trainers. They are parsed but never run; files that a configuration names are found next to it."""

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
MAX_DEPTH = 50  # nested levels of lists and sections
MAX_INTEGER = 2**63
WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")


class ImportConfigError(LatentpressError, ValueError):
    """Raised if a configuration can't be imported."""

    exit_code: ClassVar[int] = USAGE


@dataclass
class Parsed:
    """A parsed file. content: dicts and lists; options or assignments of a shell script; the text of any other file.
    problems: (place, reason) of parts that were not read."""

    path: Path
    content: Any
    problems: Sequence[tuple[str, str]] = ()


def read_file(path: Path) -> Parsed:
    """Parse a JSON, TOML, YAML or shell file. Raises ImportConfigError."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters")
        parsed = _parse(path, text)
        _check(parsed.content)
    except (OSError, ValueError, RecursionError) as error:
        reason = "lists or sections are nested too deeply" if isinstance(error, RecursionError) else str(error)
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
        raise ImportConfigError(f"{path} can't be read: {reason}", "Name the configuration's files.") from error
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
    """Whether a text is a command with its program, or assignments. Options alone are not enough, because prompts in a
    text file have options, too."""
    program = text.find(".py ")
    has_options = program >= 0 and text.find(" --", program) >= 0
    return text.startswith("#!") or has_options or bool(ASSIGNMENT.match(text.lstrip()))


def _check(value: Any, depth: int = 0) -> None:
    """Raises ValueError for a value that is not valid in any configuration, RecursionError for deep nesting."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(item, depth + 1)
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError("an integer has more than 19 digits")
    elif isinstance(value, str):
        value.encode()  # raises for half of a surrogate pair
        if "\0" in value:
            raise ValueError("a text contains a zero byte")


@dataclass
class ReferencedFiles:
    """Files that a configuration names. Relative paths start at `base`; if it is None, at the first of the
    configuration's folder and the two folders above it that contains the file. target: folder of the new
    configuration."""

    configuration: Path
    base: Path | None
    target: Path
    read_paths: list[Path] = field(default_factory=list)
    found_in: Path | None = None  # the folder in which the first relative path was found

    @property
    def folders(self) -> list[Path]:
        folder = self.configuration.absolute().parent
        return [self.base.absolute()] if self.base else [folder, folder.parent, folder.parent.parent]

    def find(self, name: str) -> Path | None:
        path = Path(os.path.expanduser(name))
        for folder in self.folders:
            if os.path.exists(folder / path):  # False for an invalid file name
                self.found_in = self.found_in or (None if path.is_absolute() else folder)
                return Path(os.path.normpath(folder / path))
        neighbor = self.folders[0] / path.name
        return neighbor if os.path.isfile(neighbor) else None

    def read(self, path: str) -> Any:
        """Read a file: parsed JSON, TOML or YAML, or the text of any other file. None if it is not found."""
        file = self.find(path) or self.find(f"{path}.toml")
        if file is None or not file.is_file():
            return None
        self.read_paths.append(file)
        return read_file(file).content

    def convert_path(self, text: str, is_input: bool = True) -> str:
        """Convert a path for the new configuration: relative if it is below `target`, else absolute. is_input: whether
        the file is searched for. An output path, or a path without a file, starts at the folder of the
        configuration."""
        if "://" in text or not text or WINDOWS_PATH.match(text):
            return text
        start = self.found_in or self.folders[0]
        path = (self.find(text) if is_input else None) or Path(os.path.normpath(start / os.path.expanduser(text)))
        return f"./{path.relative_to(self.target)}" if path.is_relative_to(self.target) else str(path)

    def count_media(self, datasets: Sequence[Mapping[str, Any]]) -> float | None:
        """Count the samples of an epoch, files x (repeats + 1), of datasets of the new configuration; None if a folder
        can't be counted on this machine."""
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
