"""Whole copies of remote files in a folder of this machine, which processes share, within a limit of bytes.

A copy is one file, or two where `<name>.json` describes `<name>`; it appears under its final name when all of its
bytes are there. What a process needs soon it holds by a shared lock
on the file (flock), which ends with the process; a copy is removed only by who gets the file alone. A copy on its way
is `<name>.<bytes>.part`, locked by the process that writes it: others wait for it instead of fetching the same, and one
that died is followed by the next. Room is made, and promised to copies on their way, under the lock of the folder, so
that the limit holds at every moment.
"""

import fcntl
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cache.store.files import explained, make_folders

PART = re.compile(r"(.+)\.([0-9]{1,18})\.part", re.ASCII)
LOCK, USERS = ".lock", ".users"
DESCRIPTION = ".json"


class CopyIsBusy(Exception):
    """Another process, or thread, is fetching it."""


class FileVersion(NamedTuple):
    """While it is the same, nobody wrote to the file."""

    inode: int
    size: int
    mtime_ns: int


@dataclass
class HeldCopy:
    """A copy that stays as long as it is held."""

    path: Path
    descriptor: int

    @property
    def version(self) -> FileVersion:
        about = os.fstat(self.descriptor)
        return FileVersion(about.st_ino, about.st_size, about.st_mtime_ns)

    def release(self) -> None:
        os.close(self.descriptor)


@dataclass
class StartedCopy:
    """A copy on its way: write to `part`, and perhaps to `description`, then `finish`, or `abandon` it."""

    path: Path
    part: Path
    descriptor: int
    folder: "CopyFolder"

    @property
    def description(self) -> Path:
        return self.part.with_name(self.part.name + DESCRIPTION)

    def finish(self) -> HeldCopy:
        """Let it appear under its final name."""
        with self.folder.locked():
            with suppress(FileNotFoundError):
                os.rename(self.description, self.path.with_name(self.path.name + DESCRIPTION))
            os.rename(self.part, self.path)
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        return HeldCopy(self.path, self.descriptor)

    def abandon(self) -> None:
        for path in (self.description, self.part):
            path.unlink(missing_ok=True)
        os.close(self.descriptor)


class CopyFolder:
    """limit: bytes. StoreError where the folder can't be made or written to."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        with self.locked():
            self._user = folder / USERS / secrets.token_hex(8)
            self._presence = os.open(self._user, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._presence, fcntl.LOCK_EX)
            self._make_room(0, (), ())

    def share(self) -> int:
        """Bytes that this process may hold: the limit divided by the processes that use the folder now."""
        users = 0
        for path in (self.folder / USERS).glob("*"):
            with suppress(FileNotFoundError), open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    users += 1
                else:
                    path.unlink(missing_ok=True)  # its process is gone
        return self.limit // max(1, users)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The body alone among all threads and processes that use the folder, which is made again where it is gone."""
        make_folders(self.folder / USERS)
        with explained(str(self.folder)), open(self.folder / LOCK, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def hold(self, name: str) -> HeldCopy | None:
        """The copy `name`, if it is there; counts as a use of it."""
        path = self.folder / name
        with explained(str(path)):
            while True:
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    return None
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                about = os.fstat(descriptor)
                if about.st_nlink:
                    with suppress(PermissionError):
                        os.utime(descriptor, ns=(time.time_ns(), about.st_mtime_ns))
                    return HeldCopy(path, descriptor)
                os.close(descriptor)  # removed before the lock was there

    def start(
        self, name: str, size: int, needed: Collection[str], expendable: Iterable[str]
    ) -> tuple[StartedCopy | HeldCopy | None, list[str]]:
        """Make room for the copy `name` of `size` bytes and promise it, unless it is there; None where there is no
        room. And the names of the copies that were removed, also where that was not enough. CopyIsBusy where another
        process is at it.

        needed: names that stay. expendable: those of them that may be removed if need be, the first first; who gives
        them lets go of each before it comes.
        """
        path, part = self.folder / name, self.folder / f"{name}.{size}.part"
        with self.locked(), explained(str(part)):
            if (found := self.hold(name)) is not None:
                return found, []
            removed, enough = list[str](), part.exists()  # by a process that died, unless it has the lock
            if not enough:
                removed, enough = self._make_room(size, needed, expendable)
            if not enough:
                return None, removed
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise CopyIsBusy from None
            return StartedCopy(path, part, descriptor, self), removed

    def discard(self, name: str, version: FileVersion) -> None:
        """Remove the copy `name` if it is still that file, also where others hold it: they can still read it."""
        with self.locked(), suppress(FileNotFoundError):
            if os.stat(self.folder / name).st_ino == version.inode:
                self._remove(name)

    def _remove(self, name: str) -> None:
        for each in (name, name + DESCRIPTION):
            (self.folder / each).unlink(missing_ok=True)

    def used(self) -> int:
        """Bytes of all copies, and of those on their way their full size."""
        return sum(size for _, size, _ in self._list())

    def _make_room(self, size: int, needed: Collection[str], expendable: Iterable[str]) -> tuple[list[str], bool]:
        """The names of what was removed, and whether `size` more bytes are within the limit now."""
        entries = sorted(self._list(), key=lambda entry: entry[2])
        sizes, removed = {name: one for name, one, _ in entries}, list[str]()
        total = sum(sizes.values()) + size
        if total <= self.limit:
            return removed, True
        for name in chain((name for name in sizes if name not in needed), expendable):
            if self._remove_unused(name):
                total -= sizes.get(name, 0)
                removed.append(name)
            if total <= self.limit:
                return removed, True
        return removed, False

    def _list(self) -> list[tuple[str, int, int]]:
        """(name, bytes with its description, time of the last use) of each copy; one on its way has its part's name and
        counts whole."""
        found = dict[str, tuple[int, int]]()
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.name != LOCK:
                    about = entry.stat()
                    found[entry.name] = about.st_size, about.st_atime_ns
        for name in [name for name in found if name.endswith(DESCRIPTION)]:
            described = name.removesuffix(DESCRIPTION)
            if described in found:
                found[described] = found[described][0] + found.pop(name)[0], found[described][1]
        parts = {name: int(part[2]) for name in found if (part := PART.fullmatch(name))}
        return [(name, max(size, parts.get(name, 0)), used) for name, (size, used) in found.items()]

    def _remove_unused(self, name: str) -> bool:
        """Remove a copy, or what a process that died left of one, unless anybody holds it."""
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove(name)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._user.unlink(missing_ok=True)
        os.close(self._presence)
