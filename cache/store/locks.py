"""Locks on files and folders by flock. The kernel releases a lock when the process that holds it ends."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Self

from schemas.interruption import pause
from schemas.regular_files import NOT_REGULAR, NotRegular, open_regular

#: Errors of flock on a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
POLL_S = 0.05


def lock(descriptor: int, shared: bool = False, wait_s: float = 0.0) -> bool:
    """Lock an open file or folder; False if another process holds its lock for `wait_s` seconds. OSError, one of
    NO_LOCKS, on a file system without locks."""
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        pause(POLL_S)


class FileLock:
    """The lock of a file that exists for this purpose, and is created if it is absent. `close`, the end of a `with`
    block and the end of the process release it. OSError as of `open`; NotRegular for a pipe or a device."""

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path, self._shared = path, shared
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise NotRegular(errno.EINVAL, NOT_REGULAR, os.fspath(path))

    def take(self, wait_s: float = 0.0) -> bool:
        """Lock it, unless this object has the lock already. Result and errors as of `lock`."""
        return lock(self.descriptor, self._shared, wait_s)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None if the file system can't tell. This takes a shared lock for
    microseconds, so a process that wants the lock waits for a moment."""
    try:
        with open_regular(path) as file:
            return not lock(file.fileno(), shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None
