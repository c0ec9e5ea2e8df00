"""Find the checkpoint to resume from, and check that it fits configuration and data. Reads files, without torch.

`trainer/run/checkpoint.py` describes and writes checkpoints. If a run continues on another training set
(`train.on_new_data: continue`), it keeps weights, optimizer, moving average, the number of steps and the position in
the learning rate's schedule, and the order of the samples starts again. state.json lists the changes of the data,
oldest first, and has the `held_out_digest` that was compared with the previous sets.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import ConfigDict, Field, NonNegativeInt

from cache.runs.training_run import checkpoint_step, list_checkpoints
from cache.sets import plans
from cache.sets.table_checks import SetRecord
from cache.sets.trainset import TrainSet
from cache.store.damage import DamageError
from cache.store.files import explained
from cache.store.json_checks import printable
from schemas.config.methods import method_option
from schemas.errors import DAMAGE, USAGE, LatentpressError
from schemas.identity import hash_bytes
from schemas.json_records import Record, read_record
from schemas.regular_files import NOT_REGULAR, NotRegular

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
STATE_FILE, TRAINABLE_FILE, OPTIMIZER_FILE = "state.json", "trainable.safetensors", "optimizer.safetensors"
CheckpointFile = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)?$")]
NEW_RUN_HINT = "Or choose another train.run to begin a new run."
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
#: Key of the resume signature that is not in SETTINGS -> next step for a difference.
HINTS = {
    "data": "Run `latentpress train --set train.on_new_data=continue` to continue with the new data in a new order; or "
    "set train.set to the set of the checkpoint to continue with it; or begin a new run from this run's adapter: "
    "train.adapter.init_from.",
    "global batch": "Change train.accumulate so that batch_size x accumulate x processes is as before.",
    "transformer": "Change model.path, model.flavour or model.revision back.",
}
HINTS["random numbers"] = "Continue with the release that started the run, which had another noise generator."
HINTS["shuffle_shards"] = "Change train.shuffle_shards back, and set train.set to the set that the run started with."
HINTS["base weights"] = HINTS["transformer"]
HINTS["initial adapter"] = "Change train.adapter.init_from or its file back."
HINTS["assistant"] = "Change model.assistant or its file back."
#: Key of a hash in the signature -> message that is shown instead of its values.
HASHES = {
    "transformer": "the transformer has a different shape",
    "base weights": "the base weights are different",
    "initial adapter": "train.adapter.init_from is a different adapter, or none",
    "assistant": "model.assistant is a different adapter, or none",
}


class ResumeError(LatentpressError):
    """Raised if a checkpoint can't be continued with this configuration."""

    exit_code = USAGE


class NoUsableCheckpoint(LatentpressError):
    """Raised if all checkpoints of a run are damaged."""

    exit_code = DAMAGE


class DataChange(Record):
    """A change of the training data. step: first step on the next set (from 0). set: id of the previous set."""

    step: NonNegativeInt
    set: str | None


class Manifest(Record):
    """manifest.json: file -> checksum."""

    files: dict[CheckpointFile, str]


class CheckpointState(Record):
    """state.json. terms: the resume signature. weights: file -> trained parameter -> key in the file. shards: files of
    a sharded model. methods: name -> state of the method. data_changes: changes of the data, oldest first.
    held_out_compared: the `held_out_digest` that was compared with the previous sets."""

    model_config = ConfigDict(strict=True)

    format_version: int = FORMAT_VERSION
    step: NonNegativeInt
    terms: dict[str, Any]
    weights: dict[CheckpointFile, dict[str, str]] = Field(default_factory=dict)
    shards: list[CheckpointFile] = Field(default_factory=list)
    epoch: NonNegativeInt = 0
    bad_steps: list[NonNegativeInt] = Field(default_factory=list)
    bad_total: NonNegativeInt = 0
    validation_due: bool = False
    ema_updates: NonNegativeInt = 0
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    data_changes: list[DataChange] = Field(default_factory=list)
    held_out_compared: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, and its state.json."""

    path: Path
    state: CheckpointState

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.state.step


def newest_checkpoint(folder: Path, verify: bool = False) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest intact checkpoint (None without checkpoints), and (folder, reason) for each newer checkpoint that is
    damaged. NoUsableCheckpoint if all checkpoints are damaged; ResumeError if another release wrote a checkpoint.

    verify: whether to read the weights and compare their checksums; if not, the files must only exist.
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
            "Copy an intact one to it, or remove that folder to begin the run again, or choose another train.run.",
        )
    return None, []


def read_checkpoint(path: Path, verify: bool) -> Checkpoint:
    """The checkpoint in `path`. ValueError with the reason if it is damaged."""
    with explained(str(path)):
        with _named(path / MANIFEST_FILE):
            checksums = Manifest.read(path / MANIFEST_FILE).files
        with _named(path / STATE_FILE):
            values = read_record(path / STATE_FILE)
        if (version := values.get("format_version")) != FORMAT_VERSION:
            raise ResumeError(
                f"{path} has format version {printable(version)}; this release reads {FORMAT_VERSION}",
                "Choose another train.run, or continue with the release that wrote it.",
            )
        state = CheckpointState.model_validate(values)
        if state.step != checkpoint_step(path):
            raise ValueError(f"{STATE_FILE} is for step {state.step}")
        for name in dict.fromkeys((TRAINABLE_FILE, OPTIMIZER_FILE, *state.weights, *state.shards, *checksums)):
            if name not in checksums or not (path / name).is_file():
                raise ValueError(f"it has no {name}")
            if (verify or name == STATE_FILE) and file_checksum(path / name) != checksums[name]:
                raise ValueError(f"{name} is damaged: its checksum does not match {MANIFEST_FILE}")
    return Checkpoint(path, state)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context that raises ValueError with the file's name if the file can't be read."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"it has no {path.name}") from error
    except NotRegular as error:
        raise ValueError(f"{path.name} {NOT_REGULAR}") from error


def write_manifest(folder: Path) -> None:
    """Write manifest.json with the checksums of all files below `folder`, a checkpoint that is otherwise complete."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: file_checksum(folder / name) for name in names if name != MANIFEST_FILE}
    Manifest(files=files).write(folder / MANIFEST_FILE)


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_signature(checkpoint: Checkpoint, signature: Mapping[str, Any], allows_new_data: bool = False) -> None:
    """ResumeError with every difference between the checkpoint's signature and `signature`. Keys that are missing in
    `signature` are not compared, so most keys can be compared before a model is loaded. A missing "assistant" is
    compared as None, since the run then has no assistant. allows_new_data: whether the training data may differ."""
    saved = checkpoint.state.terms
    current = {"assistant": None} | json.loads(json.dumps(dict(signature)))  # tuples become lists, as in the file
    if allows_new_data:
        current["data"] = saved.get("data")
        if isinstance(saved.get("shuffle_shards"), dict) and isinstance(current.get("shuffle_shards"), dict):
            current["shuffle_shards"]["rows of shards"] = saved["shuffle_shards"].get("rows of shards")
    different = [key for key in sorted(current) if _comparable(key, saved.get(key)) != _comparable(key, current[key])]
    if different:
        lines = [line for key in different for line in _describe_difference(key, saved.get(key), current[key])]
        hints = {key: f"Change {setting} back." for key, setting in SETTINGS.items()} | HINTS
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
                option = method_option(part) if key == "methods" else f"{name}.{part}"
                lines += _describe_difference(option, saved.get(part), current.get(part))
        return lines
    return [f"  {name}: {_format_value(key, saved)} in the checkpoint, {_format_value(key, current)} now"]


def _format_value(key: str, value: Any) -> str:
    if key != "data":
        nothing = "not used" if re.fullmatch(r"train\.(methods\.\w+|guidance)", key) else "default"
        return nothing if value is None else printable(json.dumps(value))
    if not isinstance(value, dict):
        return "unknown"
    return printable(f"set {value.get('set')} with {value.get('samples')} samples and {value.get('captions')} captions")


def _comparable(key: str, value: Any) -> Any:
    """The part of a value that is compared: for the data only the digest, because another set may have the same
    samples."""
    return value.get("digest") if key == "data" and isinstance(value, dict) else value


MAX_NAMED = 3  # samples in a message


def list_changes(checkpoint: Checkpoint, digest: str) -> list[DataChange]:
    """The changes of the data up to the next step. digest: digest of the data that the next step is trained on."""
    changes, data = list(checkpoint.state.data_changes), checkpoint.state.terms.get("data")
    if data is not None and data["digest"] != digest:
        changes.append(DataChange(step=checkpoint.step, set=data["set"]))
    return changes


def first_step(changes: Sequence[DataChange]) -> int:
    """The step at which the order of the current data begins."""
    return changes[-1].step if changes else 0


def held_out_digest(data: TrainSet) -> str:
    return hash_bytes(*(name.encode() for name in _held_out(data).to_pylist()))


def _held_out(data: TrainSet) -> pa.Array:
    return data.tables["index"].column("sample_id").slice(len(data)).combine_chunks()


def check_new_data(checkpoint: Checkpoint, data: TrainSet, changes: Sequence[DataChange]) -> None:
    """ResumeError if the data were encoded by other encoders than the previous sets, if they hold out samples that the
    run was trained on (at any resolution), or if a previous set is missing, so that this can't be checked."""
    compared = checkpoint.state.held_out_compared == held_out_digest(data)
    if not changes or (compared and changes == checkpoint.state.data_changes):
        return
    trained = []
    for change in changes:
        before = _open(data, str(change.set))
        if before is None:
            raise ResumeError(
                f"{checkpoint.path} was trained on set {change.set}, which is missing, so the encoders and held-out "
                f"samples of set {data.id} can't be compared with it",
                f"Restore {data.store.path('sets')}/{change.set}. {NEW_RUN_HINT}",
            )
        prints, new_prints = before.fingerprints, data.fingerprints
        if different := sorted(kind for kind in prints.keys() & new_prints.keys() if prints[kind] != new_prints[kind]):
            raise ResumeError(
                f"{checkpoint.path} can't be continued on set {data.id}: its shards of {' and '.join(different)} were "
                f"made with other models or settings than the shards of set {before.id}",
                f"Change the model and the sections text and latents back. {NEW_RUN_HINT}",
            )
        trained.append(before.tables["index"].column("sample_id").slice(0, len(before)).combine_chunks())
    held_out = _held_out(data)
    if not len(held_out):
        return
    samples = [plans.read_plan_table(data.store, name, "samples") for name in plans.list_plans(data.store)]
    plan_samples = pa.concat_tables([table.select(["sample_id", "media_id"]) for table in samples]) if samples else None
    ids = pa.concat_arrays(trained)
    overlap = held_out.filter(pc.is_in(_media_of(held_out, plan_samples), value_set=_media_of(ids, plan_samples)))
    if len(overlap):
        names = ", ".join(_name_samples(data, overlap.slice(0, MAX_NAMED).to_pylist()))
        raise ResumeError(
            f"set {data.id} holds out {len(overlap)} samples that this run was trained on: {names}"
            + (" ..." if len(overlap) > MAX_NAMED else ""),
            "Change `eval` and `eval_fraction` of the datasets back and run `latentpress run`, so that the eval loss "
            f"is measured on samples that the run never saw. {NEW_RUN_HINT}",
        )


def _open(data: TrainSet, id: str) -> TrainSet | None:
    try:
        return TrainSet(data.store, id, data.store.read_record(f"sets/{id}/set.json", SetRecord))
    except FileNotFoundError:
        return None


def _media_of(ids: pa.Array, plan_samples: pa.Table | None) -> pa.Array:
    """(n,) media ids of the samples `ids`; for a sample that is in no plan, the sample's id. plan_samples: the plans'
    samples with sample_id and media_id."""
    if plan_samples is None:
        return ids
    rows = pc.index_in(ids, value_set=plan_samples.column("sample_id").combine_chunks())
    return pc.coalesce(plan_samples.column("media_id").combine_chunks().take(rows), ids)


def _name_samples(data: TrainSet, ids: list[str]) -> list[str]:
    """ "dataset/path" of each sample in the plan; the id of a sample that is not in the plan."""
    try:
        active = plans.read_plan_table(data.store, data.meta.generation, "active")
    except DamageError:
        return ids
    rows = active.filter(pc.is_in(active.column("sample_id"), value_set=pa.array(ids))).to_pylist()
    paths = {row["sample_id"]: f"{row['dataset']}/{row['path']}" for row in rows}
    return [paths.get(name, name) for name in ids]
