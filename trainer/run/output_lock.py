"""A lock for one trainer per output folder, taken before a model is loaded."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.runs.training_run import LOCK_NAME
from cache.store.files import StoreError, check_writable, explained
from schemas.cli.console import Console
from schemas.errors import LatentpressError

#: Errors of flock on a file system without locks.
NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


ATTEMPTS = 3  # as `is_running` holds the lock for a moment
ATTEMPT_PAUSE_S = 0.1

__all__ = ["LOCK_NAME", "OutputLocked", "lock_output"]


class OutputLocked(LatentpressError):
    """Another trainer is running in this folder."""


@contextmanager
def lock_output(folder: Path, console: Console) -> Iterator[None]:
    """Create `folder` and hold its lock, which the kernel releases when this process ends. OutputLocked where another
    process holds it, StoreError where the folder can't be written to."""
    check_writable(folder)
    with explained(str(folder / LOCK_NAME)):
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(lock):
        try:
            take_lock(lock)
        except BlockingIOError as error:
            step = "Wait until it has ended, stop it, or choose another train.run."
            raise OutputLocked(f"another trainer is at work in {folder}", step) from error
        except OSError as error:
            if error.errno not in NO_LOCK_ERRNOS:
                reason = error.strerror or str(error)
                raise StoreError(str(folder / LOCK_NAME), reason, "check the file system") from error
            console.warn(f"{folder} is on a file system without locks: a second trainer there would not be noticed")
        yield


def take_lock(lock: int) -> None:
    """Lock an open file, or BlockingIOError where another process holds the lock at each of ATTEMPTS."""
    for attempt in range(ATTEMPTS):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == ATTEMPTS - 1:
                raise
        time.sleep(ATTEMPT_PAUSE_S)
