"""A folder of shards that processes fill, read and remove within a limit of bytes, and the shard that a process fetches
or encodes next into it.

Whoever counts, begins or removes shards holds the folder's lock (flock). Each process that uses it has a file, locked
as long as the process lives, with the shards that it has begun, each with the most bytes that it may take, and those
that it holds, which no other process removes. The kernel releases locks when a process ends: one that was killed leaves
temporary files at most, which the next count removes.

A shard counts as there once it has its final name. It is one file, or two where `<name>.json` describes `<name>`.
Removing is unlinking: who has the file mapped goes on reading it.

The next shard:

- Shards are in the order in which the coming steps need them first; those that a reader waits for come before all. A
  shard is begun only where it and all before it fit in the limit together, so what is begun is never in the way of what
  is needed sooner.
- Shards that are there, and those that are begun at their largest possible size, never take more than the limit: others
  are removed first, the one needed last before all (Belady 1966), where what no step in sight needs counts as last.
- A shard takes the place of any that is needed later. Of copies, one that the first step does not need takes that of
  those only that are needed twice as far from now: something better may become free. Encoding beside training does not
  wait for that: where the two take turns, each turn would be shorter, and loads the models again.

Counting, removing and beginning are one step under the folder's lock, and nothing but the files is a record of them.
Several processes that follow one plan get the same answer; those with plans of their own have equal parts of the limit.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from cache.shards.shard import ARROW_SUFFIX, SIDECAR_SUFFIX, TAR_SUFFIX
from cache.store.files import explained, is_temporary, make_folders
from cache.supply.step_needs import StepNeeds

POSITION = "position.json"  # beside the files of processes: where training is, of shards that are encoded beside it
DESCRIPTION = ".json"
LOOK_S = 1.0  # after which it is looked who else uses the folder


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


class ShardQueue:
    """names, sizes: of shards by number; sizes are the most that they may have. let_go: called with the number of
    a shard that this process no longer holds, or that is removed."""

    def __init__(
        self,
        folder: LimitedFolder,
        member: Member,
        names: Sequence[str],
        sizes: Sequence[int],
        let_go: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.folder, self.member, self.names, self.sizes = folder, member, names, sizes
        self._numbers = {name: number for number, name in enumerate(names)}
        self._let_go = let_go
        self.share, self.other = folder.limit, 0  # of this process; bytes that it can't remove, as of the last look
        self._looked = -inf
        if folder.names is None:  # the limit may be another than before
            with folder.locked():
                self._make_room(folder.scan(member.path), 0, (), (), -inf)

    def next(self, needs: StepNeeds, wanted: Collection[int], is_mine: Callable[[int], bool]) -> int | None:
        """The shard to get now, which is begun, or held where it is there; None where there is none: all that is
        needed and fits is there or begun. is_mine: whether this process is the one to get it."""
        order = needs.order(wanted)
        mine = {number for _, number in order if is_mine(number)}
        if not mine and time.monotonic() - self._looked < LOOK_S:
            return None
        with self.folder.locked():
            self._looked = time.monotonic()
            disk = self.folder.scan(self.member.path)
            divided = self.folder.names is None
            self.share = self.folder.limit // (max(1, disk.processes) if divided else 1)
            self.other = 0 if divided else sum(size for name, size in disk.sizes.items() if name not in self._numbers)
            self._keep_to_share(order, 0, -inf)
            number = self._choose(disk, order, wanted, mine, needs.first)
            self.member.write()
            return number

    def _choose(
        self, disk: Disk, order: Sequence[tuple[int, int]], wanted: Collection[int], mine: set[int], first: int
    ) -> int | None:
        before = self.other
        for step, number in order:
            name, size = self.names[number], self.sizes[number]
            before += disk.sizes.get(name, size)
            if before > self.share:
                return None
            if number not in mine or name in disk.begun or (name in disk.sizes and self.folder.names is not None):
                continue
            last = step + max(0, step - first) if self.folder.names is None else step
            if not self._keep_to_share(order, size, last):
                return None
            if name in disk.sizes:
                self.member.held.add(name)
                return number
            if not self._make_room(disk, size, order, wanted, last):
                return None
            self.member.begun[name] = size
            return number
        return None

    def _make_room(
        self, disk: Disk, size: int, order: Sequence[tuple[int, int]], wanted: Collection[int], step: float
    ) -> bool:
        """Remove shards that are needed after `step`, the last one first, of those that no step needs the one that was
        used longest ago, until `size` bytes are free; False, and nothing is removed, where that is not enough."""
        excess = disk.total + size - self.folder.limit
        needs = {self.names[number]: need for need, number in order}
        kept = disk.held | {self.names[number] for number in wanted}
        removable = [
            name
            for name in disk.sizes
            if needs.get(name, inf) > step and name not in kept and self.folder.may_remove(name)
        ]
        if sum(disk.sizes[name] for name in removable) < excess:
            return False
        for name in sorted(removable, key=lambda name: (-needs.get(name, inf), disk.used[name], name)):
            if excess <= 0:
                break
            self.member.held.discard(name)
            if name in self._numbers:
                self._let_go(self._numbers[name])
            self.folder.remove(name)
            excess -= disk.sizes.pop(name)
        return True

    def _keep_to_share(self, order: Sequence[tuple[int, int]], size: int, step: float) -> bool:
        """Let go of what is not needed any more, and of what is needed last, later than `step`, until this process may
        hold `size` bytes more; False, and nothing of it is let go of, where that is not enough."""
        sizes = {name: self.sizes[self._numbers[name]] for name in self.member.held}
        for name in sizes.keys() - {self.names[number] for _, number in order}:
            del sizes[name]
            self.let_go(name)
        excess = sum(self.member.begun.values()) + sum(sizes.values()) + size - self.share
        later = [name for need, number in order if need > step and (name := self.names[number]) in sizes]
        if excess > sum(sizes[name] for name in later):
            return False
        while excess > 0:
            excess -= sizes[later[-1]]
            self.let_go(later.pop())
        return True

    def let_go(self, name: str) -> None:
        """Hold a shard no longer: any process may remove it."""
        self.member.held.discard(name)
        self._let_go(self._numbers[name])

    def end(self, number: int, held: bool = False) -> None:
        """The shard is done, or failed: it is counted by its file from now on. held: this process reads it."""
        name = self.names[number]
        with self.folder.locked():
            self.member.begun.pop(name, None)
            (self.member.held.add if held else self.member.held.discard)(name)
            self.member.write()
