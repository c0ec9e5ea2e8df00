"""Which checkpoint a run goes on from, and whether it may: answered from files, without torch.

`trainer/checkpoint.py` says what a checkpoint is and writes it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cache.files import explained
from cache.json_checks import check_checksum, check_count, check_list, check_object, parse_json, printable
from schemas.errors import DAMAGE, USAGE, LatentpressError

FORMAT_VERSION = 2
STATE_FILE, TRAINABLE_FILE, OPTIMIZER_FILE = "state.json", "trainable.safetensors", "optimizer.safetensors"
_STEP_PATTERN = re.compile(r"step-([0-9]{1,18})", re.ASCII)
NEW_RUN_HINT = "Or choose another train.run to begin a new one."
#: What to do about a difference in one of the terms.
HINTS = {
    "data": "Set train.set to the set that the run was trained on to go on with it.",
    "global batch": "Change train.accumulate so that batch_size x accumulate x processes is as before.",
    "transformer": "Set model.path, model.flavour or model.revision back.",
}
HINTS["base weights"] = HINTS["transformer"]
#: Terms that are hashes, and what is said of them instead of their values.
HASHED_TERMS = {
    "transformer": "the transformer has another shape",
    "base weights": "the weights that training starts from are others",
}


class ResumeError(LatentpressError):
    """A checkpoint that can't be continued with this configuration."""

    exit_code = USAGE


class NoUsableCheckpoint(LatentpressError):
    """A run of which no checkpoint is whole."""

    exit_code = DAMAGE


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its state.json."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint's folder, and what is wrong with it."""

    path: Path
    reason: str


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` by their steps, the newest last. Temporaries of killed processes are left out."""
    with explained(str(folder)):
        found = [path for path in folder.glob("step-*") if _STEP_PATTERN.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_parse_step)


def _parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_checkpoint(folder: Path, verify: bool = False) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """The newest checkpoint that is whole, and the newer ones that are not. CheckpointDamage where there are some and
    none is whole; ResumeError for one of another release.

    verify: compare the checksums of the weights too, which reads them; otherwise they need only be there.
    """
    damaged: list[DamagedCheckpoint] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_checkpoint(path, verify), damaged
        except ValueError as error:
            damaged.append(DamagedCheckpoint(path, printable(error)))
    if damaged:
        said = "; ".join(f"{one.path.name}: {one.reason}" for one in damaged)
        raise NoUsableCheckpoint(
            f"no checkpoint in {folder} is whole ({said})",
            "Copy one back there, or remove that folder to begin the run again, or choose another train.run.",
        )
    return None, []


def read_checkpoint(path: Path, verify: bool) -> Checkpoint:
    """The checkpoint in `path`. ValueError with what is wrong where it is not what was written."""
    with explained(str(path)):
        try:
            state = check_object(parse_json((path / STATE_FILE).read_bytes()), "the whole")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ValueError(f"it has no {STATE_FILE}") from error
        except ValueError as error:
            raise ValueError(f"{STATE_FILE} can't be read ({error})") from error
        if check_count(state.get("format_version"), "format_version") != FORMAT_VERSION:
            raise ResumeError(
                f"{path} has format version {state['format_version']}; this release reads {FORMAT_VERSION}",
                "Choose another train.run, or continue with the release that wrote it.",
            )
        _check_state(state, _parse_step(path))
        for name in (TRAINABLE_FILE, OPTIMIZER_FILE):
            if not (path / name).is_file():
                raise ValueError(f"it has no {name}")
            if verify and file_checksum(path / name) != state["files"][name]:
                raise ValueError(f"{name} is damaged: its checksum does not match {STATE_FILE}")
    return Checkpoint(path, state)


def _check_state(state: Mapping[str, Any], step: int) -> None:
    """ValueError where state.json is not that of a checkpoint of `step`."""
    if check_count(state.get("step"), "step") != step:
        raise ValueError(f"{STATE_FILE} is that of step {state['step']}")
    check_object(state.get("terms"), "terms")
    files = check_object(state.get("files"), "files")
    for name in (TRAINABLE_FILE, OPTIMIZER_FILE):
        check_checksum(files.get(name), f"the checksum of {name}")
    check_count(state.get("bad total", 0), "bad total")
    for number in check_list(state.get("bad steps", []), "bad steps"):
        check_count(number, "a bad step")


def file_checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def check_signature(found: Checkpoint, terms: Mapping[str, Any]) -> None:
    """Raise ResumeError, naming every difference, unless the checkpoint was made on these terms. Terms that are not
    among `terms` are not compared, so some can be compared before a model is loaded."""
    saved = found.state["terms"]
    wanted = json.loads(json.dumps(dict(terms)))  # as it reads after a round trip: tuples are lists
    different = [key for key in sorted(wanted) if _comparable(key, saved.get(key)) != _comparable(key, wanted[key])]
    if different:
        lines = [line for key in different for line in _describe_difference(key, saved.get(key), wanted[key])]
        steps = [HINTS.get(key, f"Set {TERM_SETTINGS[key]} back." if key in TERM_SETTINGS else "") for key in different]
        message = f"{found.path} can't be continued with this configuration:"
        steps = [step for step in dict.fromkeys(steps) if step]
        raise ResumeError("\n".join([message, *lines]), " ".join([*steps, NEW_RUN_HINT]))


#: term -> the setting that decides it.
TERM_SETTINGS = {
    "family": "model.family",
    "task": "model.flavour",
    "seed": "train.seed",
    "caption_dropout": "train.caption_dropout",
    "shift": "train.shift",
    "adapter": "train.adapter",
}


def _describe_difference(key: str, saved: Any, wanted: Any) -> list[str]:
    """A difference in words: old and new value of each setting."""
    name = TERM_SETTINGS.get(key, key)
    if key in HASHED_TERMS:
        return [f"  {HASHED_TERMS[key]}"]
    if key == "data":
        return [f"  what it is trained on: {_describe_data(saved)} in the checkpoint, {_describe_data(wanted)} now"]
    if isinstance(saved, dict) and isinstance(wanted, dict):
        parts = sorted(part for part in saved.keys() | wanted.keys() if saved.get(part) != wanted.get(part))
        return [
            line for part in parts for line in _describe_difference(f"{name}.{part}", saved.get(part), wanted.get(part))
        ]
    return [f"  {name}: {_format_value(saved)} in the checkpoint, {_format_value(wanted)} now"]


def _format_value(value: Any) -> str:
    return "default" if value is None else printable(json.dumps(value))


def _comparable(key: str, value: Any) -> Any:
    """Of the data, its digest: another set may hold the same."""
    return value.get("digest") if key == "data" and isinstance(value, dict) else value


def _describe_data(value: Any) -> str:
    if not isinstance(value, dict):
        return "unknown"
    return printable(f"set {value.get('set')} with {value.get('samples')} samples and {value.get('captions')} captions")
