"""What is raised for a file that can't be used, whatever is wrong with it."""

import errno
import os
import stat

#: What the system says of a file whose disk or server is no longer there.
_MISSING_ERRNOS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENODEV,
    errno.ENXIO,
    errno.EHOSTDOWN,
)
RESTORE_ADVICE = "restore it, mount its disk, or correct media_root"


class MediaError(Exception):
    """A media file can't be used. The item is set aside with `reason`; nothing else stops.

    reason: a short code that reports count by ("empty-file", "not-an-image", "truncated", …).
    problem: what is wrong with the file, to follow "PATH: ".
    advice: what a person can do about it.
    """

    def __init__(self, reason: str, path: str | os.PathLike[str], problem: str, advice: str) -> None:
        # All four as arguments of Exception, so that the error survives pickling between worker processes.
        super().__init__(reason, os.fspath(path), problem, advice)
        self.reason = reason
        self.path = os.fspath(path)
        self.problem = problem
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.advice}"


def require_regular_file(path: str | os.PathLike[str]) -> int:
    """The size in bytes of a regular file that has content; MediaError otherwise."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaError("unreadable", path, "is not a regular file", "point the dataset at files")
    if status.st_size == 0:
        raise MediaError("empty-file", path, "has no bytes", "copy it again or delete it")
    return status.st_size


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> MediaError:
    """The MediaError for a file that the operating system doesn't let us read: "missing" where it, or the disk that it
    lies on, is not there."""
    if error.errno in _MISSING_ERRNOS and type(error).__module__ == "builtins":  # FFmpeg has such numbers of its own
        said = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
        return MediaError("missing", path, f"is not there{said}", RESTORE_ADVICE)
    problem = f"can't be read ({error.strerror or error})"
    return MediaError("unreadable", path, problem, "check its permissions and the disk, then run again")


def out_of_memory_error(path: str | os.PathLike[str], error: BaseException) -> MediaError:
    """The MediaError for a file whose decoding asks for more memory than there is, or claims to need it."""
    problem = f"takes more memory than there is{f' ({error})' if str(error) else ''}"
    return MediaError("out-of-memory", path, problem, "scale it down, or give the workers more memory")
