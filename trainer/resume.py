"""Find the checkpoint to continue from, and check that it fits. Reads files, without torch.

`trainer/checkpoint.py` describes and writes checkpoints.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cache.files import explained
from cache.json_checks import check_checksum, check_count, check_list, check_object, check_text, parse_json, printable
from cache.training_run import checkpoint_step, list_checkpoints
from schemas.errors import DAMAGE, USAGE, LatentpressError

FORMAT_VERSION = 4
STATE_FILE, TRAINABLE_FILE, OPTIMIZER_FILE = "state.json", "trainable.safetensors", "optimizer.safetensors"
_FILE_PATTERN = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)  # inside the checkpoint
NEW_RUN_HINT = "Or choose another train.run to begin a new one."
#: Key of the resume signature -> its setting.
SETTINGS = {
    "family": "model.family",
    "task": "model.flavour",
    "seed": "train.seed",
    "shuffle_shards": "train.shuffle_shards",
    "caption_dropout": "train.caption_dropout",
    "shift": "train.shift",
    "batch size": "train.batch_size",
    "timesteps": "train.timesteps",
    "loss": "train.loss",
    "methods": "train.methods",
    "adapter": "train.adapter",
    "optimizer": "train.optimizer.name",
    "weight_precision": "train.weight_precision",
    "ema": "train.ema",
    "base_precision": "train.base_precision",
}
#: Of the other keys: what to do about a difference.
HINTS = {
    "data": "Set train.set to the set that the run was trained on to go on with it.",
    "global batch": "Change train.accumulate so that batch_size x accumulate x processes is as before.",
    "transformer": "Set model.path, model.flavour or model.revision back.",
}
HINTS["random numbers"] = "Continue with the release that began the run, whose noise was another."
HINTS["shuffle_shards"] = "Set train.shuffle_shards back, and train.set to the shards that the run began with."
HINTS["base weights"] = HINTS["transformer"]
HINTS["initial adapter"] = "Set train.adapter.init back, or its file."
#: Hashes in the signature -> the message in place of their values.
HASHES = {
    "transformer": "the transformer has another shape",
    "base weights": "training starts from other weights",
    "initial adapter": "train.adapter.init is another adapter, or none",
}


class ResumeError(LatentpressError):
    """A checkpoint that this configuration can't continue."""

    exit_code = USAGE


class NoUsableCheckpoint(LatentpressError):
    """A run whose checkpoints are all damaged."""

    exit_code = DAMAGE


@dataclass(frozen=True)
class Checkpoint:
    """A folder and its state.json."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]


def newest_checkpoint(folder: Path, verify: bool = False) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest intact checkpoint, and of newer damaged ones the folder and the reason. NoUsableCheckpoint where all
    are damaged; ResumeError for one of another release.

    verify: read the weights and compare their checksums; otherwise they need only exist.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_checkpoint(path, verify), damaged
        except ValueError as error:
            damaged.append((path, printable(error)))
    if damaged:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
        raise NoUsableCheckpoint(
            f"no checkpoint in {folder} is intact ({reasons})",
            "Copy one back there, or remove that folder to begin the run again, or choose another train.run.",
        )
    return None, []


def read_checkpoint(path: Path, verify: bool) -> Checkpoint:
    """The checkpoint in `path`. ValueError with the reason where it is damaged."""
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
        if check_count(state.get("step"), "step") != checkpoint_step(path):
            raise ValueError(f"{STATE_FILE} is that of step {state['step']}")
        check_object(state.get("terms"), "terms")
        checksums = check_object(state.get("files"), "files")
        check_count(state.get("bad total", 0), "bad total")
        for number in check_list(state.get("gradient noise", []), "gradient noise"):
            if not isinstance(number, float):
                raise ValueError("gradient noise has a value that is no number")
        for number in check_list(state.get("bad steps", []), "bad steps"):
            check_count(number, "a bad step")
        for file, names in check_object(state.get("weights"), "weights").items():
            for key in check_object(names, f"the weights in {file}").values():
                check_text(key, f"the name of a weight in {file}")
        parts = [check_text(name, "a shard's name") for name in check_list(state.get("shards", []), "shards")]
        for name in dict.fromkeys((TRAINABLE_FILE, OPTIMIZER_FILE, *state["weights"], *parts)):
            if not _FILE_PATTERN.fullmatch(name):
                raise ValueError(f"{name!r} is not a file of a checkpoint")
            expected = check_checksum(checksums.get(name), f"the checksum of {name}")
            if not (path / name).is_file():
                raise ValueError(f"it has no {name}")
            if verify and file_checksum(path / name) != expected:
                raise ValueError(f"{name} is damaged: its checksum does not match {STATE_FILE}")
    return Checkpoint(path, state)


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_signature(found: Checkpoint, signature: Mapping[str, Any]) -> None:
    """ResumeError with every difference between the checkpoint's signature and this one. Keys that `signature` lacks
    are not compared, so most can be compared before a model is loaded."""
    saved = found.state["terms"]
    current = json.loads(json.dumps(dict(signature)))  # tuples become lists, as in the file
    different = [key for key in sorted(current) if _comparable(key, saved.get(key)) != _comparable(key, current[key])]
    if different:
        lines = [line for key in different for line in _describe_difference(key, saved.get(key), current[key])]
        hints = {key: f"Set {setting} back." for key, setting in SETTINGS.items()} | HINTS
        steps = dict.fromkeys(hints[key] for key in different if key in hints)
        message = f"{found.path} can't be continued with this configuration:"
        raise ResumeError("\n".join([message, *lines]), " ".join([*steps, NEW_RUN_HINT]))


def _describe_difference(key: str, saved: Any, current: Any) -> list[str]:
    name = "training data" if key == "data" else SETTINGS.get(key, key)
    if key in HASHES:
        return [f"  {HASHES[key]}"]
    if key != "data" and isinstance(saved, dict) and isinstance(current, dict):
        lines = []
        for part in sorted(saved.keys() | current.keys()):
            if saved.get(part) != current.get(part):
                lines += _describe_difference(f"{name}.{part}", saved.get(part), current.get(part))
        return lines
    return [f"  {name}: {_format_value(key, saved)} in the checkpoint, {_format_value(key, current)} now"]


def _format_value(key: str, value: Any) -> str:
    if key != "data":
        nothing = "not used" if re.fullmatch(r"train\.methods\.\w+", key) else "default"
        return nothing if value is None else printable(json.dumps(value))
    if not isinstance(value, dict):
        return "unknown"
    return printable(f"set {value.get('set')} with {value.get('samples')} samples and {value.get('captions')} captions")


def _comparable(key: str, value: Any) -> Any:
    """Of the data its digest, as another set may have the same samples."""
    return value.get("digest") if key == "data" and isinstance(value, dict) else value
