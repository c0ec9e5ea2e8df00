"""The order of samples that suits a folder of copies that is smaller than a set: what steps in a row need together, and
the largest `train.shuffle_shards` for which there is room."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import ROUND_CEILING, Decimal
from itertools import count, islice, repeat

from cache.order.schedule import BatchSchedule
from cache.order.shard_order import ShardOrder
from cache.sets.trainset import TrainSet
from cache.supply.step_needs import needed_shards
from schemas.config.training import Train

CHECKED_DRAWS = 1 << 16  # samples of which the shards are looked up before a model is loaded
CHECKED_SECTIONS = 3  # and at least so many sections
MIXED_DRAWS = 1 << 16  # of a section: many global batches, and a second or two to look at


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
