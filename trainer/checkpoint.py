"""Checkpoints: `<run>/checkpoints/step-000123/` with everything that the next step depends on.

state.json            step, epoch, the resume signature (`terms`), skipped steps, random state, and a
                      checksum of each other file
trainable.safetensors the trained weights, by the model's own names
optimizer.safetensors the optimizer's state (`trainer/optimizer_state.py`): tensors as <parameter name>/<key> and
                      groups/<number>/<key>, the rest as JSON in the header; the moving average as ema/<parameter name>

A folder is written under a temporary name, synced and renamed, so an incomplete one never counts. No pickle. The random
state is (seed, step), since every random number of a step is a function of them.
"""

import json
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cache.files import replacing, sync, temporary
from trainer import optimizer_state, resume
from trainer.resume import OPTIMIZER_FILE, TRAINABLE_FILE

OPTIMIZER_KEY = "latentpress.optimizer"  # of the header of OPTIMIZER_FILE


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask; the library's own are for the owner only."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode & 0o777)


def save(
    folder: Path,
    step: int,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    signature: Mapping[str, Any],
    extra: Mapping[str, Any],
    averages: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write or replace `folder`/step-<step>; returns its path. extra: further JSON for state.json. averages: the moving
    average of each weight, where there is one."""
    final = folder / f"step-{step:06d}"
    with replacing(final) as temp:
        temp.mkdir()
        states, rest = optimizer_state.collect(trainable, optimizer)
        states |= {f"ema/{name}": value for name, value in (averages or {}).items()}
        for file, tensors, header in ((TRAINABLE_FILE, trainable, None), (OPTIMIZER_FILE, states, json.dumps(rest))):
            copies = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
            write_tensors(copies, temp / file, None if header is None else {OPTIMIZER_KEY: header})
        files = {name: resume.file_checksum(temp / name) for name in (TRAINABLE_FILE, OPTIMIZER_FILE)}
        version = {"format_version": resume.FORMAT_VERSION}
        state = {**version, "step": step, "terms": dict(signature), "files": files, **extra}
        (temp / resume.STATE_FILE).write_text(json.dumps(state, indent=1))
    return final


def restore(
    checkpoint: resume.Checkpoint,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    averages: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Load weights, optimizer state and moving average, in place. ResumeError where they are those of another model."""
    weights = load_file(checkpoint.path / TRAINABLE_FILE)
    if weights.keys() != trainable.keys():
        different = sorted(weights.keys() ^ trainable.keys())
        names = ", ".join(different[:5]) + (" ..." if len(different) > 5 else "")
        message = f"{checkpoint.path} holds other weights than this model trains: {names}"
        raise resume.ResumeError(message, resume.NEW_RUN_HINT)
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
    with safe_open(checkpoint.path / OPTIMIZER_FILE, framework="pt") as file:
        rest = json.loads(file.metadata()[OPTIMIZER_KEY])
    states = load_file(checkpoint.path / OPTIMIZER_FILE)
    for name, average in (averages or {}).items():
        average.copy_(states[f"ema/{name}"])
    try:
        optimizer_state.restore(trainable, optimizer, states, rest)
    except ValueError as error:
        raise resume.ResumeError(
            f"{checkpoint.path} can't be continued with this configuration: {error}",
            f"Set train.optimizer.groups back. {resume.NEW_RUN_HINT}",
        ) from error


def quarantine(damaged: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither counted nor removed; returns the new path."""
    names = (damaged.with_name(f"damaged-{damaged.name}.{number}") for number in count(1))
    kept = damaged.rename(next(name for name in names if not name.exists()))
    sync(kept.parent)
    return kept


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and temporaries of killed processes."""
    for path in [*resume.list_checkpoints(folder)[:-keep], *folder.glob(".step-*.tmp")]:
        # Renamed first, as a partly removed folder must not look like a checkpoint.
        doomed = path if path.name.startswith(".") else path.rename(temporary(path))
        shutil.rmtree(doomed)
