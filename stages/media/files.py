"""Media files and Blobs: their extensions, how they are opened, and their media ids."""

import errno
import io
import os
import stat
from abc import abstractmethod
from collections.abc import Sequence
from typing import BinaryIO, cast

import xxhash

from schemas.config.datasets import MediaKind
from schemas.regular_files import NOT_REGULAR, open_regular

#: Ordered by preference: if a WebDataset key has several media, the first of these extensions is the item.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif", ".tif", ".tiff", ".bmp", ".gif")
VIDEO_EXTENSIONS = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v")
# Errors that mean that the file, its disk or its server is missing.
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


BACKSLASH_ADVICE = "write / in place of each backslash: Windows paths are not supported"


def extensions_of_kinds(kinds: Sequence[MediaKind]) -> dict[str, MediaKind]:
    """Lower-case extension with its dot -> kind, in the order of `kinds` and of the extensions of each kind."""
    return {ending: kind for kind in kinds for ending in (IMAGE_EXTENSIONS if kind == "image" else VIDEO_EXTENSIONS)}


class MediaError(Exception):
    """A media file can't be used. The item is rejected, and the stage continues.

    reason: short code by which reports count rejects ("empty-file", "not-an-image", "truncated", …). problem:
    description of the error, which follows "PATH: " in messages. advice: next step for the user.
    """

    def __init__(self, reason: str, path: str | os.PathLike[str], problem: str, advice: str) -> None:
        # All four are arguments of Exception, so that the error can be pickled.
        super().__init__(reason, os.fspath(path), problem, advice)
        self.reason, self.path, self.problem, self.advice = reason, os.fspath(path), problem, advice

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.advice}"


def unreadable_error(path: str | os.PathLike[str], error: OSError) -> MediaError:
    """The MediaError for an error of the operating system: "missing" if the file or its disk is missing, else
    "unreadable"."""
    if error.errno in _MISSING_ERRNOS and type(error).__module__ == "builtins":  # FFmpeg's errors use other numbers
        detail = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
        return MediaError("missing", path, f"does not exist{detail}", RESTORE_ADVICE)
    problem = f"can't be read ({error.strerror or error})"
    return MediaError("unreadable", path, problem, "check its permissions and the disk, then run again")


def out_of_memory_error(path: str | os.PathLike[str], error: BaseException) -> MediaError:
    """The MediaError for a file whose decoding needs, or seems to need, more than the available memory."""
    problem = f"needs more memory than is available{f' ({error})' if str(error) else ''}"
    return MediaError("out-of-memory", path, problem, "scale it down, or give the workers more memory")


_HASH_BLOCK_BYTES = 1 << 22


class Blob(os.PathLike[str]):
    """Media that are not a local file: a member of an archive, an object in a store, a row of a table.

    Accepted wherever the path of a media file is accepted. `os.fspath` returns its name for messages. Picklable: it has
    the data to open it, but no open file.
    """

    name: str

    def __fspath__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def open(self) -> BinaryIO:
        """A seekable reader of the bytes. Raises MediaError or OSError."""

    @abstractmethod
    def size(self) -> int:
        """Size in bytes. Raises MediaError."""

    def media_id(self) -> str | None:
        """The id that the store provides (`identity: store`), or None if the id is a hash of the content."""
        return None

    def refresh(self) -> None:
        """Drop cached properties, so that they are requested again."""

    def verify(self) -> None:
        """Raise MediaError if the content does not match the id that the store provides. May read the whole content."""


class SeekableReader(io.RawIOBase):
    """A raw reader that can seek; subclasses define `readinto`, `seek` and `tell`."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class FileWindow(SeekableReader):
    """A reader of the bytes [offset, offset + size) of another seekable reader. Closing it closes that reader."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        super().__init__()
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    @classmethod
    def opened(cls, file: BinaryIO, offset: int, size: int) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(cls(file, offset, size)))

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}, before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(0, self._size - self._at))
        if not count:
            return 0
        self._file.seek(self._offset + self._at)
        data = self._file.read(count)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


MediaPath = str | os.PathLike[str]


def open_media(path: MediaPath) -> BinaryIO:
    """A seekable binary reader of a file or Blob. Raises MediaError."""
    try:
        return path.open() if isinstance(path, Blob) else open_regular(os.fspath(path))
    except OSError as error:
        raise unreadable_error(path, error) from error


def media_size(path: MediaPath) -> int:
    """Size of a file or Blob in bytes. Raises MediaError if it is empty, can't be read or is not a regular file."""
    if isinstance(path, Blob):
        size = path.size()
    else:
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable_error(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise MediaError("unreadable", path, NOT_REGULAR, "replace it with a regular file")
        size = status.st_size
    if not size:
        raise MediaError("empty-file", path, "has no bytes", "copy it again or delete it")
    return size


def hash_file(path: MediaPath) -> str:
    """xxh3-128 of the content as 32 hex digits: the media id unless the store provides one. Raises MediaError."""
    state = xxhash.xxh3_128()
    try:
        with open_media(path) as file:
            while block := file.read(_HASH_BLOCK_BYTES):
                state.update(block)
    except OSError as error:
        raise unreadable_error(path, error) from error
    return state.hexdigest()


def compute_media_id(path: MediaPath) -> str:
    """The media id of a file or Blob: the id that the store provides, else the hash of the content."""
    return (path.media_id() if isinstance(path, Blob) else None) or hash_file(path)


def require_unchanged(path: MediaPath, planned_id: str) -> None:
    """Raise MediaError ("missing", "changed") unless the item still has the media id `planned_id`.

    An id provided by the store (`identity: store`) is requested again, and then verified against the content.
    """
    if isinstance(path, Blob):
        path.refresh()
    media_size(path)
    if compute_media_id(path) != planned_id:
        rescan = "run `latentpress discover` (with --rehash, if its size and time did not change)"
        step = f"{rescan} and `latentpress bucket`"
        raise MediaError("changed", path, "differs from the discovered file", step)
    if isinstance(path, Blob):
        path.verify()
