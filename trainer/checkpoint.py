"""Checkpoints: `<run>/checkpoints/step-000123/` with everything that the next step depends on.

state.json            step, epoch, the resume signature (`terms`), skipped steps, random state, and a
                      checksum of each other file
trainable.safetensors the trained weights, by the model's own names
optimizer.safetensors AdamW's tensors, as <parameter name>/<key>

A folder is written under a temporary name, synced and renamed, so an incomplete one never counts. No pickle. The random
state is (seed, step), since every random number of a step is a function of them.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cache.files import replacing, sync, temporary
from trainer import resume
from trainer.resume import OPTIMIZER_FILE, TRAINABLE_FILE


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
) -> Path:
    """Write or replace `folder`/step-<step>; returns its path. extra: further JSON for state.json."""
    final = folder / f"step-{step:06d}"
    with replacing(final) as temp:
        temp.mkdir()
        moments = {
            f"{name}/{key}": value
            for name, weight in trainable.items()
            for key, value in optimizer.state[weight].items()
        }
        for file, tensors in ((TRAINABLE_FILE, trainable), (OPTIMIZER_FILE, moments)):
            copies = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
            write_tensors(copies, temp / file)
        files = {name: resume.file_checksum(temp / name) for name in (TRAINABLE_FILE, OPTIMIZER_FILE)}
        version = {"format_version": resume.FORMAT_VERSION}
        state = {**version, "step": step, "terms": dict(signature), "files": files, **extra}
        (temp / resume.STATE_FILE).write_text(json.dumps(state, indent=1))
    return final


def restore(
    checkpoint: resume.Checkpoint, trainable: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Load weights and optimizer state, in place. ResumeError where they are those of another model."""
    weights = load_file(checkpoint.path / TRAINABLE_FILE)
    if weights.keys() != trainable.keys():
        different = sorted(weights.keys() ^ trainable.keys())
        names = ", ".join(different[:5]) + (" ..." if len(different) > 5 else "")
        message = f"{checkpoint.path} holds other weights than this model trains: {names}"
        raise resume.ResumeError(message, resume.NEW_RUN_HINT)
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
    numbers = {name: number for number, name in enumerate(trainable)}
    state: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, value in load_file(checkpoint.path / OPTIMIZER_FILE).items():
        name, _, kind = key.rpartition("/")
        state[numbers[name]][kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


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
