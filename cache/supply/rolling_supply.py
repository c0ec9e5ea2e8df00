"""The shards of a rolling set as the trainer reads them: waits for those that are being made, says how far it is, and
lets go of those that were removed."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from cache.shards.shard import BaseShardReader
from cache.shards.shard_io import open_reader
from cache.store.damage import ENCODE_PROGRAMS, DamageError
from cache.supply.rolling import RollingCache
from cache.supply.rolling_files import Position, RollingError
from schemas.cli.progress import activity

POLL_S = 0.05
TELL_S = 0.2  # at most so often the position is written
FIRST_MESSAGE_S, NEXT_MESSAGE_S = 10.0, 60.0


class RollingSupply:
    """See `cache.shards.shard_supply.ShardSupply`. main: whether this process tells where the run is; of several, one
    does. behind: steps that other processes may be behind it.

    on_wait: called again and again while a shard is waited for; what it raises ends the wait. log: for people.
    """

    local = True

    def __init__(
        self,
        cache: RollingCache,
        position: Position,
        main: bool = True,
        log: Callable[[str], object] = lambda text: None,
        behind: int = 0,
    ) -> None:
        self._cache, self._position, self._main, self._log = cache, position, main, log
        self._behind = behind
        self.on_wait: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._forget: list[Callable[[int], None]] = []
        self._opened: dict[int, int] = {}  # shard -> inode of its file
        self._waiting: dict[int, float] = {}  # shard -> since when
        self._replaced: set[int] = set()  # thrown away as damaged, once
        self._told, self._next_message, self._stopped = 0.0, 0.0, False
        self._closed = False
        self._tell(now=True)

    def follow(self, first: int, needs: Iterator[Collection[int]]) -> None:
        """`needs` is left alone: the stages compute the order themselves."""
        self._stopped = False
        self._position = replace(self._position, step=first)
        self._tell(now=True)

    def open(self, number: int) -> BaseShardReader:
        began = time.monotonic()
        try:
            while True:
                if self._cache.has(number):
                    try:
                        reader = open_reader(self._cache.store, self._cache.paths[number])
                    except DamageError as error:
                        if isinstance(error.__cause__, FileNotFoundError):
                            continue  # removed meanwhile
                        if not self.damaged(number):
                            raise
                        continue
                    with suppress(FileNotFoundError):
                        self._opened[number] = os.stat(reader.path).st_ino
                    return reader
                self._wait(number, began)
        finally:
            if self._waiting.pop(number, None) is not None:
                self._tell(now=True)

    def _wait(self, number: int, began: float) -> None:
        if number not in self._waiting:
            self._waiting[number] = began
            self._next_message = began + FIRST_MESSAGE_S
            self._tell(now=True)
        if self._stopped:
            raise RollingError(f"{self._cache.paths[number]} is not needed any more", "Nothing has to be done.")
        self.on_wait()
        now = time.monotonic()
        if now >= self._next_message and self._main:
            self._next_message = now + NEXT_MESSAGE_S
            program = ENCODE_PROGRAMS[self._cache.kinds[number]]
            with self._cache.files.locked():
                running = self._cache.files.read_stage(program) is not None
            if not running:
                path = self._cache.paths[number]
                why = f"is not there, and `latentpress {program}` is not running: start it"
                self._log(f"waiting for data since {now - began:.0f} s: {path} {why}")
        time.sleep(POLL_S)

    def finished(self, step: int) -> None:
        self._position = replace(self._position, step=max(self._position.step, step + 1 - self._behind))
        self._tell()

    def _tell(self, now: bool = False) -> None:
        """Write the position, and let go of files that are gone."""
        with self._lock:
            if not now and time.monotonic() - self._told < TELL_S:
                return
            self._told = time.monotonic()
            if self._main:
                self._cache.files.write_position(replace(self._position, wanted=tuple(sorted(self._waiting))))
        for number, inode in list(self._opened.items()):
            try:
                if os.stat(self._cache.store.path(self._cache.paths[number])).st_ino == inode:
                    continue
            except FileNotFoundError:
                pass
            self._opened.pop(number, None)
            for forget in self._forget:
                forget(number)

    def damaged(self, number: int) -> bool:
        if number in self._replaced:
            return False
        self._replaced.add(number)
        self._log(f"{self._cache.paths[number]} is damaged and is encoded again")
        with self._cache.files.locked():
            self._cache.remove(number)
        self._opened.pop(number, None)
        for forget in self._forget:
            forget(number)
        return True

    def on_removal(self, forget: Callable[[int], None]) -> None:
        self._forget.append(forget)

    def metrics(self) -> dict[str, float]:
        return {}

    def show_wait(self) -> AbstractContextManager[object]:
        paths = [self._cache.paths[number] for number in list(self._waiting)]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return activity(f"waiting for {paths[0]}{more} to be encoded" if paths else "waiting for data")

    def stop_waiting(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.stop_waiting()
        if not self._closed:
            self._closed = True
            self._tell(now=True)
