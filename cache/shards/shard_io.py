"""Opening shards by name, in either format, for reading, writing or verification; and by number, in the order in which
a training set needs them."""

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from cache.shards import arrow, wds
from cache.shards.shard import ARROW_SUFFIX, SUFFIXES, TAR_SUFFIX, BaseShardReader, BaseShardWriter, ShardMeta, ShardRow
from cache.store import json_checks
from cache.store.damage import DamageError, until_sound
from cache.store.store import Store
from schemas.activities import activity
from schemas.errors import USAGE, LatentpressError


def open_writer(
    store: Store, rel_stem: str, meta: ShardMeta, columns: Mapping[str, str], format: str = "arrow"
) -> BaseShardWriter:
    """A writer of `<rel_stem>.arrow` or `.tar`. columns: tensor name -> dtype; a row may lack any of them."""
    if format not in SUFFIXES:
        raise ValueError(f"cache format {format!r} is unknown; choose from {', '.join(SUFFIXES)}")
    assert not _escapes_root(rel_stem), f"{rel_stem!r} leads out of the root"
    return (arrow if format == "arrow" else wds).ShardWriter(store, rel_stem, meta, columns)


def open_reader(store: Store, rel: str) -> BaseShardReader:
    """A reader of the shard at `rel`, chosen by its suffix."""
    return until_sound(store.remote_url, partial(_reader_class(store, rel), store, rel))


def _reader_class(store: Store, rel: str) -> type[BaseShardReader]:
    if not rel.endswith((ARROW_SUFFIX, TAR_SUFFIX)):
        raise ValueError(f"{rel!r} is no shard: its name must end with {ARROW_SUFFIX} or {TAR_SUFFIX}")
    if _escapes_root(rel):
        raise DamageError(store.path(json_checks.printable(rel)), "its name leads out of the root")
    return (arrow if rel.endswith(ARROW_SUFFIX) else wds).ShardReader


def _escapes_root(rel: str) -> bool:
    """Whether this is no plain path below a root: shard names also come from tables that others made."""
    return "\0" in rel or any(part in ("", ".", "..") for part in rel.split("/"))


def verify(
    store: Store,
    rel: str,
    check_meta: Callable[[ShardMeta], Iterable[str]] | None = None,
    check_row: Callable[[ShardRow], object] | None = None,
) -> list[DamageError]:
    """Read every byte of the shard at `rel`; all damage found, also where it can't be opened. On an object store: what
    stays when all of it is asked for again.

    check_meta: further problems of the description. check_row: as of BaseShardReader.verify.
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
        until_sound(store.remote_url, check)
    except DamageError as damage:
        return damages or [damage]
    return damages


class ReaderPool:
    """The `limit` last used readers, kept open: reading many shards in random order needs few open files and maps.
    Threads may share it; those that read the same shard wait for each other."""

    def __init__(self, store: Store, limit: int = 64) -> None:
        assert limit > 0
        self.store, self.limit = store, limit
        self._open: OrderedDict[str, tuple[BaseShardReader, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self, path: str, row: int, verify: bool = True, open: Callable[[], BaseShardReader] | None = None
    ) -> ShardRow:
        """Row `row` of the shard at `path` (relative to the store). open: where the shard is opened otherwise."""
        reader, lock = self._get(path, open)
        with lock:
            return reader.read(row, verify)

    def meta(self, path: str) -> ShardMeta:
        return self._get(path)[0].meta

    def forget(self, path: str) -> None:
        """Let go of the shard at `path`: the next read opens it anew."""
        with self._lock:
            self._open.pop(path, None)  # closed when no thread reads from it any more

    def _get(
        self, path: str, open: Callable[[], BaseShardReader] | None = None
    ) -> tuple[BaseShardReader, threading.Lock]:
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        reader = open_reader(self.store, path) if open is None else open()  # may take long: others do not wait for it
        opened = reader, threading.Lock()
        with self._lock:
            if path not in self._open:
                while len(self._open) >= self.limit:
                    self._open.popitem(last=False)  # closed when no thread reads from it any more
                self._open[path] = opened
            return self._open[path]

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1][0].close()


# -- where the shards of a training set come from ----------------------------------------------------------------------


class ShardSupply:
    """Opens the shards of a training set by their numbers: in their store or, by the window of a remote set
    (`cache/sets/window.py`), from copies on this machine, fetched before a step needs them. Threads may share it.
    Messages name shards as the set's store does, wherever their bytes are.

    path_of: number -> path. forget: is called with the number of each shard whose file is about to be removed: whoever
    has it open lets go of it, so that its disk space becomes free. What was mapped before can still be read.
    """

    forget: Callable[[int], object] = staticmethod(lambda number: None)

    def __init__(self, store: Store, path_of: Callable[[int], str]) -> None:
        self._store, self._path_of = store, path_of

    def follow(self, first: int) -> None:
        """Steps `first`, first + 1, ... are read from now on, in this order."""

    def open(self, number: int) -> BaseShardReader:
        """A reader of shard `number`, also of one that no step was said to need; waits until its bytes are here.
        DamageError where it can't be read or is missing, StoreError where the store fails, both naming the shard.
        """
        return open_reader(self._store, self._path_of(number))

    def finished(self, step: int) -> None:
        """Everything of `step` and of those before it has been read."""

    def damaged(self, number: int) -> bool:
        """Report a shard of which a row is not what was written. True where its bytes were thrown away, so that
        `open` gives others; False where that is not possible, or was done once already."""
        return False

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics of a step, counted since the last call; {} where there is nothing to say."""
        return {}

    def show_wait(self) -> AbstractContextManager[object]:
        """While the body waits for what other threads `open`, show what that is and, where bytes are known, the time
        left. Of the main thread."""
        return activity(f"waiting for data: shards are read from {self._store.url}")

    def stop_waiting(self) -> None:
        """End the waits of `open` by an error, so that the threads in it end. Until `follow` is called again."""

    def close(self) -> None:
        """End its threads. Nothing else is to be called afterwards."""


MAX_OPEN, FEWEST_OPEN = 1024, 32  # 1,024 shards of their usual size are 128 GiB


def open_limit() -> int:
    """How many shards may be open: a quarter of the files that this process may open, but at least 32 and at most
    1,024."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = MAX_OPEN if files == resource.RLIM_INFINITY else files // 4
    return max(FEWEST_OPEN, min(MAX_OPEN, quarter))


class SupplyError(LatentpressError):
    """Shards within a limit can't be had in this way."""

    exit_code = USAGE
