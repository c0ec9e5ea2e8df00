"""Full disks and too little memory as errors with a reason and a next step."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from cache.runs.training_run import CHECKPOINTS, step_of
from cache.store.files import check_folder, explained
from schemas.errors import LatentpressError


class DeviceOutOfMemory(LatentpressError):
    """The device has too little memory for this configuration."""


@contextmanager
def explain_failures(folder: Path) -> Iterator[None]:
    """Turn a full disk, missing permissions or memory in training under `folder` into errors for the user; an obstacle
    to creating the folder, or one in it, is found before anything is loaded."""
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
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(
                f"the device ran out of memory: {str(error).partition('. ')[0]}",
                "Lower train.batch_size and raise train.accumulate by as much, keep train.gradient_checkpointing and "
                "train.precision bfloat16, choose train.adapter.type=lora, or plan smaller buckets and fewer frames. "
                "Training goes on from the last checkpoint.",
            ) from error
