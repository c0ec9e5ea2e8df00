"""Opening files that come from outside: a pipe or a device there would be waited on, or read, for ever."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NOT_REGULAR = "is no regular file"


class NotRegular(OSError):
    """A pipe, a socket or a device."""


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
