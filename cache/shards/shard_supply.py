"""The source of a training set's shards when they are read: the seam between the trainer and the places of shards.

A supply opens a shard of a set by its number. `StoredShards` opens it where it is. Those of `cache.supply` have a
limited number of them here, fetched or encoded before they are needed: the trainer tells a supply which shards its next
steps need, and which steps are done. `LimitedShards` is what these have in common: a shard is waited for while it is
not here, and opened when it is.

Shards of this machine's disk are read at memory speed, as memory maps and the positions of their rows. A row that was
read once costs little more than its copy: its position is in an array, and its layout is one of few. What is remembered
of a row takes 2 bytes, and 8 more while its shard is mapped. Whatever is not as expected is left to the careful readers
of `cache.shards.shard_io`, which name what is damaged.
"""

import os
import resource
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager

import pyarrow as pa

from cache.shards.row_layouts import RowLayout, TensorSpan, layouts_of
from cache.shards.shard import BaseShardReader
from cache.shards.shard_io import open_reader
from cache.store.damage import DamageError
from cache.store.files import FileIdentity
from cache.store.store import Store
from schemas.cli.progress import activity
from schemas.errors import USAGE, LatentpressError


class ShardSupply:
    """Threads may share it. Messages name shards as the set's store does (`Store.path`), wherever their bytes are.

    local: whether shards are opened as files of this machine, so that they can be mapped.
    """

    local = True

    def follow(self, first: int, needs: Iterator[Collection[int]]) -> None:
        """The numbers of the shards that steps `first`, first + 1, ... need. Read lazily, in another thread, some steps
        ahead; what it raises is raised by `open`. Takes the place of what was followed before."""

    def open(self, number: int) -> BaseShardReader:
        """A reader of shard `number`, also of one that no step was said to need; waits until its bytes are here.
        DamageError where it can't be read or is missing, StoreError where the store fails, both naming the shard.
        """
        raise NotImplementedError

    def finished(self, step: int) -> None:
        """Everything of `step` and of those before it has been read."""

    def damaged(self, number: int) -> bool:
        """Report a shard of which a row is not what was written. True where its bytes were thrown away, so that
        `open` gives others; False where that is not possible, or was done once already."""
        return False

    def on_removal(self, forget: Callable[[int], None]) -> None:
        """Call `forget` with the number of each shard whose file is about to be removed: whoever has it open lets go of
        it, so that its disk space becomes free. What was mapped before can still be read."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics of a step, counted since the last call; {} where there is nothing to say."""
        return {}

    def show_wait(self) -> AbstractContextManager[object]:
        """While the body waits for what other threads `open`, show what that is and, where bytes are known, the time
        left. Of the main thread."""
        raise NotImplementedError

    def stop_waiting(self) -> None:
        """End the waits of `open` for what may never come, by an error, so that the threads in it end. Until `follow`
        is called again."""

    def close(self) -> None:
        """End its threads. Nothing else is to be called afterwards."""


class StoredShards(ShardSupply):
    """The shards where they are in `store`. path_of: number -> path."""

    def __init__(self, store: Store, path_of: Callable[[int], str]) -> None:
        self._store, self._path_of = store, path_of
        self.local = store.root is not None

    def open(self, number: int) -> BaseShardReader:
        return open_reader(self._store, self._path_of(number))

    def show_wait(self) -> AbstractContextManager[object]:
        return activity(f"waiting for data: shards are read from {self._store.url}")


MAX_CODES = 1 << 16  # of layouts, as a row's code has 16 bits
MAX_MAPS, FEWEST_MAPS = 1024, 32  # 1,024 shards of their usual size are 128 GiB
TAR_WEIGHT = 16  # a mapped tar keeps its sidecar, about 1 KiB a row
CHECK_NS = 1_000_000  # nanoseconds after which a file is looked at again before it is read


class MappedShard:
    """A mapped shard. Its memory stays mapped while anything refers to the object, so one thread may read from it while
    another lets go of it.

    address: of the file's first byte. starts: of each row, the position that its layout counts from. codes: of each
    row, the number of its layout, or 0 where it was not read since the file was written to. reader: of a tar, and not
    for several threads at once: take `lock`.
    """

    def __init__(self, reader: BaseShardReader, file: pa.MemoryMappedFile) -> None:
        self.path, self._file = reader.path, file
        columns = getattr(reader, "columns", None)
        self.layouts = None if columns is None else layouts_of(tuple(columns.items()))
        self.reader, self.lock = (reader if columns is None else None), threading.Lock()
        self.starts = array("q", reader.row_starts().tolist())
        self.codes = array("H", bytes(2 * len(self.starts)))
        self.identity, self._checked = self._read_identity(), 0
        file.seek(0)
        self._buffer = file.read_buffer()
        self.address, self.size = self._buffer.address, self._buffer.size
        self.view = memoryview(self._buffer).cast("B")

    def _read_identity(self) -> FileIdentity:
        return FileIdentity.of(os.fstat(self._file.fileno()))

    def check(self) -> None:
        """To be called before rows are read; looks at the file unless that was done less than a millisecond ago.
        DamageError where the file was cut: to read a map beyond the end of its file kills the process. Where the file
        was written to, its rows count as not read yet."""
        time_ns = time.monotonic_ns()
        if time_ns - self._checked < CHECK_NS:
            return
        now = self._read_identity()
        if now.size < self.size:
            raise DamageError(self.path, f"it was cut while it was open: it had {self.size} bytes and has {now.size}")
        if now != self.identity:
            self.codes, self.identity = array("H", bytes(2 * len(self.starts))), now
        self._checked = time_ns  # not where it was cut: whoever comes next has to see that, too


class MappedShards:
    """The shards of a set by their numbers, at most `limit` mapped at a time. Threads may share it."""

    def __init__(self, supply: ShardSupply, limit: int | None = None) -> None:
        self._supply, self._limit = supply, map_limit() if limit is None else limit
        self._mapped: dict[int, MappedShard] = {}
        self._known: dict[int, tuple[FileIdentity, array]] = {}  # of shards that are not mapped now
        self._lock = threading.Lock()
        self._layouts: list[RowLayout] = []
        self._codes: dict[RowLayout, int] = {}
        self._alike: dict[tuple[TensorSpan, ...], RowLayout] = {}
        supply.on_removal(self.forget)

    def __len__(self) -> int:
        return len(self._mapped)

    def find(self, number: int) -> MappedShard | None:
        """Shard `number` where it is mapped."""
        return self._mapped.get(number)

    def open(self, number: int) -> MappedShard | None:
        """Shard `number`; None where it can't be mapped. Errors as of `ShardSupply.open`."""
        if not self._supply.local:
            return None
        reader = self._supply.open(number)  # it may take long, so other threads do not wait for it
        if not isinstance(reader.file, pa.MemoryMappedFile):
            reader.close()
            return None
        shard = MappedShard(reader, reader.file)
        with self._lock:
            if number in self._mapped:  # another thread was faster
                return self._mapped[number]
            self._make_room(1 if shard.reader is None else TAR_WEIGHT)
            identity, codes = self._known.pop(number, (None, shard.codes))
            if identity == shard.identity and len(codes) == len(shard.starts):
                shard.codes = codes
            self._mapped[number] = shard
            return shard

    def forget(self, number: int) -> None:
        """Let go of shard `number`: its file is about to be removed."""
        with self._lock:
            self._mapped.pop(number, None)

    def _make_room(self, weight: int) -> None:
        """Let go of the shards mapped first. To find those used longest ago each read would have to be noted, and in
        random order all are alike."""
        weight += sum(1 if shard.reader is None else TAR_WEIGHT for shard in self._mapped.values())
        while weight > self._limit and self._mapped:
            number = next(iter(self._mapped))
            gone = self._mapped.pop(number)
            self._known[number] = gone.identity, gone.codes
            weight -= 1 if gone.reader is None else TAR_WEIGHT

    def layout(self, code: int) -> RowLayout:
        """The layout that has a code."""
        return self._layouts[code - 1]

    def code(self, layout: RowLayout) -> int:
        """The code of a layout; 0 where there are too many."""
        code = self._codes.get(layout, 0)
        if not code and len(self._layouts) < MAX_CODES - 1:
            with self._lock:
                if layout not in self._codes:
                    self._layouts.append(layout)
                    self._codes[layout] = len(self._layouts)
                return self._codes[layout]
        return code

    def same_layout(self, layout: RowLayout) -> RowLayout:
        """The first layout given that has the same tensors in the same places."""
        if len(self._alike) >= MAX_CODES:
            self._alike.clear()
        return self._alike.setdefault(layout.tensors, layout)

    def close(self) -> None:
        with self._lock:
            self._mapped.clear()


def map_limit() -> int:
    """How many shards may be mapped: a quarter of the files that this process may open, but at least 32 and at most
    1,024."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = MAX_MAPS if files == resource.RLIM_INFINITY else files // 4
    return max(FEWEST_MAPS, min(MAX_MAPS, quarter))


class SupplyError(LatentpressError):
    """Shards within a limit can't be had in this way."""

    exit_code = USAGE


class LimitedShards(ShardSupply):
    """The common part of the supplies of such shards.

    A subclass says which shards are here (`_is_here`), waits for one (`_wait_for`), opens one (`_open`) and throws one
    away (`_discard`).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted = Counter[int]()  # readers wait for them, or open them
        self._replaced = Counter[int]()  # thrown away because of damage
        self._listeners: list[Callable[[int], None]] = []
        self._closed = False

    def open(self, number: int) -> BaseShardReader:
        with self._lock:
            self._wanted[number] += 1
        try:
            while True:
                with self._lock:
                    if not self._is_here(number):
                        self._wait_for(number)
                try:
                    return self._open(number)
                except DamageError as error:
                    if isinstance(error.__cause__, FileNotFoundError):
                        self._tell_removed(number)
                        if not self._is_here(number):  # removed meanwhile
                            continue
                    if not self.damaged(number):
                        raise
        finally:
            with self._lock:
                self._wanted -= Counter([number])

    def damaged(self, number: int) -> bool:
        with self._lock:
            if number in self._replaced:
                return False
            self._replaced[number] += 1
            self._discard(number)
        self._tell_removed(number)
        return True

    def on_removal(self, forget: Callable[[int], None]) -> None:
        self._listeners.append(forget)

    def _tell_removed(self, number: int) -> None:
        for forget in self._listeners:
            forget(number)

    def _is_here(self, number: int) -> bool:
        raise NotImplementedError

    def _wait_for(self, number: int) -> None:
        """Until it is here. Called, as `_is_here` is, by the thread that has the lock."""
        raise NotImplementedError

    def _open(self, number: int) -> BaseShardReader:
        raise NotImplementedError

    def _discard(self, number: int) -> None:
        raise NotImplementedError
