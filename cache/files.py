"""Local files that appear whole or not at all: written under a temporary name beside the final one, synced, renamed."""

import errno
import io
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from schemas.errors import LatentpressError
from schemas.folder_checks import find_obstacle

TEMP_SUFFIX = ".tmp"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.ASCII | re.DOTALL)  # as `temporary` names them
WRITEBACK_BYTES = 8 << 20

NEXT_STEPS = {
    errno.ENOSPC: "free space there, or choose another place, and run the same command again: what is finished is kept",
    errno.EFBIG: "raise the limit (ulimit -f) and run the same command again: what is finished is kept",
    errno.EACCES: "give this user the right to read and write there, or choose another place",
    errno.EROFS: "mount it for writing, or choose another place",
    errno.EXDEV: "write the temporary file with open_temp, which puts it beside its final name",
}
NEXT_STEPS[errno.EDQUOT] = NEXT_STEPS[errno.ENOSPC]
NEXT_STEPS[errno.EPERM] = NEXT_STEPS[errno.EACCES]
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow larger: a file-size limit is set",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
}


class StoreError(LatentpressError):
    """A file could not be written or read; says where, why and what to do. `path` and `reason` apart."""

    def __init__(self, path: str, reason: str, next_step: str) -> None:
        super().__init__(f"{path}: {reason}", next_step)
        self.path, self.reason = path, reason

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"path": self.path, "reason": self.reason}

    def __reduce__(self) -> tuple:
        return (StoreError, (self.path, self.reason, self.next_step))


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn an OSError of the body into a StoreError about `path`. A missing file stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        code = error.errno or 0
        reason = REASONS.get(code, error.strerror or str(error))
        step = NEXT_STEPS.get(code, "check the path and the device, and run the same command again")
        raise StoreError(path, reason, step) from error


def check_folder(path: str | Path) -> None:
    """StoreError where something stands in the way of a folder at `path`, before work is done that ends there."""
    if obstacle := find_obstacle(path):
        reason, _, step = obstacle.partition("; ")
        raise StoreError(str(path), f"can't be a folder: {reason}", step)


class Entry(NamedTuple):
    """A file: its name, its bytes, and when it was last written (seconds since 1970; infinity: not known)."""

    name: str
    size: int
    modified: float


def walk(folder: Path, inside: str = "") -> Iterator[Entry]:
    """Every file below `folder`; what is removed meanwhile is left out."""
    try:
        found = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(folder / entry.name, f"{inside}{entry.name}/")
            continue
        with suppress(FileNotFoundError):
            about = entry.stat()
            yield Entry(inside + entry.name, about.st_size, about.st_mtime)


def temporary(path: Path) -> Path:
    """A name beside `path` that nobody else writes to."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMP_SUFFIX}")


def is_temporary(name: str) -> bool:
    """Whether `temporary` gave this name, so that the file may be removed once nobody writes to it."""
    return _TEMPORARY.fullmatch(name) is not None


def is_unfinished(name: str) -> bool:
    """Whether a name is left out of listings; whoever made it, it is no finished file."""
    return name.startswith(".") and name.endswith(TEMP_SUFFIX)


def replace(source: str, target: str) -> None:
    """The one step at which a local file appears under its final name."""
    os.replace(source, target)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(temp: Path, path: Path) -> None:
    """Rename the finished file or folder `temp` to `path`, in place of any older one, once all of it is on the disk."""
    if temp.is_dir():
        for inside in temp.rglob("*"):
            sync(inside)
    sync(temp)
    if temp.is_dir() and path.exists():
        shutil.rmtree(path)
    replace(str(temp), str(path))
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write the file or folder `path` in the body, under the temporary name given; it takes its place when the body
    ends, and nothing of it stays if the body raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = temporary(path)
    try:
        yield temp
        put(temp, path)
    finally:
        if temp.is_dir():
            shutil.rmtree(temp, ignore_errors=True)
        else:
            temp.unlink(missing_ok=True)


def make_folders(folder: Path) -> None:
    """Create `folder` and sync each parent that gained an entry, so that a power cut keeps the way to it. Raises
    StoreError that says what stands in its way."""
    missing = [folder] if not folder.exists() else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        check_folder(folder)
        step = "choose another place: this one takes no folders (as /proc), or somebody removes them"
        raise StoreError(str(folder), "can't be made", step) from error
    for made in missing:
        sync(made.parent)


class WriteBehind(io.BufferedWriter):
    """A temporary file, of which the disk writes what there is while more comes. Otherwise the kernel keeps most of it
    in memory until it is synced: of 128 MiB, writing and syncing took 0.20 s one after the other, and 0.13 s so."""

    _unsent = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._unsent += written
        if self._unsent >= WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            span = self.fileno(), self.tell() - self._unsent, self._unsent
            threading.Thread(
                target=_start_writeback, args=span, daemon=True
            ).start()  # it takes as long as the copy of the pages
            self._unsent = 0
        return written


def _start_writeback(file: int, place: int, length: int) -> None:
    """Of pages that are to be written, "not needed" is where Linux starts to write them; it keeps them."""
    with suppress(OSError):  # it was closed meanwhile, and a hint is all that this is
        os.posix_fadvise(file, place, length, os.POSIX_FADV_DONTNEED)
