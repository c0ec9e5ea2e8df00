"""Checkpoints: `<run>/checkpoints/step-000123/` with everything that the next step depends on.

state.json            step, epoch and batch, what must agree to go on (`terms`), skipped steps, random state,
                      and a checksum of each other file
trainable.safetensors the trained weights, by the model's own names
optimizer.safetensors AdamW's tensors, as <parameter name>/<key>

A folder is written under a temporary name, synced and renamed, so one that was cut off never counts. No pickle.
The random state is (seed, step): every draw of a step is a function of them, so nothing else need be kept.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from schemas.errors import USAGE, LatentpressError

FORMAT_VERSION = 1
STATE, TRAINABLE, OPTIMIZER = "state.json", "trainable.safetensors", "optimizer.safetensors"


class ResumeError(LatentpressError):
    """A checkpoint that can't be continued: damaged, or made on other terms."""

    exit_code = USAGE


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its state.json."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]


def save(
    folder: Path,
    step: int,
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    terms: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Path:
    """Write `folder`/step-<step>; returns its path. An older one of the same step is replaced.

    terms: what must be the same to go on from here (see `check_terms`). extra: further JSON for state.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    temp = folder / f".{final.name}.{secrets.token_hex(8)}.tmp"
    temp.mkdir()
    try:
        save_file({name: value.detach().contiguous().cpu() for name, value in trainable.items()}, temp / TRAINABLE)
        save_file(_optimizer_tensors(trainable, optimizer), temp / OPTIMIZER)
        files = {name: _checksum(temp / name) for name in (TRAINABLE, OPTIMIZER)}
        state = {"format_version": FORMAT_VERSION, "step": step, "terms": dict(terms), "files": files, **extra}
        (temp / STATE).write_text(json.dumps(state, indent=1))
        for name in (*files, STATE):
            _sync(temp / name)
        _sync(temp)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temp, final)
        _sync(folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return final


def _optimizer_tensors(
    trainable: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.detach().contiguous().cpu()
        for name, parameter in trainable.items()
        for key, value in optimizer.state[parameter].items()
    }


def newest(folder: Path) -> Checkpoint | None:
    """The checkpoint of the highest step, or None. Temporaries of killed processes are not looked at."""
    found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    if not found:
        return None
    state = json.loads((found[-1] / STATE).read_text())
    if state["format_version"] != FORMAT_VERSION:
        raise ResumeError(
            f"{found[-1]} has format version {state['format_version']}; this release reads {FORMAT_VERSION}",
            "Choose another train.run, or continue with the release that wrote it.",
        )
    return Checkpoint(found[-1], state)


def check_terms(checkpoint: Checkpoint, terms: Mapping[str, Any], hints: Mapping[str, str]) -> None:
    """Raise ResumeError, naming every difference, unless the checkpoint was made on these terms.

    hints: term -> what to do about a difference in it.
    """
    saved = checkpoint.state["terms"]
    wanted = json.loads(json.dumps(dict(terms)))  # as it reads after a round trip: tuples are lists
    different = [key for key in wanted.keys() | saved.keys() if saved.get(key) != wanted.get(key)]
    if different:
        lines = [f"  {key}: {saved.get(key)!r} there, {wanted.get(key)!r} now" for key in sorted(different)]
        steps = [hints[key] for key in sorted(different) if key in hints]
        steps.append("Or choose another train.run to begin a new one.")
        message = f"{checkpoint.path} can't be continued with this configuration:"
        raise ResumeError("\n".join([message, *lines]), " ".join(steps))


def restore(
    checkpoint: Checkpoint, trainable: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Put weights and optimizer state back, in place. ResumeError where a file is not what was written."""
    for name, checksum in checkpoint.state["files"].items():
        path = checkpoint.path / name
        if not path.exists() or _checksum(path) != checksum:
            raise ResumeError(
                f"{path} is damaged: its checksum does not match state.json",
                f"Remove {checkpoint.path} to go on from the checkpoint before it.",
            )
    weights = load_file(checkpoint.path / TRAINABLE)
    if weights.keys() != trainable.keys():
        odd = sorted(weights.keys() ^ trainable.keys())
        raise ResumeError(
            f"{checkpoint.path} holds other weights than this model trains: {', '.join(odd[:5])}"
            f"{' ...' if len(odd) > 5 else ''}",
            "Choose another train.run to begin a new one.",
        )
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(checkpoint.path / OPTIMIZER).items():
        name, _, kind = key.rpartition("/")
        by_name.setdefault(name, {})[kind] = value
    numbers = {name: number for number, name in enumerate(trainable)}
    state = {numbers[name]: kinds for name, kinds in by_name.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and what killed processes left behind."""
    found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    for path in [*found[:-keep], *folder.glob(".step-*.tmp")]:
        # Renamed first: a folder that is half removed must not look like a checkpoint.
        doomed = path if path.name.startswith(".") else path.rename(folder / f".{path.name}.{secrets.token_hex(8)}.tmp")
        shutil.rmtree(doomed)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
