"""A folder of shards that processes fill, read and remove within a limit of bytes.

Whoever counts, begins or removes shards holds the folder's lock (flock). Each process that uses it has a file, locked
as long as the process lives, with the shards that it has begun, each with the most bytes that it may take, and those
that it holds, which no other process removes. The kernel releases locks when a process ends: one that was killed leaves
temporary files at most, which the next count removes.

A shard counts as there once it has its final name. It is one file, or two where `<name>.json` describes `<name>`.
Removing is unlinking: who has the file mapped goes on reading it.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cache.shards.shard import ARROW_SUFFIX, SIDECAR_SUFFIX, TAR_SUFFIX
from cache.store.files import explained, is_temporary, make_folders

POSITION = "position.json"  # beside the files of processes: where training is, of shards that are encoded beside it
DESCRIPTION = ".json"


@dataclass
class Member:
    """A process that uses a folder. begun: shards that it is making, and the most bytes of each. held: shards that it
    reads."""

    path: Path
    descriptor: int
    begun: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)

    def write(self) -> None:
        """Let the others see it. Called under the folder's lock."""
        data = json.dumps({"begun": self.begun, "held": sorted(self.held)}).encode()
        with explained(str(self.path)):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, data, 0)


@dataclass
class Disk:
    """The content of a folder. sizes: bytes of each shard that is there, with its description. used: when, in
    nanoseconds. begun: the most bytes of those that are on their way. held: those that other processes read. more:
    bytes of temporary files beyond what was reserved for them."""

    sizes: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    processes: int = 0
    more: int = 0

    @property
    def total(self) -> int:
        return self.more + sum(self.sizes.values()) + sum(self.begun.values())


class LimitedFolder:
    """The shards in `folders` under `base`. limit: bytes. control: folder of the lock and of the processes' files.

    names: the only shards that may be removed; without them every one may, the processes have needs of their own, and
    so equal parts of the limit. StoreError where the folder can't be made or written to.
    """

    def __init__(
        self,
        base: Path,
        limit: int = 0,
        control: str = ".users",
        folders: Collection[str] = ("",),
        names: Collection[str] | None = None,
    ) -> None:
        self.base, self.control, self.limit = base, base / control, limit
        self._folders, self.names = folders, names

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The body alone among all threads and processes that use the folder, which is made again where it is gone."""
        make_folders(self.control)
        with explained(str(self.control)):
            lock = os.open(self.control / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def join(self, name: str) -> Member | None:
        """This process as one of those that use the folder; None where another one has the name."""
        path = self.control / f"{name}.json"
        with self.locked(), explained(str(path)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            member = Member(path, descriptor)
            member.write()
            return member

    def leave(self, member: Member) -> None:
        with self.locked():
            member.path.unlink(missing_ok=True)
            fcntl.flock(member.descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
            os.close(member.descriptor)

    def members(self) -> dict[str, Member]:
        """The processes that are alive, by their names; the files of others are removed. Called under the lock."""
        members = {}
        for path in self.control.glob("*.json"):
            if path.name == POSITION:
                continue
            with suppress(FileNotFoundError), open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    record = json.loads(file.read() or b"{}")
                    members[path.stem] = Member(path, -1, record.get("begun", {}), set(record.get("held", ())))
                else:
                    path.unlink()
        return members

    def scan(self, this: Path | None = None) -> Disk:
        """Count what there is, under the lock. Temporary files that no process writes to are removed. this: the file
        of this process, whose shards do not count as held."""
        members, disk, unfinished = self.members(), Disk(), Counter[str]()
        begun = {name: size for member in members.values() for name, size in member.begun.items()}
        others = [member for member in members.values() if member.path != this]
        disk.held = {name for member in others for name in (*member.held, *member.begun)}
        disk.processes = len(members)
        for name, about in self._list():
            folder, _, file = name.rpartition("/")
            if not is_temporary(file):
                disk.sizes[name], disk.used[name] = about.st_size, about.st_atime_ns
                continue
            shard = file[1:].rpartition(".")[0].rpartition(".")[0].removesuffix(DESCRIPTION)
            shard = f"{folder}/{shard}" if folder else shard
            if shard in begun:
                unfinished[shard] += about.st_size
            elif self.may_remove(shard):
                (self.base / name).unlink(missing_ok=True)
        for name in [name for name in disk.sizes if name.endswith(DESCRIPTION)]:
            if name.removesuffix(DESCRIPTION) in disk.sizes:
                disk.sizes[name.removesuffix(DESCRIPTION)] += disk.sizes.pop(name)
        disk.begun = {name: size for name, size in begun.items() if name not in disk.sizes}
        # A process that died may have left a file beside that of the next try.
        disk.more = sum(max(0, size - begun[name]) for name, size in unfinished.items())
        return disk

    def may_remove(self, name: str) -> bool:
        return self.names is None or name in self.names

    def _list(self) -> Iterator[tuple[str, os.stat_result]]:
        for folder in self._folders:
            with suppress(FileNotFoundError), os.scandir(self.base / folder) as entries:
                for entry in entries:
                    is_shard = entry.name.endswith((ARROW_SUFFIX, TAR_SUFFIX, SIDECAR_SUFFIX))
                    if self.names is None or is_shard or is_temporary(entry.name):
                        with suppress(FileNotFoundError):  # renamed or removed meanwhile
                            if entry.is_file(follow_symlinks=False):
                                yield (f"{folder}/{entry.name}" if folder else entry.name), entry.stat()

    def remove(self, name: str) -> None:
        """Called under the lock. Of two files the one goes first without which the shard does not count as there."""
        for file in (name, name + DESCRIPTION):
            with explained(str(self.base / file)):
                (self.base / file).unlink(missing_ok=True)
