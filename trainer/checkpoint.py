"""Checkpoints: `<run>/checkpoints/step-000123/` with everything that the next step depends on.

state.json            step, epoch and batch, what must agree to go on (`terms`), skipped steps, random state,
                      and a checksum of each other file
trainable.safetensors the trained weights, by the model's own names
optimizer.safetensors AdamW's tensors, as <parameter name>/<key>

A folder is written under a temporary name, synced and renamed, so one that was cut off never counts. No pickle.
The random state is (seed, step): every draw of a step is a function of them, so nothing else need be kept.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cache.files import replacing, sync, temporary
from trainer.resume import (
    FORMAT_VERSION,
    NEW_RUN_HINT,
    OPTIMIZER_FILE,
    STATE_FILE,
    TRAINABLE_FILE,
    Checkpoint,
    DamagedCheckpoint,
    ResumeError,
    file_checksum,
    list_checkpoints,
)
from trainer.tensor_files import write_tensors


def save(
    folder: Path,
    step: int,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    terms: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Path:
    """Write `folder`/step-<step>; returns its path. An older one of the same step is replaced.

    terms: what must be the same to go on from here (see `resume.check_terms`). extra: further JSON for state.json.
    """
    final = folder / f"step-{step:06d}"
    with replacing(final) as temp:
        temp.mkdir()
        write_tensors(
            {name: value.detach().contiguous().cpu() for name, value in trainable.items()}, temp / TRAINABLE_FILE
        )
        write_tensors(_optimizer_tensors(trainable, optimizer), temp / OPTIMIZER_FILE)
        files = {name: file_checksum(temp / name) for name in (TRAINABLE_FILE, OPTIMIZER_FILE)}
        state = {"format_version": FORMAT_VERSION, "step": step, "terms": dict(terms), "files": files, **extra}
        (temp / STATE_FILE).write_text(json.dumps(state, indent=1))
    return final


def _optimizer_tensors(
    trainable: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.detach().contiguous().cpu()
        for name, parameter in trainable.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore(
    checkpoint: Checkpoint, trainable: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Put weights and optimizer state back, in place. ResumeError where they are those of another model."""
    weights = load_file(checkpoint.path / TRAINABLE_FILE)
    if weights.keys() != trainable.keys():
        odd = sorted(weights.keys() ^ trainable.keys())
        raise ResumeError(
            f"{checkpoint.path} holds other weights than this model trains: {', '.join(odd[:5])}"
            f"{' ...' if len(odd) > 5 else ''}",
            NEW_RUN_HINT,
        )
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(checkpoint.path / OPTIMIZER_FILE).items():
        name, _, kind = key.rpartition("/")
        by_name.setdefault(name, {})[kind] = value
    numbers = {name: number for number, name in enumerate(trainable)}
    state = {numbers[name]: kinds for name, kinds in by_name.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def quarantine(damaged: DamagedCheckpoint) -> Path:
    """Give a checkpoint that is not whole another name, so that it is neither counted nor removed; the name."""
    folder, number = damaged.path.parent, 1
    while (kept := folder / f"damaged-{damaged.path.name}.{number}").exists():
        number += 1
    damaged.path.rename(kept)
    sync(folder)
    return kept


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and what killed processes left behind."""
    for path in [*list_checkpoints(folder)[:-keep], *folder.glob(".step-*.tmp")]:
        # Renamed first: a folder that is half removed must not look like a checkpoint.
        doomed = path if path.name.startswith(".") else path.rename(temporary(path))
        shutil.rmtree(doomed)
