"""The output folder: a lock for one trainer at a time, and full disks and too little memory as errors with a reason."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.runs.training_checks import OutputLocked
from cache.runs.training_run import CHECKPOINTS, LOCK_NAME, step_of
from cache.store.files import StoreError, check_folder, check_writable, explained, restore_folders
from cache.store.locks import NO_LOCKS, FileLock
from schemas.cli.console import Console
from schemas.errors import LatentpressError

LOCK_WAIT_S = 0.3  # as `is_running` holds the lock for a moment


@contextmanager
def lock_output(folder: Path, console: Console) -> Iterator[None]:
    """Create `folder` and hold its lock, which the kernel releases when this process ends. OutputLocked where another
    process holds it, StoreError where the folder can't be written to."""
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
            console.warn(f"{folder} is on a file system without locks: a second trainer there would not be noticed")
        with explained(str(folder)):
            for parent in (folder, folder / CHECKPOINTS):
                restore_folders(parent)
        yield


class DeviceOutOfMemory(LatentpressError):
    """The device has too little memory for this configuration."""


@contextmanager
def explain_failures(folder: Path) -> Iterator[None]:
    """Turn a full disk, missing permissions or memory in training under `folder` into errors for the user; an obstacle
    to creating the folder, or one in it, is found before anything is loaded."""
    import torch
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
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(
                f"the device ran out of memory: {str(error).partition('. ')[0]}",
                "Lower train.batch_size and raise train.accumulate by as much, keep train.gradient_checkpointing and "
                "train.precision bfloat16, choose train.adapter.type=lora, or plan smaller buckets and fewer frames. "
                "Training goes on from the last checkpoint.",
            ) from error
