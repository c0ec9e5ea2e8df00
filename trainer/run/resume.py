"""Find the checkpoint to continue from, and check that it fits. Reads files, without torch.

`trainer/run/checkpoint.py` describes and writes checkpoints.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cache.runs.training_run import checkpoint_step, list_checkpoints
from cache.store.files import explained
from cache.store.json_checks import check_checksum, check_count, check_list, check_object, check_text, printable
from schemas.errors import DAMAGE, USAGE, LatentpressError
from schemas.json_records import parse_json
from schemas.regular_files import NOT_REGULAR, NotRegular, open_regular

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
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
    "data": "Run `latentpress train --set train.on_new_data=continue` to continue with the new data in a new order; or "
    "set train.set to the set of the checkpoint, to continue with it; or begin a new run, from this one's adapter: "
    "train.adapter.init.",
    "global batch": "Change train.accumulate so that batch_size x accumulate x processes is as before.",
    "transformer": "Set model.path, model.flavour or model.revision back.",
}
HINTS["random numbers"] = "Continue with the release that began the run, whose noise was another."
HINTS["shuffle_shards"] = "Set train.shuffle_shards back, and train.set to the shards that the run began with."
HINTS["base weights"] = HINTS["transformer"]
HINTS["initial adapter"] = "Set train.adapter.init back, or its file."
HINTS["assistant"] = "Set model.assistant back, or its file."
#: Hashes in the signature -> the message in place of their values.
HASHES = {
    "transformer": "the transformer has another shape",
    "base weights": "training starts from other weights",
    "initial adapter": "train.adapter.init is another adapter, or none",
    "assistant": "model.assistant is another adapter, or none",
}


class ResumeError(LatentpressError):
    """A checkpoint that this configuration can't continue."""

    exit_code = USAGE


class NoUsableCheckpoint(LatentpressError):
    """A run whose checkpoints are all damaged."""

    exit_code = DAMAGE


@dataclass(frozen=True)
class Checkpoint:
    """A folder, its state.json, and the names of its files."""

    path: Path
    state: dict[str, Any]
    files: tuple[str, ...]

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
        checksums = check_object(_read_object(path / MANIFEST_FILE).get("files"), "files")
        state = _read_object(path / STATE_FILE)
        if file_checksum(path / STATE_FILE) != checksums.get(STATE_FILE):
            raise ValueError(f"{STATE_FILE} is damaged: its checksum does not match {MANIFEST_FILE}")
        version = check_count(state.get("format_version"), "format_version")
        if version != FORMAT_VERSION:
            raise ResumeError(
                f"{path} has format version {version}; this release reads {FORMAT_VERSION}",
                "Choose another train.run, or continue with the release that wrote it.",
            )
        _check_state(state, checkpoint_step(path))
        needed = (TRAINABLE_FILE, OPTIMIZER_FILE, *state["weights"], *state.get("shards", ()))
        for name in dict.fromkeys((*needed, *checksums)):
            if not _FILE_PATTERN.fullmatch(name):
                raise ValueError(f"{name!r} is not a file of a checkpoint")
            expected = check_checksum(checksums.get(name), f"the checksum of {name}")
            if not (path / name).is_file():
                raise ValueError(f"it has no {name}")
            if verify and file_checksum(path / name) != expected:
                raise ValueError(f"{name} is damaged: its checksum is another")
    return Checkpoint(path, state, (MANIFEST_FILE, *checksums))


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint. ValueError says why it can't be read."""
    try:
        with open_regular(path) as file:
            return check_object(parse_json(file.read()), "the whole")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"it has no {path.name}") from error
    except NotRegular as error:
        raise ValueError(f"{path.name} {NOT_REGULAR}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} can't be read ({error})") from error


def _check_state(state: Mapping[str, Any], step: int) -> None:
    """ValueError for a value of state.json that training can't go on with."""
    if check_count(state.get("step"), "step") != step:
        raise ValueError(f"{STATE_FILE} is that of step {state['step']}")
    averaged = check_object(state.get("terms"), "terms").get("ema") is not None
    for key in ("bad total", "epoch", "ema updates"):
        check_count(state.get(key, None if averaged and key == "ema updates" else 0), key)
    for change in check_list(state.get("data changes", []), "data changes"):
        check_text(check_object(change, "a change of data").get("set"), "the set before a change of data")
        if check_count(change.get("step"), "the step of a change of data") > step:
            raise ValueError("a change of data is of a later step")
    for number in check_list(state.get("bad steps", []), "bad steps"):
        check_count(number, "a bad step")
    if type(state.get("validation due", False)) is not bool:
        raise ValueError("validation due is neither true nor false")
    for name, values in check_object(state.get("methods", {}), "methods").items():
        check_object(values, f"the state of {name}")
    for file, names in check_object(state.get("weights"), "weights").items():
        for key in check_object(names, f"the weights in {file}").values():
            check_text(key, f"the name of a weight in {file}")
    for name in check_list(state.get("shards", []), "shards"):
        check_text(name, "a shard's name")


def write_manifest(folder: Path) -> None:
    """Write the checksums of all files below `folder`, which is a finished checkpoint but for that."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: file_checksum(folder / name) for name in names if name != MANIFEST_FILE}
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=1))


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_signature(
    checkpoint: Checkpoint,
    signature: Mapping[str, Any],
    new_data: bool = False,
    describe_data: Callable[[str], Iterable[str]] = lambda before: (),
) -> None:
    """ResumeError with every difference between the checkpoint's signature and this one. Keys that `signature` lacks
    are not compared, so most can be compared before a model is loaded; but for "assistant", which means that there is
    none. new_data: whether the data may be others. describe_data: lines that say how the data differ from the set with
    this id."""
    saved = checkpoint.state["terms"]
    current = {"assistant": None} | json.loads(json.dumps(dict(signature)))  # tuples become lists, as in the file
    if new_data:
        current["data"] = saved.get("data")
        if isinstance(saved.get("shuffle_shards"), dict) and isinstance(current.get("shuffle_shards"), dict):
            current["shuffle_shards"]["rows of shards"] = saved["shuffle_shards"].get("rows of shards")
    different = [key for key in sorted(current) if _comparable(key, saved.get(key)) != _comparable(key, current[key])]
    if different:
        lines = [line for key in different for line in _describe_difference(key, saved.get(key), current[key])]
        if "data" in different and isinstance(saved.get("data"), dict):
            lines += [f"    {line}" for line in describe_data(str(saved["data"].get("set")))]
        hints = {key: f"Set {setting} back." for key, setting in SETTINGS.items()} | HINTS
        steps = dict.fromkeys(hints[key] for key in different if key in hints)
        message = f"{checkpoint.path} can't be continued with this configuration:"
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
    """The part that is compared: of the data its digest, as another set may have the same samples."""
    return value.get("digest") if key == "data" and isinstance(value, dict) else value
