"""The copies of shards that this process holds, so that no process removes them."""

import resource
from collections.abc import Callable

from cache.supply.copy_folder import HeldCopy

MOST_HELD = 512  # each with an open file


class HeldCopies(dict[int, HeldCopy]):
    """By the number of the shard. most: how many this process may hold. listeners: called where one may be removed."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners = list[Callable[[int], None]]()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = MOST_HELD if files == resource.RLIM_INFINITY else min(MOST_HELD, max(16, files // 8))

    def let_go(self, number: int) -> None:
        """Hold a copy no longer: any process may remove it."""
        if (copy := self.pop(number, None)) is not None:
            copy.release()
            self.tell_listeners(number)

    def tell_listeners(self, number: int) -> None:
        for forget in self.listeners:
            forget(number)
