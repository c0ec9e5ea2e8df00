"""Checkpoints: `<run>/checkpoints/step-000123/` with everything that the next step depends on.

pytorch_lora_weights.safetensors   of a LoRA: the adapter, which pipelines load from this folder
transformer/                       of a full-rank run: the model, for `from_pretrained`
trainable.safetensors              trained weights that are in neither bit for bit, by the model's own names
optimizer.safetensors              the optimizer's state (`trainer/run/optimizer_state.py`): tensors as
                                   <parameter name>/<key> and groups/<number>/<key>, the rest as JSON in the header; the
                                   moving average as ema/<parameter name>
shards/                            of a sharded model (FSDP2): the optimizer's tensors, the moving average and the
                                   trained weights (weights/<parameter name>), by torch.distributed.checkpoint; any
                                   number of processes reads them
state.json                         step, epoch, the resume signature (`terms`), skipped steps, random state; in which
                                   file and under which name each weight of the adapter or model is (`weights`)
manifest.json                      the checksum of every other file; written last

A folder is written under a temporary name, synced and renamed, so an incomplete one never counts. No pickle. The random
state is (seed, step), since every random number of a step is a function of them.
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
CHECKPOINTS = 2  # that are there at the same time, at least
OPTIMIZER_KEY = "latentpress.optimizer"  # of the header of OPTIMIZER_FILE
#: Writes files that pipelines load into a folder, None on processes that only take part; returns file -> key -> the
#: parameter whose values it may hold.
Export = Callable[[Path | None], Mapping[str, Mapping[str, str]]]


def save(
    folder: Path,
    state: CheckpointState,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, torch.Tensor] | None = None,
    export: Export = lambda _: {},
    main: bool = True,
) -> Path:
    """Write or replace `folder`/step-<step>; returns its path. state: without `weights` and `shards`, which are added.
    averages: the moving average of each weight, if there is one. export: writes the adapter or model; what it holds bit
    for bit is not written a second time. main: whether this process writes what is not sharded; all processes call
    it."""
    final = folder / f"step-{state.step:06d}"
    states, rest = optimizer_state.collect(trainable, optimizer)
    states |= {f"ema/{name}": value for name, value in (averages or {}).items()}
    everything = {**states, **{WEIGHTS_PREFIX + name: weight for name, weight in trainable.items()}}
    shards = {name: value for name, value in everything.items() if is_sharded([value])}
    if not main:
        save_shards(shards)
        export(None)
        return final
    with replacing(final) as temp:
        temp.mkdir()
        parts = save_shards(shards, temp / SHARDS_FOLDER)
        plain = {name: weight for name, weight in trainable.items() if WEIGHTS_PREFIX + name not in shards}
        weights = _find_weights(temp, plain, export(temp))
        exported = {name for names in weights.values() for name in names}
        others = {name: weight for name, weight in plain.items() if name not in exported}
        states = {name: value for name, value in states.items() if name not in shards}
        for file, tensors, header in ((TRAINABLE_FILE, others, None), (OPTIMIZER_FILE, states, json.dumps(rest))):
            copies = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
            write_tensors(copies, temp / file, None if header is None else {OPTIMIZER_KEY: header})
        state = state.model_copy(update={"weights": weights, "shards": parts})
        state.write(temp / resume.STATE_FILE)
        resume.write_manifest(temp)
    return final


def _find_weights(
    folder: Path, trainable: Mapping[str, torch.Tensor], exported: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """File -> parameter -> its key, for the parameters that exported files hold, bit for bit: an adapter may be that of
    a moving average, or converted."""
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
    """Load weights, optimizer state, moving average and methods, in place. ResumeError if they belong to another
    model."""
    try:
        states = _restore_weights(checkpoint, trainable)
        with safe_open(checkpoint.path / OPTIMIZER_FILE, "pt") as file:
            rest = json.loads(file.metadata()[OPTIMIZER_KEY])
            states = {**{name: file.get_tensor(name) for name in file.keys()}, **states}  # noqa: SIM118 (no mapping)
        for name, average in (averages or {}).items():
            _copy(f"the moving average of {name}", average, states[f"ema/{name}"])
        optimizer_state.restore(trainable, optimizer, states, rest)
        for name, method in (methods or {}).items():
            method.load_state(checkpoint.state.methods.get(name, method.state()))
    except optimizer_state.OtherGroups as error:
        raise resume.ResumeError(
            f"{checkpoint.path} can't be continued with this configuration: {error}",
            f"Set train.optimizer.groups back. {resume.NEW_RUN_HINT}",
        ) from error
    except (ValueError, KeyError, TypeError, SafetensorError, CheckpointException) as error:
        raise resume.ResumeError(
            f"{checkpoint.path} can't be restored, although its checksums match: {error}",
            "Remove that folder to continue from the checkpoint before, or copy it again from where it was made.",
        ) from error


def _restore_weights(
    checkpoint: resume.Checkpoint, trainable: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Load the weights, in place; returns the other sharded tensors."""
    weights: dict[str, dict[str, str]] = dict(checkpoint.state.weights)
    with safe_open(checkpoint.path / TRAINABLE_FILE, "pt") as file:
        weights[TRAINABLE_FILE] = {name: name for name in file.keys()}  # noqa: SIM118 (no mapping)
    shards = {}
    if checkpoint.state.shards:

        def find_owner(key: str) -> torch.Tensor | None:
            first, _, rest = key.partition("/")
            return trainable.get(rest if first in ("ema", WEIGHTS_PREFIX[:-1]) else first)

        shards = load_shards(checkpoint.path / SHARDS_FOLDER, find_owner)
    sharded = {name: shards.pop(WEIGHTS_PREFIX + name) for name in trainable if WEIGHTS_PREFIX + name in shards}
    if different := sorted({*sharded, *(name for names in weights.values() for name in names)} ^ trainable.keys()):
        names = ", ".join(different[:5]) + (" ..." if len(different) > 5 else "")
        message = f"{checkpoint.path} holds other weights than this model trains: {names}"
        raise resume.ResumeError(message, resume.NEW_RUN_HINT)
    for part, keys in weights.items():
        with safe_open(checkpoint.path / part, "pt") as file:
            for name, key in keys.items():
                _copy(name, trainable[name], file.get_tensor(key))
    for name, value in sharded.items():
        _copy(name, trainable[name], value)
    return shards


def _copy(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    """Set a tensor to a value of its own shape and dtype, which is neither broadcast nor converted. ValueError for
    another."""
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"{name} is of shape {tuple(value.shape)} in {value.dtype}, and should be of shape {tuple(target.shape)} "
            f"in {target.dtype}"
        )
    copy_values(target.data, value)


def find_shortage(folder: Path, trainable: Mapping[str, torch.nn.Parameter]) -> str | None:
    """A warning where the disk of `folder` has no room for CHECKPOINTS checkpoints of weights and two moments. The
    oldest is removed only when the newest is whole."""
    weights = sum(value.numel() * value.element_size() for value in trainable.values())
    if shortage := files.find_shortage(folder, CHECKPOINTS * 3 * weights):
        return f"{shortage}, so that saving a checkpoint may fail; free space, or set `output` to another place"
    return None


def quarantine(damaged: Path, reason: str, taken: resume.Checkpoint) -> str:
    """Rename a damaged checkpoint, so that it is neither counted nor removed; what to say of it. taken: the checkpoint
    that is taken instead."""
    names = (damaged.with_name(f"damaged-{damaged.name}.{number}") for number in count(1))
    kept = damaged.rename(next(name for name in names if not name.exists()))
    sync(kept.parent)
    return (
        f"{damaged} is damaged ({reason}): the run goes on from {taken.path.name}, the newest intact checkpoint, and "
        f"the damaged one is kept as {kept.name}"
    )


def prune(folder: Path, keep: int, every: int | None = None, protected: Sequence[int] = ()) -> None:
    """Remove temporaries of killed processes, and checkpoints but for the `keep` newest, those of steps that `every`
    divides, and those of the steps `protected`."""
    older = [
        path
        for path in list_checkpoints(folder)[:-keep]
        if (step := checkpoint_step(path)) not in protected and (every is None or step % every)
    ]
    for path in [*older, *folder.glob(".step-*.tmp")]:
        # Renamed first, as a partly removed folder must not look like a checkpoint.
        doomed = path if path.name.startswith(".") else path.rename(temporary(path))
        shutil.rmtree(doomed)
