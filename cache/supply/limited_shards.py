"""Shards of a set that come and go, as readers see them: waited for while they are not here, opened when they are."""

import threading
from collections import Counter
from collections.abc import Callable

from cache.shards.shard import BaseShardReader
from cache.shards.shard_supply import ShardSupply
from cache.store.damage import DamageError
from schemas.errors import USAGE, LatentpressError


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
