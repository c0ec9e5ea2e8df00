"""Opens shards for reading, writing or verification: by name, in either format, or by number, in the order in which a
training set needs them."""

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from cache.shards import arrow, wds
from cache.shards.shard import ARROW_SUFFIX, SUFFIXES, TAR_SUFFIX, BaseShardReader, BaseShardWriter, ShardMeta, ShardRow
from cache.store import json_checks
from cache.store.damage import DamageError, retry_bad_answers
from cache.store.store import Store
from schemas.activities import activity
from schemas.errors import USAGE, LatentpressError


def open_writer(
    store: Store, rel_stem: str, meta: ShardMeta, columns: Mapping[str, str], format: str = "arrow"
) -> BaseShardWriter:
    """Return a writer for `<rel_stem>.arrow` or `.tar`. columns: tensor name -> dtype; a row may lack any tensor."""
    if format not in SUFFIXES:
        raise ValueError(f"cache format {format!r} is not valid; choose from {', '.join(SUFFIXES)}")
    assert not _escapes_root(rel_stem), f"{rel_stem!r} leads out of the root"
    return (arrow if format == "arrow" else wds).ShardWriter(store, rel_stem, meta, columns)


def open_reader(store: Store, rel: str) -> BaseShardReader:
    """Return a reader for the shard at `rel`, chosen by the suffix."""
    return retry_bad_answers(store.remote_url, partial(_reader_class(store, rel), store, rel))


def _reader_class(store: Store, rel: str) -> type[BaseShardReader]:
    if not rel.endswith((ARROW_SUFFIX, TAR_SUFFIX)):
        raise ValueError(f"{rel!r} is not a shard: its name must end with {ARROW_SUFFIX} or {TAR_SUFFIX}")
    if _escapes_root(rel):
        raise DamageError(store.path(json_checks.printable(rel)), "its name leads out of the root")
    return (arrow if rel.endswith(ARROW_SUFFIX) else wds).ShardReader


def _escapes_root(rel: str) -> bool:
    """Whether `rel` is not a plain path below a root. Shard names are checked because they can come from tables made
    elsewhere."""
    return "\0" in rel or any(part in ("", ".", "..") for part in rel.split("/"))


def verify(
    store: Store,
    rel: str,
    check_meta: Callable[[ShardMeta], Iterable[str]] | None = None,
    check_row: Callable[[ShardRow], object] | None = None,
) -> list[DamageError]:
    """Read every byte of the shard at `rel` and return all damage found, also if the shard can't be opened. On an
    object store, only damage that remains after the whole shard is requested again is returned.

    check_meta: function that returns further problems of the shard's description. check_row: function that is passed to
    `BaseShardReader.verify`.
    """
    damages: list[DamageError] = []

    def check() -> None:
        damages.clear()
        with reader_class(store, rel) as shard:
            reasons = check_meta(shard.meta) if check_meta else ()
            damages[:] = [DamageError(shard.path, reason) for reason in reasons] + shard.verify(check_row)
        if damages:
            raise damages[0]

    try:
        reader_class = _reader_class(store, rel)
        retry_bad_answers(store.remote_url, check)
    except DamageError as damage:
        return damages or [damage]
    return damages


class ReaderPool:
    """Keeps the `limit` last used readers open, so that reading many shards in random order needs few open files and
    memory maps. Threads may share a pool; threads that read the same shard wait for each other."""

    def __init__(self, store: Store, limit: int = 64) -> None:
        assert limit > 0
        self.store, self.limit = store, limit
        self._open: OrderedDict[str, tuple[BaseShardReader, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self, path: str, row: int, verify: bool = True, open: Callable[[], BaseShardReader] | None = None
    ) -> ShardRow:
        """Return row `row` of the shard at `path` (relative to the store). open: function that opens the shard, by
        default `open_reader`."""
        reader, lock = self._get(path, open)
        with lock:
            return reader.read(row, verify)

    def meta(self, path: str) -> ShardMeta:
        return self._get(path)[0].meta

    def forget(self, path: str) -> None:
        """Drop the reader of the shard at `path`, so that the next read opens the shard again."""
        with self._lock:
            self._open.pop(path, None)  # closed when no thread reads from it

    def _get(
        self, path: str, open: Callable[[], BaseShardReader] | None = None
    ) -> tuple[BaseShardReader, threading.Lock]:
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        reader = open_reader(self.store, path) if open is None else open()  # outside the lock, because it may take long
        opened = reader, threading.Lock()
        with self._lock:
            if path not in self._open:
                while len(self._open) >= self.limit:
                    self._open.popitem(last=False)  # closed when no thread reads from it
                self._open[path] = opened
            return self._open[path]

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1][0].close()


# -- sources of a training set's shards --------------------------------------------------------------------------------


class ShardSupply:
    """Opens the shards of a training set by number: from their store or, in the window of a remote set
    (`cache/sets/window.py`), from copies on this machine that are fetched before a step needs them. Threads may share a
    supply. Messages name shards by their paths in the set's store, even if their bytes come from copies.

    path_of: function from a shard's number to its path. forget: function that is called with the number of each shard
    whose file is about to be removed. It must drop open readers of the shard, so that the disk space becomes free. Rows
    that are already mapped into memory can still be read.
    """

    forget: Callable[[int], object] = staticmethod(lambda number: None)

    def __init__(self, store: Store, path_of: Callable[[int], str]) -> None:
        self._store, self._path_of = store, path_of

    def follow(self, first: int) -> None:
        """Announce that steps `first`, first + 1, ... will be read, in this order."""

    def open(self, number: int) -> BaseShardReader:
        """Return a reader for shard `number`, even if no announced step needs it; waits until its bytes are available.
        Raises DamageError if the shard is missing or can't be read, and StoreError if the store fails; both name the
        shard.
        """
        return open_reader(self._store, self._path_of(number))

    def finished(self, step: int) -> None:
        """Announce that all rows of `step` and of earlier steps have been read."""

    def damaged(self, number: int) -> bool:
        """Report that a row of shard `number` is damaged. Returns True if the shard's bytes were dropped, so that
        `open` reads them again; False if the bytes can't be dropped or were dropped once already."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return numbers for the metrics of a step, counted since the last call; {} if nothing was counted."""
        return {}

    def show_wait(self) -> AbstractContextManager[object]:
        """Context that, while the main thread waits for shards that other threads `open`, shows the shards and, if
        their sizes are available, the time left."""
        return activity(f"waiting for data: shards are read from {self._store.url}")

    def stop_waiting(self) -> None:
        """Make waiting calls of `open` raise, so that their threads end. Applies until `follow` is called again."""

    def close(self) -> None:
        """End the supply's threads. No other method may be called afterwards."""


MAX_OPEN, MIN_OPEN = 1024, 32  # 1,024 shards of their usual size are 128 GiB


def open_limit() -> int:
    """Return the number of shards that may be open: a quarter of the process's limit of open files, but at least 32 and
    at most 1,024."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = MAX_OPEN if files == resource.RLIM_INFINITY else files // 4
    return max(MIN_OPEN, min(MAX_OPEN, quarter))


class SupplyError(LatentpressError):
    """The shards can't be supplied within the given limit."""

    exit_code = USAGE
