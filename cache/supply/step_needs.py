"""When each shard is needed, as far as a plan was read: what is got next, and what is needed last."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

MOST_STEPS, MOST_ENTRIES = 4096, 1 << 17  # in sight: steps, and shards of all of them together


class StepNeeds:
    """first: number of the step that the plan begins with. always: shards that every step needs. Pure bookkeeping, for
    one thread at a time."""

    def __init__(self, first: int = 0, always: Collection[int] = ()) -> None:
        self.first = self.end = first  # steps in sight: from `first` to below `end`
        self.always = frozenset(always)
        self._steps: deque[Collection[int]] = deque()
        self._steps_of: dict[int, deque[int]] = {}  # number of a shard -> the steps in sight that need it
        self.entries = 0  # shards of steps, all steps in sight together

    @property
    def is_full(self) -> bool:
        """Whether no more steps are to be added for now."""
        return self.end - self.first >= MOST_STEPS or self.entries >= MOST_ENTRIES

    def add(self, numbers: Collection[int]) -> None:
        """The shards of the next step."""
        self.end += 1
        if self.end <= self.first:  # it is done already
            return
        for number in numbers:
            self._steps_of.setdefault(number, deque()).append(self.end - 1)
        self._steps.append(numbers)
        self.entries += len(numbers)

    def finish(self, step: int) -> list[int]:
        """Forget `step` and those before it; the shards that no step in sight needs any more."""
        gone = []
        while self._steps and self.first <= step:
            numbers = self._steps.popleft()
            for number in numbers:
                steps = self._steps_of[number]
                steps.popleft()
                if not steps:
                    del self._steps_of[number]
                    gone.append(number)
            self.first += 1
            self.entries -= len(numbers)
        self.first = max(self.first, step + 1)
        return gone

    @property
    def now(self) -> Collection[int]:
        """The shards of the first step in sight."""
        return self._steps[0] if self._steps else ()

    def next_bytes(self, sizes: Sequence[int], steps: int, more: Collection[int] = ()) -> int:
        """Bytes of the shards of the first `steps` steps in sight, of those that every step needs, and of `more`."""
        return sum(sizes[number] for number in self.always.union(more, *islice(self._steps, steps)))

    def __contains__(self, number: int) -> bool:
        return number in self._steps_of

    def __len__(self) -> int:
        """The number of shards in sight."""
        return len(self._steps_of)

    def order(self, wanted: Collection[int] = ()) -> list[tuple[int, int]]:
        """(step that needs it first, shard), in this order, of the shards in sight. Those that every step needs, and
        those that a reader waits for now (`wanted`), come first, as of the step before the first."""
        urgent = {number: self._next_need(number) for number in {*self.always, *wanted}}
        first = [(self.first - 1, number) for number in sorted(urgent, key=lambda number: (urgent[number], number))]
        return first + sorted((steps[0], number) for number, steps in self._steps_of.items() if number not in urgent)

    def _next_need(self, number: int) -> int:
        """The first step that needs a shard; one that no step in sight needs is read beside them, now."""
        return self.first - 1 if number in self.always else self._steps_of.get(number, (self.first,))[0]


def window_bytes(
    needs: Iterable[Collection[int]],
    sizes: Sequence[int],
    lengths: Iterable[int],
    always: Collection[int] | None = None,
) -> Iterator[int]:
    """Return for each step the bytes of the shards that the last steps up to it need, and of those in `always`; without
    `always`, of one more shard. lengths: how many steps that are, of each step at most one more than of the step
    before."""
    window, counts = deque[Collection[int]](), Counter(always or ())
    held = max(sizes, default=0) if always is None else sum(sizes[number] for number in always)
    for numbers, length in zip(needs, lengths, strict=False):
        held += sum(sizes[number] for number in numbers if not counts[number])
        counts.update(numbers)
        window.append(numbers)
        while len(window) > length:
            for number in window.popleft():
                counts[number] -= 1
                held -= 0 if counts[number] else sizes[number]
        yield held
