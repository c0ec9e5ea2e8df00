"""The shards that the coming steps of training read, a function of the set, the schedule and the choice of captions;
and when each is needed, as far as a plan was read: what is got next, and what is needed last.

For a folder of copies that is smaller than a set: what steps in a row need together, and the largest
`train.shuffle_shards` for which there is room.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import ROUND_CEILING, Decimal
from itertools import count, islice, repeat

import numpy as np

from cache.order.schedule import BatchSchedule, Ints
from cache.order.set_columns import IntColumn
from cache.order.shard_order import ShardOrder
from cache.sets.draws import NO_TEXT
from cache.sets.trainset import TrainSet
from schemas.config.training import Train

PLANNED_DRAWS = 1 << 14  # of the steps that are looked at together: a hundredth of a second
CHECKED_DRAWS = 1 << 16  # samples of which the shards are looked up before a model is loaded
CHECKED_SECTIONS = 3  # and at least so many sections
MIXED_DRAWS = 1 << 16  # of a section: many global batches, and a second or two to look at


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
    of `world` reads, each once, in increasing order. They are those of latents, further kinds and references, of the
    captions chosen, and of the null prompts in place of dropped ones. Computed as it is asked for; memory: nothing per
    sample.
    """
    index, texts = data.tables["index"], data.tables["texts"]
    prefixes = ["", *(f"{part}_" for part in (*data.kinds, *data.references))]
    parts = [IntColumn(index[f"{prefix}shard"]) for prefix in prefixes]
    text_shards = IntColumn(texts["shard"])
    together = max(1, min(PLANNED_DRAWS // schedule.global_batch, int(schedule.steps_per_epoch)))
    micro_batches = len(range(rank, schedule.micro_batches_per_step, world))  # of a step
    while last is None or first < last:
        stop = first + together if last is None else min(last, first + together)
        _, _, positions, rows, passes = schedule.plan(first, stop, rank, world)
        steps = np.arange(first, stop).repeat(micro_batches)
        shards = [part.take(rows.ravel()) for part in parts]
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


def largest_window(needs: Iterable[Collection[int]], sizes: Sequence[int], steps: int) -> int:
    """The most bytes that the shards of so many steps in a row have together, and beside them one more shard."""
    return max(window_bytes(needs, sizes, repeat(steps)), default=max(sizes, default=0))


def mean_bytes(needs: Sequence[Collection[int]], sizes: Sequence[int]) -> float:
    """Return the bytes of the shards of one step, on average."""
    return sum(sizes[number] for numbers in needs for number in numbers) / max(1, len(needs))


def checked_steps(steps: range, global_batch: int, draws: int = CHECKED_DRAWS) -> range:
    """The first of the steps that remain, with so many samples."""
    return steps[: max(1, draws // global_batch)]


class FittingOrder:
    """Tries values of train.shuffle_shards for the steps of a run that remain.

    A section's shards stay until it is done. So a value suits a limit where there is room for the shards of any two
    sections in a row: the next ones come while one is trained on. 2, the smallest value, is also named where there is
    room for each section alone. In either case there is room for any `ahead` steps in a row, which are read at a time,
    and for one more shard. All ranks are looked at together, as any of them may need any of these. sizes: bytes of each
    shard.
    """

    def __init__(
        self, settings: Train, data: TrainSet, steps: range, world: int, sizes: Sequence[int], ahead: int
    ) -> None:
        self._settings, self._data, self._steps, self._world = settings, data, steps, world
        self._sizes, self._ahead = sizes, ahead

    def find(self, limit: int) -> int | None:
        """The largest value that suits `limit` bytes, of those tried: each a fifth less than the one before, the first
        that for which there would be room if sections shared no shards of texts, or one of sections with MIXED_DRAWS
        samples. None where 2 does not."""
        kinds = Counter(self._data.tables["shards"].column("kind").to_pylist())
        latents = kinds["latents"] or len(self._sizes)
        most = min(limit / sum(self._sizes), 2 * MIXED_DRAWS / sum(span.draws for span in self._data.spans))
        value = 2 * max(1, int(most * latents) // 2)
        while any(held > limit for held in self._needed_bytes(value, 2)):
            if value == 2:
                return None if self.least_bytes() > limit else 2
            value = max(2, value * 4 // 5 // 2 * 2)
        return value

    def least_bytes(self) -> int:
        """The least limit that 2 suits."""
        return max(self._needed_bytes(2, 1))

    def _needed_bytes(self, value: int, sections: int) -> Iterator[int]:
        """Return for each step that is looked at the bytes of the shards of so many sections up to it."""
        schedule = self._data.make_schedule(self._settings.model_copy(update={"shuffle_shards": value}), self._world)
        first, size = self._steps.start, schedule.global_batch
        later = (step for step in section_starts(schedule, first) if step > first)
        last = next(islice(later, CHECKED_SECTIONS - 1, None))
        looked_at = checked_steps(self._steps, size, max(CHECKED_DRAWS, (last - first) * size))
        dropout = self._settings.caption_dropout
        needs = needed_shards(self._data, schedule, dropout, looked_at.start, looked_at.stop)
        lengths = (max(self._ahead, length) for length in section_lengths(schedule, first, sections))
        return window_bytes((shards.tolist() for shards in needs), self._sizes, lengths)


def section_starts(schedule: BatchSchedule, step: int) -> Iterator[int]:
    """The steps in which a section begins or an epoch's last one ends, without end, from the epoch of `step` on."""
    assert isinstance(schedule.order, ShardOrder)
    for epoch in count(step * schedule.micro_batches_per_step // schedule.micro_batches_per_epoch):
        numbers = epoch * schedule.micro_batches_per_epoch + schedule.order.section_bounds(epoch)
        yield from (numbers // schedule.micro_batches_per_step).tolist()


def section_lengths(schedule: BatchSchedule, step: int, sections: int) -> Iterator[int]:
    """Yield for each step from `step` on, without end, the steps up to it of its section and those before, so many in
    all."""
    starts = section_starts(schedule, step)
    begins, following = deque([step], sections), next(starts)
    for number in count(step):
        while following <= number:
            begins.append(max(step, following))
            following = next(starts)
        yield number - begins[0] + 1


def round_up_gb(size: int) -> str:
    """Bytes as 10^9 bytes with three digits, no fewer: for a message that names a limit which is enough."""
    exact = Decimal(size).scaleb(-9)
    return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), ROUND_CEILING).normalize():f}"


def explain_order(set_id: str, limit: int, total: int, step: float, fitting: int | None, least: int) -> str:
    """Explain what an order over the whole set asks of the store, and what helps. limit, total, step: bytes of the
    cache, of the set, and of the shards of one step. fitting: of `FittingOrder.find`. least: where nothing fits, a
    limit at which 2 does."""
    step_mb = step * (1 - limit / total) / 1e6
    raised = f"raise max_gb to {round_up_gb(total)}"
    if fitting:
        advice = f"Set train.shuffle_shards: {fitting}, or {raised}"
    elif least < total:
        advice = f"Raise max_gb to {round_up_gb(least)} and set train.shuffle_shards: 2, or {raised}"
    else:
        advice = raised.capitalize()
    return (
        f"the shards of set {set_id} have {total / 1e9:.3g} GB, and train.local_cache.max_gb is {limit / 1e9:.3g}. In "
        f"an order over the whole set most shards are fetched again for each sample: about {step_mb:,.0f} MB a step, "
        f"or {step_mb:,.0f} MB/s for steps of one second. {advice}"
    )
