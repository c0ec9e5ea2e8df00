"""Local files that appear completely or not at all: they are written under a temporary name in the same folder, synced
and renamed. Also locks by flock, which the kernel releases when the process that holds the lock ends."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import pyarrow as pa

from schemas.errors import LatentpressError
from schemas.interruption import pause
from schemas.regular_files import NOT_REGULAR, NotRegular, find_obstacle, open_regular
from schemas.text_format import format_bytes, shown_path

TEMP_SUFFIX = ".tmp"
FORMER_SUFFIX = ".former"  # suffix of a folder that is being replaced
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.ASCII | re.DOTALL)  # names made by `temporary`
OPEN_TRIES = 5
#: Errors of file systems without hard links.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

NEXT_STEPS = {
    errno.ENOSPC: "free space, or choose another place, and run the same command again: finished work is kept",
    errno.EFBIG: "raise the limit (ulimit -f) and run the same command again: finished work is kept",
    errno.EACCES: "give this user the permission to read and write it, or choose another place",
    errno.EROFS: "mount it for writing, or choose another place",
    errno.EISDIR: "move the folder away, and run the same command again",
    errno.ELOOP: "remove the link, and run the same command again",
    errno.EXDEV: "write the temporary file with open_temp, which uses the file system of its final name",
}
NEXT_STEPS[errno.ENOTDIR] = NEXT_STEPS[errno.EEXIST] = "move the file away, and run the same command again"
NEXT_STEPS[errno.EDQUOT] = NEXT_STEPS[errno.ENOSPC]
NEXT_STEPS[errno.EPERM] = NEXT_STEPS[errno.EACCES]
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would exceed the file-size limit",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a file is in the place of a folder",
    errno.EEXIST: "a file is in the place of a folder",
    errno.EISDIR: "a folder is in the place of a file",
    errno.ELOOP: "a link leads to itself",
}


class StoreError(LatentpressError):
    """A file could not be written or read. path: the file. reason: the cause; the message adds the next step."""

    def __init__(self, path: str, reason: str, next_step: str) -> None:
        super().__init__(f"{path}: {reason}", next_step)
        self.path, self.reason = path, reason

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"path": self.path, "reason": self.reason}

    def __reduce__(self) -> tuple:
        return (StoreError, (self.path, self.reason, self.next_step))


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Context that turns an OSError into a StoreError about `path`, or about the file below `path` that the error
    names. FileNotFoundError is not changed."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        code, named = error.errno or 0, str(error.filename2 or error.filename)
        path = named if named.startswith(f"{path}{os.sep}") else path
        reason = REASONS.get(code, error.strerror or str(error))
        step = NEXT_STEPS.get(code, "check the path and the device, and run the same command again")
        raise StoreError(path, reason, step) from error


def check_folder(path: str | Path) -> None:
    """Raise StoreError if a folder can't be created at `path`. Call it before work whose results are written to the
    folder."""
    if obstacle := find_obstacle(path):
        reason, _, step = obstacle.partition("; ")
        raise StoreError(str(path), f"can't be a folder: {reason}", step)


def check_writable(folder: Path) -> None:
    """Create `folder` before work whose results are written to it. Raises StoreError if the folder, or a file in it,
    can't be created."""
    if obstacle := find_obstacle(folder):
        reason, _, step = obstacle.partition("; ")
        raise StoreError(str(folder), f"can't be written to: {reason}", f"{step}; or correct `output` or `train.run`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        code = error.errno or 0
        reason = REASONS.get(code, error.strerror or str(error))
        step = "check `output` and `train.run` in the configuration, and run the same command again"
        raise StoreError(str(folder), f"can't be written to: {reason}", NEXT_STEPS.get(code, step)) from error


class Entry(NamedTuple):
    """A file: name, size in bytes, time of the last write (seconds since 1970; infinity if unknown). version: text that
    changes when the file is replaced; "" if unknown."""

    name: str
    size: int
    modified: float
    version: str = ""


def walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry]]:
    """Yield (name relative to `folder`, entry) for every regular file below `folder`, or link to a regular file, except
    files that are removed during the walk."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(folder / entry.name, f"{prefix}{entry.name}/")
        elif _is_regular(entry):
            yield prefix + entry.name, entry


def _is_regular(entry: os.DirEntry) -> bool:
    """Whether an entry is a regular file, or a link to one."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def temporary(path: Path) -> Path:
    """Return a temporary name in the folder of `path` that no other process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMP_SUFFIX}")


def is_temporary(name: str) -> bool:
    """Whether `temporary` made this name, so that the file may be removed once no process writes to it."""
    return _TEMPORARY.fullmatch(name) is not None


def is_unfinished(name: str) -> bool:
    """Whether listings skip this name, because it is not a finished file, whichever program made it."""
    return name.startswith(".") and name.endswith(TEMP_SUFFIX)


def replace(source: str, target: str) -> None:
    """Rename a local file to its final name. The file appears in this single step."""
    os.replace(source, target)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(temp: Path, path: Path) -> None:
    """Sync the finished file or folder `temp`, then rename it to `path`. It replaces an older file or folder."""
    if temp.is_dir():
        for path_inside in temp.rglob("*"):
            sync(path_inside)
    sync(temp)
    former = path.with_name(f".{path.name}{FORMER_SUFFIX}")
    if temp.is_dir() and path.is_dir() and any(path.iterdir()):
        shutil.rmtree(former, ignore_errors=True)
        replace(str(path), str(former))
    replace(str(temp), str(path))
    sync(path.parent)
    if former.is_dir():
        shutil.rmtree(former, ignore_errors=True)


def link(temp: Path, path: Path) -> bool:
    """Make the finished file `temp` appear as `path` too; False if `path` exists."""
    sync(temp)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            return False
        replace(str(temp), str(path))
    sync(path.parent)
    return True


def restore_folders(parent: Path) -> None:
    """Put back the folders in `parent` that a killed `put` moved away before it renamed the new folders. Call it
    only while no other process writes to `parent`."""
    for former in parent.glob(f".*{FORMER_SUFFIX}"):
        path = parent / former.name.removesuffix(FORMER_SUFFIX).removeprefix(".")
        if path.exists():
            shutil.rmtree(former)
        else:
            replace(str(former), str(path))
            sync(parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context with a temporary name for the new file or folder `path`. It is renamed at the end, or removed on an
    error."""
    make_folders(path.parent)
    temp = temporary(path)
    try:
        yield temp
        put(temp, path)
    finally:
        if temp.is_dir():
            shutil.rmtree(temp, ignore_errors=True)
        else:
            temp.unlink(missing_ok=True)


def write_new(path: Path, text: str) -> None:
    """Create a small file. Raises FileExistsError if `path` exists; an existing file is never replaced."""
    make_folders(path.parent)
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def make_folders(folder: Path) -> None:
    """Create `folder` and sync each parent with a new entry, against power cuts. Raises StoreError with the
    reason if a folder can't be created."""
    missing_folders = [folder] if not folder.exists() else []
    while missing_folders and not missing_folders[-1].parent.exists():
        missing_folders.append(missing_folders[-1].parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        check_folder(folder)
        step = "choose another place: folders can't be created in it (like /proc), or another program removes them"
        raise StoreError(str(folder), "can't be created", step) from error
    for created in missing_folders:
        sync(created.parent)


class Folder:
    """The files of a folder on this machine's disk, by their names relative to the folder. Methods raise OSError unless
    they are called in `explained`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, rel: str) -> str:
        return f"{self.root}/{rel}" if rel else str(self.root)

    def explained(self, rel: str) -> AbstractContextManager[None]:
        return explained(self.path(rel))

    writing = explained

    def exists(self, rel: str) -> bool:
        return (self.root / rel).is_file()

    def info(self, rel: str) -> Entry:
        """Return name, size and time of a file. Raises NotRegular for a folder, a pipe or a device."""
        about = (self.root / rel).stat()
        if not stat.S_ISREG(about.st_mode):
            raise NotRegular(errno.EINVAL, NOT_REGULAR, self.path(rel))
        version = f"{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}"
        return Entry(rel, about.st_size, about.st_mtime, version)

    def entries(self, folder: str) -> Iterator[Entry]:
        """Yield the files below `folder`, including temporary files. Names are relative to `folder`."""
        for name, entry in walk(self.root / folder):
            with suppress(FileNotFoundError):
                yield Entry(name, entry.stat().st_size, entry.stat().st_mtime)

    def read(self, rel: str) -> bytes:
        with open_regular(self.root / rel) as file:
            return file.read()

    def open(self, rel: str) -> pa.NativeFile:
        if not self.info(rel).size:  # an empty file can't be mapped
            return pa.BufferReader(b"")
        return pa.memory_map(self.path(rel), "r")

    def open_whole(self, rel: str, size: int) -> pa.NativeFile:
        return self.open(rel)

    def open_temp(self, rel: str) -> BinaryIO:
        """Return a new temporary file in the folder of its final name `rel`."""
        folder, _, name = self.path(rel).rpartition("/")
        temp = temporary(Path(folder, name))
        for _ in range(OPEN_TRIES):
            make_folders(Path(folder))
            with suppress(FileNotFoundError):  # gc removed the folder, which was empty
                return open(temp, "x+b")
        raise FileNotFoundError(errno.ENOENT, "another program removes its folder", str(temp))

    def publish(self, file: BinaryIO, rel: str) -> None:
        file.flush()
        put(Path(file.name), self.root / rel)

    def publish_new(self, file: BinaryIO, rel: str) -> bool:
        """Publish by a hard link. If the file system does not support hard links and two processes publish at the same
        moment, the later process wins."""
        file.flush()
        return link(Path(file.name), self.root / rel)

    def move(self, rel: str, target: str) -> None:
        source, to = self.root / rel, self.root / target
        make_folders(to.parent)
        replace(str(source), str(to))
        sync(to.parent)
        sync(source.parent)

    def remove(self, rel: str) -> None:
        (self.root / rel).unlink(missing_ok=True)


#: Errors of flock on a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
POLL_S = 0.05


def lock(descriptor: int, is_shared: bool = False, wait_s: float = 0.0) -> bool:
    """Lock an open file or folder. Returns False if another process still holds the lock after `wait_s` seconds. Raises
    OSError with an errno in NO_LOCKS on a file system without locks."""
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        pause(POLL_S)


class FileLock:
    """The lock of a lock file, which is created if it is missing. `close`, the end of a `with` block and the end of the
    process release the lock. Raises the errors of `os.open`, and NotRegular for a pipe or a device."""

    def __init__(self, path: Path, is_shared: bool = False) -> None:
        self.path, self._is_shared = path, is_shared
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise NotRegular(errno.EINVAL, NOT_REGULAR, os.fspath(path))

    def take(self, wait_s: float = 0.0) -> bool:
        """Take the lock; does nothing if this object already has it. Result and errors are the same as for `lock`."""
        return lock(self.descriptor, self._is_shared, wait_s)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None if the file system does not support locks. This takes a
    shared lock for microseconds, so another process may have to wait for a moment."""
    try:
        with open_regular(path) as file:
            return not lock(file.fileno(), is_shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None


#: Advice for encoding stages whose results do not fit on the disk.
SPACE_ADVICE = "free space, or set `root` to another place, such as an object store"


def find_free_space(target: str | Path) -> int | None:
    """Return the free bytes on the disk of `target`; None for a URL. target: a folder, which may not exist yet."""
    if "://" in str(target):
        return None
    folder = Path(target).absolute()
    existing = next(part for part in (folder, *folder.parents) if part.is_dir())
    return shutil.disk_usage(existing).free


def find_shortage(target: str | Path, needed: int) -> str | None:
    """Return a warning if the disk of `target` has fewer free bytes than `needed`, else None; None for a URL. target: a
    folder, which may not exist yet."""
    free = find_free_space(target)
    if free is None or free >= needed:
        return None
    return (
        f"about {format_bytes(needed)} will be written, but the disk of {shown_path(target)} has {format_bytes(free)}"
    )
