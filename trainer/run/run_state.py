"""A run's folder: its lock, resume signature and progress, computed from files without torch; and errors for a full
disk and too little memory."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from cache.order.schedule import BatchSchedule
from cache.runs.training_run import CHECKPOINTS, LOCK_NAME, RESULT_NOTE, OutputLocked, ResultNote, step_of
from cache.sets.training_checks import used_methods
from cache.sets.trainset import TrainSet
from cache.shards.shard import canonical_json
from cache.store.files import (
    NO_LOCKS,
    FileLock,
    StoreError,
    check_folder,
    check_writable,
    explained,
    replacing,
    restore_folders,
)
from schemas.cli.console import Console
from schemas.config.encoding import Model
from schemas.config.loading import dump_yaml
from schemas.config.methods import Method
from schemas.config.pipeline import Config
from schemas.config.training import Train
from schemas.geometry import Bucket
from trainer.adapters.header import find_adapter, find_assistant
from trainer.run.resume import (
    Checkpoint,
    CheckpointState,
    ResumeError,
    check_new_data,
    check_signature,
    file_checksum,
    list_changes,
    newest_checkpoint,
)

#: The generator of noise and sigma (`trainer/noise.py`). A run can't resume with another generator.
RANDOM_NUMBERS = "philox4x64-10"
HASH_ROWS = 1 << 18  # rows hashed at a time
HASHED_STRINGS = ("sample_id", "bucket", "dataset")
HASHED_NUMBERS = ("repeats", "weight", "regularization")


class RunFinished(Exception):
    """Raised on every rank of several processes if rank 0 finds that the run is finished."""


def resume_signature(config: Config, data: TrainSet, schedule: BatchSchedule) -> dict[str, Any]:
    """The part of a run's resume signature that configuration and training set determine. `trainer/setup/prepare.py`
    adds the terms of the transformer."""
    shards = config.train.shuffle_shards
    needs = {name for method in config.train.used_methods.values() for name in method.needs}
    return config_signature(config) | {
        "data": data_signature(data, needs),
        "global batch": schedule.global_batch,
        "shuffle_shards": shards and {"shards": shards, "rows of shards": schedule.order.digest},
        "methods": _method_terms(used_methods(config.train, data)),
    }


def _method_terms(methods: Mapping[str, Method]) -> dict[str, Any]:
    return {name: section.model_dump(mode="json", exclude_none=True) for name, section in methods.items()}


def config_signature(config: Config) -> dict[str, Any]:
    """The part of a run's resume signature that the configuration alone determines."""
    init, assistant = config.train.adapter.init_from, find_assistant(config.model)
    optional: dict[str, Any] = {"assistant": file_checksum(assistant)} if assistant else {}
    if config.expert is not None:
        optional["expert"] = asdict(config.expert)
    return optional | {
        "family": config.model.family,
        "task": config.model.task,
        "random numbers": RANDOM_NUMBERS,
        "seed": config.train.seed,
        "batch size": config.train.batch_size,
        "methods": _method_terms(config.train.used_methods),
        "caption_dropout": config.train.caption_dropout,
        "shift": None if config.train.timesteps.auto_shift else train_shift(config.train, config.model, ""),
        "timesteps": config.train.timesteps.model_dump(mode="json"),
        "loss": config.train.loss.model_dump(mode="json"),
        "adapter": config.train.adapter.model_dump(mode="json", exclude={"init_from"}),
        # A checksum of the file's bytes, so that the adapter may be at another path when the run resumes.
        "initial adapter": init and file_checksum(find_adapter(Path(init))),
        "optimizer": config.train.optimizer.name,
        "weight_precision": config.train.weight_precision,
        "ema": config.train.ema and config.train.ema.model_dump(mode="json", include={"decay", "warmup"}),
        # The dtype of weights that are not quantized (float32 or bfloat16) may change, like train.precision.
        "base_precision": config.train.base_precision if config.train.quantized else "no_change",
    }


def data_signature(data: TrainSet, needs: Collection[str] = ()) -> dict[str, Any]:
    """The part of a run's resume signature that the training set determines.

    "digest" is a hash of the training rows, in order, and of the fingerprints of their latents, texts and the kinds of
    shards in `needs`. It does not depend on validation prompts, held-out samples and the locations of shards.
    """
    index, texts = data.tables["index"].slice(0, len(data)), data.tables["texts"].column("text_id")
    null, captions = data.meta.null_text, 0
    fingerprints = data.fingerprints
    kinds = {"latents", "text", *(fingerprints.keys() & set(needs))}
    digest = xxhash.xxh3_128(canonical_json({kind: fingerprints.get(kind) for kind in kinds}))
    for start in range(0, len(data), HASH_ROWS):
        rows = index.slice(start, HASH_ROWS)
        numbers, null_texts = pc.list_flatten(rows.column("texts")), rows.column("null_text")
        null_texts = null_texts if null is None else pc.fill_null(null_texts, null)
        captions += len(numbers)
        for column in (*(rows.column(name) for name in HASHED_STRINGS), texts.take(numbers), texts.take(null_texts)):
            _hash_strings(digest, column)
        for column in (*(rows.column(name) for name in HASHED_NUMBERS), pc.list_value_length(rows.column("texts"))):
            digest.update(np.asarray(column).astype("<f8").data)
    return {"digest": digest.hexdigest(), "set": data.id, "samples": len(data), "captions": captions}


def _hash_strings(digest: xxhash.xxh3_128, column: pa.ChunkedArray) -> None:
    """Update the digest with the length of each value (-1 for null), then with the values."""
    lengths, parts = [np.zeros(0, "<i8")], list[memoryview]()
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32)[chunk.offset :][: len(chunk) + 1] if len(chunk) else np.zeros(1, "<i4")
        lengths.append(np.diff(ends.astype("<i8")))
        lengths[-1][np.asarray(chunk.is_null())] = -1
        parts += [memoryview(data)[ends[0] : ends[-1]]] if ends[-1] > ends[0] else []
    digest.update(np.concatenate(lengths).data)
    for part in parts:
        digest.update(part)


def train_shift(settings: Train, model: Model, bucket: str) -> float:
    """The shift of sigma for samples of a bucket. bucket: "WxH@F", only used if train.timesteps.auto_shift is set."""
    if not settings.timesteps.auto_shift:
        return settings.shift or model.flavour_spec.shift
    size, family = Bucket.parse(bucket), model.family_spec
    token = family.side_multiple  # side of a token, in pixels
    return family.shift_by_tokens((size.width // token) * (size.height // token))


def find_checkpoint(folder: Path, may_resume: bool) -> Checkpoint | None:
    """The checkpoint to resume from; None if the run has no checkpoint. ResumeError if it has one and `may_resume` is
    false, NoUsableCheckpoint if all checkpoints are damaged."""
    checkpoint, _ = newest_checkpoint(folder / "checkpoints")
    if checkpoint is not None and not may_resume:
        raise ResumeError(
            f"{folder} has a checkpoint at step {checkpoint.step} and train.resume is false",
            "Choose another train.run, remove that folder, or set train.resume to true.",
        )
    return checkpoint


def find_resume_state(config: Config, data: TrainSet, schedule: BatchSchedule) -> CheckpointState | None:
    """state.json of the checkpoint to resume from, with all changes of the data up to now; None for a new run.

    ResumeError if the run can't be resumed, NoUsableCheckpoint if all checkpoints are damaged.
    """
    if (checkpoint := find_checkpoint(config.run_folder, config.train.resume)) is None:
        return None
    signature, may_change = resume_signature(config, data, schedule), config.train.on_new_data == "continue"
    check_signature(checkpoint, signature, may_change)
    changes = list_changes(checkpoint, signature["data"]["digest"])
    check_new_data(checkpoint, data, changes)
    return checkpoint.state.model_copy(update={"data_changes": changes})


def write_config(config: Config, data: TrainSet) -> None:
    """Write <run>/config.yaml: every resolved setting, with the set's id in place of "current". If a named set was made
    with other settings, comments at the top list the settings that are not in force."""
    if "/" not in config.train.set:
        config = config.changed(train=config.train.changed(set=data.id))
    lines = [f"# Not in force, as set {data.id} was named: {row}\n" for row in data.recipe_differences]
    with replacing(config.run_folder / "config.yaml") as temporary, temporary.open("w") as file:
        file.writelines(lines)
        file.write(dump_yaml(config))


def is_finished(config: Config, state: CheckpointState | None) -> bool:
    """Whether the run has done all of its steps and saved its result. state: state of its newest checkpoint; None if
    it has no checkpoint."""
    if state is None or state.step < config.train.steps or not config.result_folder.is_dir():
        return False
    if config.comfyui_file is not None and not config.comfyui_file.is_file():
        return False
    note = ResultNote.try_read(config.run_folder / RESULT_NOTE)
    return note is not None and note.step == state.step  # if the note is damaged, the result is saved again


LOCK_WAIT_S = 0.3  # because `is_running` holds the lock for a moment


@contextmanager
def lock_output(folder: Path, console: Console) -> Iterator[None]:
    """Context that creates `folder` and holds its lock, which the kernel releases when this process ends. OutputLocked
    if another process holds the lock, StoreError if the folder is not writable."""
    check_writable(folder)
    with explained(str(folder / LOCK_NAME)):
        lock = FileLock(folder / LOCK_NAME)
    with lock:
        try:
            if not lock.take(LOCK_WAIT_S):
                raise OutputLocked(folder)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                reason = error.strerror or str(error)
                raise StoreError(str(folder / LOCK_NAME), reason, "check the file system") from error
            console.warn(f"{folder} is on a file system without locks: a second trainer there would not be detected")
        with explained(str(folder)):
            for parent in (folder, folder / CHECKPOINTS):
                restore_folders(parent)
        yield


@contextmanager
def explain_failures(folder: Path) -> Iterator[None]:
    """Context that turns a full disk or missing permissions during training into errors for the user. Before its body,
    check that `folder` and the folders in it can be created."""
    from safetensors import SafetensorError

    steps = [path for path in folder.glob(f"{CHECKPOINTS}/*") if step_of(path) is not None]
    for path in (folder, *(folder / name for name in (CHECKPOINTS, "validation", "adapter", "model")), *steps):
        check_folder(path)
    with explained(str(folder)):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
