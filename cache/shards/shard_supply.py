"""The source of a training set's shards when they are read: the seam between the trainer and the places of shards.

A supply opens a shard of a set by its number. `StoredShards` opens the shard in its store; the window of a remote set
(`cache/sets/window.py`) opens a copy on this machine, which it fetches before a step needs it.
"""

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager

from cache.shards.shard import BaseShardReader
from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.activities import activity
from schemas.errors import USAGE, LatentpressError


class ShardSupply:
    """Threads may share it. Messages name shards as the set's store does (`Store.path`), wherever their bytes are."""

    def follow(self, first: int) -> None:
        """Steps `first`, first + 1, ... are read from now on, in this order."""

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
        """End the waits of `open` by an error, so that the threads in it end. Until `follow` is called again."""

    def close(self) -> None:
        """End its threads. Nothing else is to be called afterwards."""


class StoredShards(ShardSupply):
    """The shards where they are in `store`. path_of: number -> path."""

    def __init__(self, store: Store, path_of: Callable[[int], str]) -> None:
        self._store, self._path_of = store, path_of

    def open(self, number: int) -> BaseShardReader:
        return open_reader(self._store, self._path_of(number))

    def show_wait(self) -> AbstractContextManager[object]:
        return activity(f"waiting for data: shards are read from {self._store.url}")


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
