"""The shard that a process fetches or encodes next into a folder with a limit.

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

import time
from collections.abc import Callable, Collection, Sequence
from math import inf

from cache.supply.limited_folder import Disk, LimitedFolder, Member
from cache.supply.step_needs import StepNeeds

LOOK_S = 1.0  # after which it is looked who else uses the folder


class ShardQueue:
    """names, sizes: of shards by number; sizes are the most that they may have. let_go: told of a shard that this
    process held and does not any more, or that is removed."""

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
