"""MediaError: a media file can't be used."""

import errno
import os

# The file, its disk or its server is not there.
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
    """A media file can't be used. The item is set aside; nothing stops.

    reason: a short code that reports count by ("empty-file", "not-an-image", "truncated", …). problem: what is wrong
    with the file; follows "PATH: ". advice: what to do about it.
    """

    def __init__(self, reason: str, path: str | os.PathLike[str], problem: str, advice: str) -> None:
        # All four are arguments of Exception, so that the error can be pickled.
        super().__init__(reason, os.fspath(path), problem, advice)
        self.reason, self.path, self.problem, self.advice = reason, os.fspath(path), problem, advice

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.advice}"


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> MediaError:
    """The MediaError for an error of the operating system: "missing" if the file or its disk is not there."""
    if error.errno in _MISSING_ERRNOS and type(error).__module__ == "builtins":  # FFmpeg's errors use other numbers
        detail = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
        return MediaError("missing", path, f"is not there{detail}", RESTORE_ADVICE)
    problem = f"can't be read ({error.strerror or error})"
    return MediaError("unreadable", path, problem, "check its permissions and the disk, then run again")


def out_of_memory_error(path: str | os.PathLike[str], error: BaseException) -> MediaError:
    """The MediaError for a file whose decoding needs, or claims to need, more memory than there is."""
    problem = f"takes more memory than there is{f' ({error})' if str(error) else ''}"
    return MediaError("out-of-memory", path, problem, "scale it down, or give the workers more memory")
