"""Opening a shard by its name, for reading, writing or verification, in whichever of the two formats it has."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from cache import arrow, json_checks, wds
from cache.damage import DamageError
from cache.shard import ARROW_SUFFIX, SUFFIXES, TAR_SUFFIX, BaseShardReader, ShardMeta, ShardRow, ShardWriter
from cache.store import Store


def open_writer(
    store: Store, rel_stem: str, meta: ShardMeta, columns: Mapping[str, str], format: str = "arrow"
) -> ShardWriter:
    """A writer of `<rel_stem>.arrow` or `.tar`. `columns`: tensor name -> dtype; a row may lack any."""
    if format not in SUFFIXES:
        raise ValueError(f"cache format {format!r} is unknown; choose from {', '.join(SUFFIXES)}")
    assert not _escapes_root(rel_stem), f"{rel_stem!r} leads out of the root"
    twin = arrow if format == "arrow" else wds
    return twin.ShardWriter(store, rel_stem, meta, columns)


def open_reader(store: Store, rel: str) -> BaseShardReader:
    """A reader of the shard at `rel`, chosen by its suffix."""
    if not rel.endswith((ARROW_SUFFIX, TAR_SUFFIX)):
        raise ValueError(f"{rel!r} is no shard: its name must end with {ARROW_SUFFIX} or {TAR_SUFFIX}")
    if _escapes_root(rel):
        raise DamageError(store.path(json_checks.printable(rel)), "its name leads out of the root")
    twin = arrow if rel.endswith(ARROW_SUFFIX) else wds
    return twin.ShardReader(store, rel)


def _escapes_root(rel: str) -> bool:
    """Whether this is no plain path below a root: the tables of a set that came from elsewhere name shards too."""
    return "\0" in rel or any(part in ("", ".", "..") for part in rel.split("/"))


def verify(
    store: Store,
    rel: str,
    whole: Callable[[ShardMeta], Iterable[str]] | None = None,
    look: Callable[[ShardRow], object] | None = None,
) -> list[DamageError]:
    """Read everything in the shard at `rel`; every damage found, also when it can't be opened.

    whole, look: what else is asked of its description (says what is wrong) and of each row (as BaseShardReader.verify).
    """
    try:
        shard = open_reader(store, rel)
    except DamageError as damage:
        return [damage]
    try:
        path = store.path(rel)
        wrong = [DamageError(path, reason) for reason in (whole(shard.meta) if whole else ())]
        return wrong + shard.verify(look)
    finally:
        shard.close()


class ReaderPool:
    """Open readers, the `limit` last used: a random order over many shards holds few files and maps open."""

    def __init__(self, store: Store, limit: int = 64) -> None:
        assert limit > 0
        self.store, self.limit = store, limit
        self._open: OrderedDict[str, BaseShardReader] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, row: int, verify: bool = True) -> ShardRow:
        """Row `row` of the shard at `path` (relative to the store). Several threads may call it, in turn."""
        with self._lock:
            return self._get(path).read(row, verify)

    def meta(self, path: str) -> ShardMeta:
        with self._lock:
            return self._get(path).meta

    def _get(self, path: str) -> BaseShardReader:
        if path not in self._open:
            while len(self._open) >= self.limit:
                self._open.popitem(last=False)[1].close()
            self._open[path] = open_reader(self.store, path)
        self._open.move_to_end(path)
        return self._open[path]

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
