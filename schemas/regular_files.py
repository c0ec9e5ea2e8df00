"""Checks of paths from users: only regular files are opened, because opening a pipe or reading a device may never
end; and the obstacles that keep a folder from being created."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NOT_REGULAR = "is not a regular file"


class NotRegular(OSError):
    """Raised for a pipe, a socket or a device."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading bytes. Raises the OSErrors of `open`, and NotRegular for a
    pipe, a socket or a device."""
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
    """A message about the file or link that keeps the folder `path` from being created; None if nothing does."""
    folder = Path(os.path.abspath(path))
    for part in (*reversed(folder.parents), folder):
        if os.path.isdir(part):
            continue
        if os.path.islink(part):
            target = os.readlink(part)
            state = "is a file" if os.path.exists(part) else "does not exist"
            return f"{part} is a link to {target}, which {state}; mount or create that folder, or correct the link"
        return f"{part} is a file, not a folder; choose a different location" if os.path.exists(part) else None
    return None
