"""Paths that come from outside: what may be opened, as a pipe or a device would be waited on, or read, for ever; and
what keeps a folder from being created."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NOT_REGULAR = "is no regular file"


class NotRegular(OSError):
    """A folder, a pipe, a socket or a device."""


def open_regular(path: str | Path) -> BinaryIO:
    """A reader of a file, or of what a link leads to. OSError as of `open`; NotRegular for a pipe, a socket
    or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotRegular(errno.EINVAL, NOT_REGULAR, path) if error.errno == errno.ENXIO else error from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise NotRegular(errno.EINVAL, NOT_REGULAR, os.fspath(path))


def find_obstacle(path: str | Path) -> str | None:
    """Say what is in the way of the folder `path` or one above it, and what to do; None where nothing is."""
    folder = Path(os.path.abspath(path))
    for part in (*reversed(folder.parents), folder):
        if os.path.isdir(part):
            continue
        if os.path.islink(part):
            target = os.readlink(part)
            kind = "a file" if os.path.exists(part) else "not there"
            return f"{part} is a link to {target}, which is {kind}; mount or make that folder, or correct the link"
        return f"{part} is a file, not a folder; choose another place" if os.path.exists(part) else None
    return None
