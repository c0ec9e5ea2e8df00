"""The shards that the coming steps of training read, a function of the set, the schedule and the choice of captions;
and when each is needed, as far as a plan was read: what is got next, and what is needed last."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import numpy as np

from cache.order.schedule import BatchSchedule, Ints
from cache.order.set_columns import IntColumn
from cache.sets.draws import NO_TEXT
from cache.sets.trainset import TrainSet

PLANNED_DRAWS = 1 << 14  # of the steps that are looked at together: a hundredth of a second


def needed_shards(
    data: TrainSet,
    schedule: BatchSchedule,
    caption_dropout: float,
    first: int,
    last: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Ints]:
    """Yield for each step from `first` on, to below `last` or without end, the numbers of the shards that rank `rank`
    of `world` reads, each once, in increasing order. They are those of latents and further kinds, of the captions
    chosen, and of the null prompts in place of dropped ones. Computed as it is asked for; memory: nothing per sample.
    """
    index, texts = data.tables["index"], data.tables["texts"]
    prefixes = [""] + ([] if data.packed else [f"{kind}_" for kind in data.kinds])
    parts = [IntColumn(index[f"{prefix}shard"]) for prefix in prefixes]
    text_shards = IntColumn(texts["shard"])
    together = max(1, min(PLANNED_DRAWS // schedule.global_batch, int(schedule.steps_per_epoch)))
    micro_batches = len(range(rank, schedule.micro_batches_per_step, world))  # of a step
    while last is None or first < last:
        stop = first + together if last is None else min(last, first + together)
        _, _, positions, rows, passes = schedule.plan(first, stop, rank, world)
        steps = np.arange(first, stop).repeat(micro_batches)
        shards = [part.take(rows.ravel()) for part in parts]
        if not data.packed:
            drawn = data.row_texts.draw(schedule.seed, caption_dropout, steps, positions, rows, passes).ravel()
            shards.append(np.full(len(drawn), -1))  # a missing null prompt is for the reader to report
            shards[-1][drawn != NO_TEXT] = text_shards.take(drawn[drawn != NO_TEXT])
        steps = (steps - first).repeat(schedule.batch_size)
        yield from _distinct(np.tile(steps, len(shards)), np.concatenate(shards), stop - first)
        first = stop


def _distinct(steps: Ints, shards: Ints, count: int) -> Iterator[Ints]:
    """The distinct shards, but -1, of each of `count` steps."""
    size = int(shards.max()) + 2
    pairs = np.unique(steps * size + shards + 1)
    pairs = pairs[pairs % size > 0]
    for step_pairs in np.split(pairs, np.searchsorted(pairs, np.arange(1, count) * size)):
        yield step_pairs % size - 1


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
