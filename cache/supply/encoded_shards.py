"""Shards that are encoded beside training, as the trainer reads them: waits for those that are being made, says how far
it is, and lets go of those that were removed."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from cache.shards.shard import BaseShardReader
from cache.shards.shard_io import open_reader
from cache.store.damage import ENCODE_PROGRAMS
from cache.supply.encoded_folder import EncodedFolder, Position
from cache.supply.limited_shards import LimitedShards, SupplyError
from schemas.cli.progress import activity

POLL_S = 0.05
TELL_S = 0.2  # at most so often the position is written
FIRST_MESSAGE_S, NEXT_MESSAGE_S = 10.0, 60.0


class EncodedShards(LimitedShards):
    """A ShardSupply. main: whether this process tells where the run is; of several, one does. behind: steps that other
    processes may be behind it.

    on_wait: called again and again while a shard is waited for; what it raises ends the wait. log: for people.
    """

    def __init__(
        self,
        folder: EncodedFolder,
        position: Position,
        main: bool = True,
        log: Callable[[str], object] = lambda text: None,
        behind: int = 0,
    ) -> None:
        super().__init__()
        self._folder, self._position, self._main, self._log, self._behind = folder, position, main, log, behind
        self.on_wait: Callable[[], object] = lambda: None
        self._telling = threading.Lock()
        self._opened: dict[int, int] = {}  # shard -> inode of its file
        self._waiting = set[int]()
        self._told, self._stopped = 0.0, False
        self._tell(now=True)

    def follow(self, first: int, needs: Iterator[Collection[int]]) -> None:
        """`needs` is left alone: the stages compute the order themselves."""
        self._stopped = False
        self._position = self._position.model_copy(update={"step": first})
        self._tell(now=True)

    def finished(self, step: int) -> None:
        self._position = self._position.model_copy(update={"step": max(self._position.step, step + 1 - self._behind)})
        self._tell()

    def _is_here(self, number: int) -> bool:
        return self._path(number).exists()

    def _open(self, number: int) -> BaseShardReader:
        reader = open_reader(self._folder.store, self._folder.paths[number])
        with suppress(FileNotFoundError):
            self._opened[number] = os.stat(reader.path).st_ino
        return reader

    def _wait_for(self, number: int) -> None:
        began = time.monotonic()
        next_message = began + FIRST_MESSAGE_S
        self._waiting.add(number)
        self._tell(now=True)
        try:
            while not self._is_here(number):
                if self._stopped:
                    path = self._folder.paths[number]
                    raise SupplyError(f"{path} is not needed any more", "Nothing has to be done.")
                self.on_wait()
                if self._main and time.monotonic() >= next_message:
                    next_message += NEXT_MESSAGE_S
                    self._explain_wait(number, time.monotonic() - began)
                self._changed.wait(POLL_S)
        finally:
            self._waiting.discard(number)
            self._tell(now=True)

    def _explain_wait(self, number: int, waited_s: float) -> None:
        program = ENCODE_PROGRAMS[self._folder.kinds[number]]
        with self._folder.locked():
            running = program in self._folder.members()
        if not running:
            path = self._folder.paths[number]
            why = f"is not there, and `latentpress {program}` is not running: start it"
            self._log(f"waiting for data since {waited_s:.0f} s: {path} {why}")

    def _tell(self, now: bool = False) -> None:
        """Write the position, and let go of files that are gone."""
        with self._telling:
            if not now and time.monotonic() - self._told < TELL_S:
                return
            self._told = time.monotonic()
            if self._main:
                self._folder.write_position(self._position.model_copy(update={"wanted": tuple(sorted(self._waiting))}))
        for number, inode in list(self._opened.items()):
            try:
                if os.stat(self._path(number)).st_ino == inode:
                    continue
            except FileNotFoundError:
                pass
            self._tell_removed(number)

    def _tell_removed(self, number: int) -> None:
        self._opened.pop(number, None)
        super()._tell_removed(number)

    def _discard(self, number: int) -> None:
        self._log(f"{self._folder.paths[number]} is damaged and is encoded again")
        with self._folder.locked():
            self._folder.remove(self._folder.paths[number])

    def _path(self, number: int) -> Path:
        return self._folder.base / self._folder.paths[number]

    def show_wait(self) -> AbstractContextManager[object]:
        paths = [self._folder.paths[number] for number in list(self._waiting)]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return activity(f"waiting for {paths[0]}{more} to be encoded" if paths else "waiting for data")

    def stop_waiting(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.stop_waiting()
        if not self._closed:
            self._closed = True
            self._tell(now=True)
