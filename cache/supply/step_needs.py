"""Which shards the coming steps need, as far as a plan was read: what to fetch next, and what is needed last."""

from collections import deque
from collections.abc import Collection, Iterator
from heapq import heappop, heappush


class StepNeeds:
    """first: number of the step that the plan begins with. Pure bookkeeping, for one thread at a time."""

    def __init__(self, first: int = 0) -> None:
        self.first = self.end = first  # steps in sight: from `first` to below `end`
        self._steps: deque[Collection[int]] = deque()
        self._of: dict[int, deque[int]] = {}  # number of a shard -> the steps in sight that need it
        self._queue: list[tuple[int, int]] = []  # (step, shard) of what may be to fetch
        self.entries = 0  # shards of steps, all steps in sight together

    def add(self, numbers: Collection[int]) -> None:
        """The shards of the next step."""
        if self.end < self.first:  # it is done already
            self.end += 1
            return
        for number in numbers:
            steps = self._of.setdefault(number, deque())
            steps.append(self.end)
            if len(steps) == 1:
                heappush(self._queue, (self.end, number))
        self._steps.append(numbers)
        self.end += 1
        self.entries += len(numbers)

    def finish(self, step: int) -> list[int]:
        """Forget `step` and those before it; the shards that no step in sight needs any more."""
        gone = []
        while self._steps and self.first <= step:
            numbers = self._steps.popleft()
            for number in numbers:
                steps = self._of[number]
                steps.popleft()
                if steps:
                    continue
                del self._of[number]
                gone.append(number)
            self.first += 1
            self.entries -= len(numbers)
        self.first = max(self.first, step + 1)
        return gone

    @property
    def now(self) -> Collection[int]:
        """The shards of the first step in sight."""
        return self._steps[0] if self._steps else ()

    def next_need(self, number: int) -> int | None:
        """The first step in sight that needs a shard."""
        steps = self._of.get(number)
        return steps[0] if steps else None

    def __contains__(self, number: int) -> bool:
        return number in self._of

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __len__(self) -> int:
        """The number of shards in sight."""
        return len(self._of)

    def take(self) -> int | None:
        """The shard that is needed first among those that were not taken."""
        while self._queue:
            step, number = heappop(self._queue)
            need = self.next_need(number)
            if need == step:
                return number
            if need is not None and need > step:  # its first steps passed without it
                heappush(self._queue, (need, number))
        return None

    def put_back(self, number: int) -> None:
        """Let `take` give a shard again, where a step needs it."""
        need = self.next_need(number)
        if need is not None:
            heappush(self._queue, (need, number))

    def later_than(self, step: int, among: Collection[int]) -> Iterator[int]:
        """Those of `among` that are needed later than `step`, the last needed first."""
        needs = [(need, number) for number in among if (need := self.next_need(number)) is not None and need > step]
        yield from (number for _, number in sorted(needs, reverse=True))
