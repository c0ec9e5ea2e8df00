"""Checkpoints: `<run>/checkpoints/step-000123/` with everything that the next step depends on.

pytorch_lora_weights.safetensors   for a LoRA: the adapter, which pipelines load from this folder
transformer/                       for a full-rank run: the model, for `from_pretrained`
trainable.safetensors              trained weights that neither of these holds bit for bit, by the model's own names
optimizer.safetensors              the optimizer's state (`trainer/run/optimizer_state.py`): tensors as
                                   <parameter name>/<key> and groups/<number>/<key>, the rest as JSON in the header; the
                                   moving average as ema/<parameter name>
shards/                            for a sharded model (FSDP2): the optimizer's tensors, the moving average and the
                                   trained weights (weights/<parameter name>), by torch.distributed.checkpoint; any
                                   number of processes reads them
state.json                         step, epoch, the resume signature (`terms`), skipped steps, random state; the file
                                   and the key of each weight of the adapter or model (`weights`)
manifest.json                      the checksum of every other file; written last

A folder is written under a temporary name, synced and renamed, so an incomplete folder is never used. No file is a
pickle. The random state is (seed, step), since every random number of a step is a function of seed and step.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import CheckpointException

from cache.runs.training_run import checkpoint_step, list_checkpoints
from cache.store import files
from cache.store.files import replacing, sync, temporary
from trainer.adapters.files import write_tensors
from trainer.methods.base import Method
from trainer.run import optimizer_state, resume
from trainer.run.resume import OPTIMIZER_FILE, TRAINABLE_FILE, CheckpointState
from trainer.run.sharded import copy_values, is_sharded, load_shards, save_shards

SHARDS_FOLDER, WEIGHTS_PREFIX = "shards", "weights/"
CHECKPOINTS = 2  # least number of checkpoints that exist at the same time
OPTIMIZER_KEY = "latentpress.optimizer"  # key in the header of OPTIMIZER_FILE
#: Function that writes files for pipelines into a folder (None on processes that only take part in gathering). Returns
#: file -> key -> name of the parameter whose values the key may hold.
Export = Callable[[Path | None], Mapping[str, Mapping[str, str]]]


def save(
    folder: Path,
    state: CheckpointState,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, torch.Tensor] | None = None,
    export: Export = lambda _: {},
    is_main: bool = True,
) -> Path:
    """Write or replace `folder`/step-<step>; returns its path. All processes must call this function.

    state: state.json, without `weights` and `shards`, which are added. averages: name -> moving average of the weight;
    None if the run has no moving average. export: function that writes the adapter or model; weights that it writes bit
    for bit are not written a second time. is_main: whether this process writes the tensors that are not sharded.
    """
    final = folder / f"step-{state.step:06d}"
    states, description = optimizer_state.collect(trainable, optimizer)
    states |= {f"ema/{name}": value for name, value in (averages or {}).items()}
    everything = {**states, **{WEIGHTS_PREFIX + name: weight for name, weight in trainable.items()}}
    shards = {name: value for name, value in everything.items() if is_sharded([value])}
    if not is_main:
        save_shards(shards)
        export(None)
        return final
    with replacing(final) as temp:
        temp.mkdir()
        parts = save_shards(shards, temp / SHARDS_FOLDER)
        plain = {name: weight for name, weight in trainable.items() if WEIGHTS_PREFIX + name not in shards}
        weights = _find_weights(temp, plain, export(temp))
        exported = {name for names in weights.values() for name in names}
        remaining_weights = {name: weight for name, weight in plain.items() if name not in exported}
        states = {name: value for name, value in states.items() if name not in shards}
        rows = (TRAINABLE_FILE, remaining_weights, None), (OPTIMIZER_FILE, states, json.dumps(description))
        for file, tensors, header in rows:
            copies = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
            write_tensors(copies, temp / file, None if header is None else {OPTIMIZER_KEY: header})
        state = state.model_copy(update={"weights": weights, "shards": parts})
        state.write(temp / resume.STATE_FILE)
        resume.write_manifest(temp)
    return final


def _find_weights(
    folder: Path, trainable: Mapping[str, torch.Tensor], exported: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """File -> parameter -> key, for the parameters that exported files hold bit for bit. Exported files may hold other
    values: the moving average, or converted weights."""
    weights: dict[str, dict[str, str]] = defaultdict(dict)
    for path, names in exported.items():
        with safe_open(folder / path, "pt") as file:
            for key, name in names.items():
                if name not in trainable or key not in file.keys():  # noqa: SIM118 (no mapping)
                    continue
                saved, weight = file.get_tensor(key), trainable[name].detach().cpu()
                if saved.dtype == weight.dtype and torch.equal(saved, weight):
                    weights[path][name] = key
    return dict(weights)


def restore(
    checkpoint: resume.Checkpoint,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, torch.Tensor] | None = None,
    methods: Mapping[str, Method] | None = None,
) -> None:
    """Load weights, optimizer state, moving average and the methods' states, in place. ResumeError if they belong to
    another model."""
    try:
        states = _restore_weights(checkpoint, trainable)
        with safe_open(checkpoint.path / OPTIMIZER_FILE, "pt") as file:
            description = json.loads(file.metadata()[OPTIMIZER_KEY])
            states = {**{name: file.get_tensor(name) for name in file.keys()}, **states}  # noqa: SIM118 (no mapping)
        for name, average in (averages or {}).items():
            _copy(f"the moving average of {name}", average, states[f"ema/{name}"])
        optimizer_state.restore(trainable, optimizer, states, description)
        for name, method in (methods or {}).items():
            method.load_state(checkpoint.state.methods.get(name, method.state()))
    except optimizer_state.OtherGroups as error:
        raise resume.ResumeError(
            f"{checkpoint.path} can't be continued with this configuration: {error}",
            f"Change train.optimizer.groups back. {resume.NEW_RUN_HINT}",
        ) from error
    except (ValueError, KeyError, TypeError, SafetensorError, CheckpointException) as error:
        raise resume.ResumeError(
            f"{checkpoint.path} can't be restored, although its checksums match: {error}",
            "Remove that folder to continue from the previous checkpoint, or copy it again from its source.",
        ) from error


def _restore_weights(
    checkpoint: resume.Checkpoint, trainable: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Load the weights, in place; returns name -> tensor for the sharded tensors that are not weights."""
    weights: dict[str, dict[str, str]] = dict(checkpoint.state.weights)
    with safe_open(checkpoint.path / TRAINABLE_FILE, "pt") as file:
        weights[TRAINABLE_FILE] = {name: name for name in file.keys()}  # noqa: SIM118 (no mapping)
    shards = {}
    if checkpoint.state.shards:

        def find_owner(key: str) -> torch.Tensor | None:
            first, _, tail = key.partition("/")
            return trainable.get(tail if first in ("ema", WEIGHTS_PREFIX[:-1]) else first)

        shards = load_shards(checkpoint.path / SHARDS_FOLDER, find_owner)
    sharded = {name: shards.pop(WEIGHTS_PREFIX + name) for name in trainable if WEIGHTS_PREFIX + name in shards}
    if different := sorted({*sharded, *(name for names in weights.values() for name in names)} ^ trainable.keys()):
        names = ", ".join(different[:5]) + (" ..." if len(different) > 5 else "")
        message = f"{checkpoint.path} has other weights than this model trains: {names}"
        raise resume.ResumeError(message, resume.NEW_RUN_HINT)
    for part, keys in weights.items():
        with safe_open(checkpoint.path / part, "pt") as file:
            for name, key in keys.items():
                _copy(name, trainable[name], file.get_tensor(key))
    for name, value in sharded.items():
        _copy(name, trainable[name], value)
    return shards


def _copy(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to a tensor without broadcasting or conversion. ValueError if shape or dtype differ."""
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)} and {value.dtype}; expected {tuple(target.shape)} and "
            f"{target.dtype}"
        )
    copy_values(target.data, value)


def find_shortage(folder: Path, trainable: Mapping[str, torch.nn.Parameter]) -> str | None:
    """A warning if the disk of `folder` has no room for CHECKPOINTS checkpoints with the weights and two moments; else
    None. The oldest checkpoint is removed only after the newest is complete."""
    weights = sum(value.numel() * value.element_size() for value in trainable.values())
    if shortage := files.find_shortage(folder, CHECKPOINTS * 3 * weights):
        return f"{shortage}, so saving a checkpoint may fail; free space, or set `output` to another folder"
    return None


def quarantine(damaged: Path, reason: str, replacement: resume.Checkpoint) -> str:
    """Rename a damaged checkpoint, so that it is neither counted nor removed; returns a warning. replacement: the
    checkpoint from which the run resumes instead."""
    names = (damaged.with_name(f"damaged-{damaged.name}.{number}") for number in count(1))
    new_path = damaged.rename(next(name for name in names if not name.exists()))
    sync(new_path.parent)
    return (
        f"{damaged} is damaged ({reason}) and was renamed to {new_path.name}: the run resumes from "
        f"{replacement.path.name}, the newest intact checkpoint"
    )


def prune(folder: Path, keep: int, every: int | None = None, protected: Sequence[int] = ()) -> None:
    """Remove temporary files of killed processes, and all checkpoints except the `keep` newest, the checkpoints whose
    step is a multiple of `every`, and the checkpoints of the steps `protected`."""
    older = [
        path
        for path in list_checkpoints(folder)[:-keep]
        if (step := checkpoint_step(path)) not in protected and (every is None or step % every)
    ]
    for path in [*older, *folder.glob(".step-*.tmp")]:
        # Renamed first, because a partly removed folder must not look like a checkpoint.
        doomed = path if path.name.startswith(".") else path.rename(temporary(path))
        shutil.rmtree(doomed)
