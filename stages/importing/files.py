"""Files of other trainers: parsed by their content, never run, and found beside each other."""

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
from stages.discovery.sources.base import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from stages.importing.shell import ASSIGNMENT, read_options, read_script

PROGRAM = "(program)"  # key of a command's program among its options
MOST_FILES = 1_000_000  # that are counted


class ImportConfigError(LatentpressError, ValueError):
    """A configuration that can't be imported."""

    exit_code: ClassVar[int] = USAGE


@dataclass
class Parsed:
    """content: dicts and lists; of a shell script its options or assignments; else the text. problems: (place, why) of
    what was not read."""

    path: Path
    content: Any
    problems: Sequence[tuple[str, str]] = ()


def read_file(path: Path) -> Parsed:
    """The content of a JSON, TOML, YAML or shell file, known by itself. ImportConfigError where it can't be read."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        why = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ImportConfigError(f"{path} can't be read: {why}", "Name the configuration's files.") from error
    if len(text) > MAX_CHARACTERS:
        raise ImportConfigError(
            f"{path} is longer than {MAX_CHARACTERS:,} characters", "Name the configuration's files."
        )
    return _parse(path, text)


def _parse(path: Path, text: str) -> Parsed:
    ending, why = path.suffix.lower(), ""
    if ending == ".json" or (not ending and text.lstrip().startswith(("{", "["))):
        try:
            return Parsed(path, json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise ImportConfigError(
                f"{path}:{line}: not valid JSON: {getattr(error, 'msg', 'nested too deep')}"
            ) from error
    if ending == ".toml":
        try:
            return Parsed(path, tomllib.loads(text))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ImportConfigError(f"{path}: not valid TOML: {error}") from error
    if ending in (".yaml", ".yml"):
        try:
            return Parsed(path, parse_yaml(re.sub(r"\A---\s*$", "", text, count=1, flags=re.M)).value)
        except YamlError as error:
            line, why = error.problems[0]
            raise ImportConfigError(f"{path}:{line}: {why}") from error
    if ending in (".env", ".sh", ".bash") or _looks_like_shell(text):
        script = read_script(text)
        if script.command:
            program = next((word for word in script.command if word.endswith(".py")), "")
            return Parsed(path, {PROGRAM: program, **read_options(script.command)}, script.problems)
        return Parsed(path, _with_extra_arguments(script.values), script.problems)
    return Parsed(path, text)


def _looks_like_shell(text: str) -> bool:
    """A command with its program, or assignments; prompts of a text file have options behind them, too."""
    return text.startswith("#!") or bool(re.search(r"\.py\b.* --", text, re.S)) or bool(ASSIGNMENT.match(text.lstrip()))


def _with_extra_arguments(values: Mapping[str, str]) -> dict[str, Any]:
    """Assignments of config.env, with the options in TRAINER_EXTRA_ARGS."""
    options: dict[str, Any] = dict(values)
    extra = options.pop("TRAINER_EXTRA_ARGS", "")
    return options | read_options(extra.split() if "'" not in extra and '"' not in extra else _words(extra))


def _words(text: str) -> list[str]:
    import shlex

    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


@dataclass
class Beside:
    """Files that a configuration names, with paths from a folder that it does not say: that of `base`, where given,
    else the first of the configuration's folder and those above in which the file is."""

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

    def place(self, text: str) -> str:
        """A path as an absolute one: where it is, else from the folder that paths start at."""
        if "://" in text or not text:
            return text
        file = self.find(text)
        return str(file or os.path.normpath((self.found_in or self.folders[0]) / os.path.expanduser(text)))

    def folders_in(self, path: str) -> list[str]:
        folder = self.find(path)
        return (
            sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if folder and folder.is_dir() else []
        )

    def count_media(self, datasets: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
        total = 0.0
        for dataset in datasets:
            if dataset.get("disabled"):
                continue
            name = str(dataset.get("instance_data_dir", ""))
            folder = self.find(name) if "://" not in name else None
            if folder is None or not folder.is_dir():
                return None, f"the files of {dataset.get('id')} can't be counted here"
            endings = IMAGE_EXTENSIONS + (VIDEO_EXTENSIONS if dataset.get("dataset_type") == "video" else ())
            count = sum(
                name.lower().endswith(endings) for _, _, names in os.walk(folder) for name in names[:MOST_FILES]
            )
            video, resolutions = dataset.get("video", {}), dataset.get("resolution")
            if video.get("clip") in ("chunks", "slide"):
                return None, f"how many clips {dataset.get('id')} has is seen when its videos are opened"
            count *= video.get("clips", 1)
            count *= len(resolutions) if isinstance(resolutions, list) else 1
            total += count * (dataset.get("repeats", 0) + 1) * dataset.get("weight", 1)
        return (total, "") if total else (None, "no file was counted")
