"""The order of training: pure integers in, arrays out.

An optimizer step takes a global batch, which is made of micro-batches of `batch_size` samples, each of one bucket: what
one rank computes in one forward pass. An epoch is a list of micro-batches; a step takes the next ones, so a step may
end one epoch and begin the next, and no sample is repeated to fill it. The order of the draws within a bucket
and the order of the steps within an epoch are pseudo-random permutations, each computed at a single point (a Feistel
network). Nothing is shuffled, stored or replayed: any step takes the same few microseconds a sample for ten samples or
a billion, and resuming is an integer. `Generator.permutation` would keep eight bytes per sample and pass, and its
stream may change between releases of numpy.

Draws: a bucket consists of spans, the rows of one dataset that share `repeats` and `weight`. A span of n rows is drawn
from d = max(1, n (1 + repeats) weight, halves rounded up) times in each epoch. Over the epochs its draws cycle through
its rows: draw k of epoch e (both from 0) is number t = e d + k, and with lap, position = divmod(t, n) it takes the row
at `position`, which was taken `lap` times before. So over E epochs each row is taken floor or ceil of E d / n
times: with weight 0.5 every other epoch, with 1.5 once and twice in turn; if (1 + repeats) weight is a whole number,
exactly that number of times in every epoch. d is exact: the weight is the decimal number as it is written (0.1 is a
tenth).

Fill: no draw is dropped and every micro-batch is full. If the draws of a bucket do not divide by the batch size, the
first draws of this epoch's order fill its last micro-batch; a bucket smaller than one micro-batch repeats its draws
until the micro-batch is full. `BatchSchedule.buckets` counts these extra draws, which do not advance the cycle. An
extra draw that repeats a draw for the i-th time (from 1) has i ceil(d / n) passes more than this draw, which is more
than the regular draws of the epoch reach: within an epoch no row has the same pass twice, so its captions keep taking
turns.

Steps: micro-batches that ranks compute at the same time should cost the same, for any number of ranks. So an epoch
lists its micro-batches bucket after bucket, in the order of their cost (the pixels of frames and references; buckets of
similar cost are in a different order in each epoch), cuts this list into steps, and takes the steps in a random order.
A step has one bucket, or neighboring buckets of the list if a bucket's micro-batches do not divide by the micro-batches
of a step. A step may span two epochs: its first part ends one epoch's list and its rest begins the next list. The first
epoch and every other epoch after it list their buckets from the most expensive to the cheapest, the remaining epochs in
reverse, so that these two parts have similar costs, too.

First steps: a run that needs too much memory should end in its first minute. So the first epoch begins with a step of
the most expensive bucket of each class of similar costs, from the most expensive class to the cheapest; its remaining
steps are in a random order. The order depends on pixels, not on predicted memory, because memory also depends on
options that may change when a run resumes, and for given options it grows with the pixels.

This is `WholeOrder`. With `train.shuffle_shards`, `cache.order.section_order` needs few shards at a time.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.geometry import Bucket
from schemas.identity import derive_seed, permute

Ints = NDArray[np.int64]

MAX_COST_RATIO = 1.25  # ratio up to which two buckets have similar costs


@dataclass(frozen=True)
class Span:
    """`count` rows of one bucket that begin at row `start`. Each is drawn (1 + repeats) * weight times an epoch on
    average.
    """

    bucket: str
    start: int
    count: int
    repeats: int = 0
    weight: float = 1.0

    @property
    def draws(self) -> int:
        """Number of draws of one epoch: the product, rounded with halves up, at least 1."""
        exact = self.count * (1 + self.repeats) * Fraction(repr(float(self.weight)))
        return max(1, (2 * exact.numerator + exact.denominator) // (2 * exact.denominator))


@dataclass(frozen=True)
class MicroBatchRows:
    """The draws of one forward pass of one rank, all of one bucket.

    positions: (B,) in the global batch, which determine random numbers. rows: (B,) row numbers of the set. passes: (B,)
    how often each row was drawn before, over all epochs; this number chooses its caption. Extra draws have higher
    numbers.
    """

    epoch: int
    bucket: str
    positions: Ints
    rows: Ints
    passes: Ints


@dataclass(frozen=True)
class BucketDraws:
    """The draws of one bucket in an epoch. distinct: number of its samples that are drawn. fill: number of extra draws,
    which fill its last micro-batch."""

    name: str
    samples: int
    distinct: int
    draws: int
    fill: int


@dataclass(frozen=True)
class EpochDraws:
    """The draws of every epoch. batch_size: samples in a micro-batch. size: micro-batches in a step. tables: the
    `DrawTable` of each bucket."""

    seed: int
    batch_size: int
    size: int
    tables: list["DrawTable"]

    @cached_property
    def counts(self) -> Ints:
        """(buckets,) number of micro-batches of each bucket in an epoch."""
        return np.array([-(-table.draws // self.batch_size) for table in self.tables], np.int64)

    @cached_property
    def _costs(self) -> Ints:
        """(buckets,)"""
        return np.array([Bucket.parse(table.bucket).pixels for table in self.tables], np.int64)

    @cached_property
    def _classes(self) -> Ints:
        return _cost_classes(self._costs)

    @cached_property
    def leading_buckets(self) -> list[int]:
        """The number of the most expensive bucket of each cost class, from the most expensive class to the
        cheapest."""
        descending = np.argsort(-self._costs, kind="stable")
        _, first = np.unique(self._classes[descending], return_index=True)
        return descending[first[::-1]].tolist()

    def list_epoch(self, epoch: int) -> "EpochList":
        key = derive_seed(f"{self.seed}/{epoch}", "buckets")
        order = np.lexsort((permute(np.arange(len(self.tables)), len(self.tables), key), self._classes))
        order, total = order if epoch % 2 else order[::-1], int(self.counts.sum())
        first = min(-epoch * total % self.size, total)
        return EpochList(order, np.cumsum(self.counts[order]), self.counts, first, (total - first) // self.size)


@dataclass(frozen=True)
class EpochList:
    """An epoch's list of micro-batches. order: (buckets,) bucket numbers in the order of the list. ends: (buckets,) end
    of each listed bucket's micro-batches. counts: (buckets,) micro-batches of each bucket, by bucket number. first:
    number of micro-batches that complete a step of the previous epoch. steps: number of whole steps after these."""

    order: Ints
    ends: Ints
    counts: Ints
    first: int
    steps: int

    def find(self, places: Ints) -> tuple[Ints, Ints]:
        """For the micro-batches at these places in the list, return (n,) the bucket number and (n,) the micro-batch's
        number within the bucket."""
        index = np.searchsorted(self.ends, places, side="right")
        buckets = self.order[index]
        return buckets, places - (self.ends[index] - self.counts[buckets])


@dataclass(frozen=True)
class Replacements:
    """Changes of a permutation: numbers, ascending, and the number in place of each."""

    numbers: Ints
    places: Ints

    @classmethod
    def lead(cls, leading: Iterable[int], permuted: Ints) -> "Replacements":
        """Return the changes with which a permutation begins with `leading`. permuted: the permutation's first numbers,
        at least as many as `leading` has."""
        replaced, inverse = dict[int, int](), dict[int, int]()
        for number, lead in zip(permuted.tolist(), leading, strict=False):
            # The number exchanges its place with the number that now has the place of `lead`.
            place, holder = replaced.get(number, number), inverse.get(lead, lead)
            replaced[holder], inverse[place] = place, holder
            replaced[number], inverse[lead] = lead, number
        numbers = np.array(sorted(replaced), np.int64)
        return cls(numbers, np.array([replaced[number] for number in numbers.tolist()], np.int64))

    def apply(self, permuted: Ints) -> Ints:
        if not len(self.numbers):
            return permuted
        index = np.minimum(np.searchsorted(self.numbers, permuted), len(self.numbers) - 1)
        return np.where(self.numbers[index] == permuted, self.places[index], permuted)


class Order(Protocol):
    """An order of the micro-batches of an epoch, and of the draws of a bucket."""

    @property
    def digest(self) -> str | None:
        """Hash of the order's inputs other than `EpochDraws` and options, namely which rows share a shard. None if the
        order has no such inputs."""

    def section_ends(self, epoch: int) -> Ints:
        """Return the number of micro-batches of an epoch up to the end of each of its sections, in order."""

    def locate(self, epoch: int, numbers: Ints) -> tuple[Ints, Ints]:
        """For the micro-batches at these positions in an epoch, return (n,) the bucket number and (n,) the
        micro-batch's number within the bucket."""

    def draw(self, epoch: int, bucket: int, numbers: Ints) -> tuple[Ints, Ints]:
        """Return (n, B) rows and (n, B) passes of the micro-batches with these numbers in a bucket and epoch."""


MakeOrder = Callable[[EpochDraws], Order]


class BatchSchedule:
    """The micro-batches of every step: a pure function of (spans, seed, batch size, global batch, order).

    batch_size: samples in one micro-batch. global_batch: samples in one optimizer step, over all ranks; raises
    ValueError if it is not a multiple of the batch size. spans: spans of one bucket may be anywhere in the list; empty
    spans are skipped. order: `WholeOrder` or the result of `cache.order.section_order.order_by_sections`. Memory:
    nothing per sample.

    first_step: the step at which the order begins; 0, unless a run continues on different data.
    """

    first_step = 0

    def __init__(
        self, spans: Sequence[Span], seed: int, batch_size: int, global_batch: int, order: MakeOrder | None = None
    ):
        if min(batch_size, global_batch) < 1 or global_batch % batch_size:
            raise ValueError(f"a global batch of {global_batch} can't be divided into micro-batches of {batch_size}")
        self.seed, self.batch_size, self.global_batch = seed, batch_size, global_batch
        grouped: dict[str, list[Span]] = {}
        for span in filter(lambda span: span.count, spans):
            grouped.setdefault(span.bucket, []).append(span)
        if not grouped:
            raise ValueError("the training set has no samples; run `latentpress status` for a list of missing samples")
        tables = [DrawTable(name, members) for name, members in grouped.items()]
        self._draws = EpochDraws(seed, batch_size, global_batch // batch_size, tables)
        self.order = (order or WholeOrder)(self._draws)

    @property
    def micro_batches_per_step(self) -> int:
        return self.global_batch // self.batch_size

    @property
    def micro_batches_per_epoch(self) -> int:
        return int(self._draws.counts.sum())

    @property
    def steps_per_epoch(self) -> float:
        return self.micro_batches_per_epoch / self.micro_batches_per_step

    @property
    def buckets(self) -> list[BucketDraws]:
        """The buckets, in the order of their first spans."""
        described = []
        for table, count in zip(self._draws.tables, self._draws.counts.tolist(), strict=True):
            samples, distinct = int(table.counts.sum()), int(np.minimum(table.counts, table.span_draws).sum())
            fill = count * self.batch_size - table.draws
            described.append(BucketDraws(table.bucket, samples, distinct, table.draws, fill))
        return described

    @property
    def small_buckets(self) -> list[BucketDraws]:
        """Buckets with fewer distinct samples than a micro-batch has, so that their micro-batches repeat samples."""
        return [bucket for bucket in self.buckets if bucket.distinct < self.batch_size]

    def step(self, step: int, rank: int = 0, world: int = 1) -> list[MicroBatchRows]:
        """Return the micro-batches of optimizer step `step` (from 0) that rank `rank` of `world` computes: numbers
        rank, rank + world, ... in the step's list, so that at the same time the ranks compute neighbors in
        the list."""
        epochs, buckets, *draws = self.plan(step, step + 1, rank, world)
        names = [self._draws.tables[bucket].bucket for bucket in buckets.tolist()]
        return [MicroBatchRows(*fields) for fields in zip(epochs.tolist(), names, *draws, strict=True)]

    def plan(self, first: int, last: int, rank: int = 0, world: int = 1) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return the micro-batches of the steps from `first` to below `last` that rank `rank` of `world` computes, in
        order: (M,) epochs, (M,) indices in `buckets`, and (M, B) positions, rows and passes as in MicroBatchRows. A
        million draws take a few tenths of a second."""
        size = self.micro_batches_per_step
        numbers = np.arange((first - self.first_step) * size, (last - self.first_step) * size)
        places = numbers % size
        is_of_rank = places % world == rank
        places = places[is_of_rank]
        epochs, buckets, within = self._locate(numbers[is_of_rank])
        rows, passes = np.empty((2, len(places), self.batch_size), np.int64)
        # The draws of one bucket in one epoch are computed together.
        group = epochs * len(self._draws.tables) + buckets
        order = np.argsort(group, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else ():
            epoch, bucket = int(epochs[members[0]]), int(buckets[members[0]])
            rows[members], passes[members] = self.order.draw(epoch, bucket, within[members])
        return epochs, buckets, places[:, None] * self.batch_size + np.arange(self.batch_size), rows, passes

    def step_buckets(self, step: int) -> dict[str, int]:
        """Return bucket -> number of its micro-batches in a step, over all ranks."""
        size, step = self.micro_batches_per_step, step - self.first_step
        _, buckets, _ = self._locate(np.arange(step * size, (step + 1) * size))
        pairs = zip(*np.unique(buckets, return_counts=True), strict=True)
        return {self._draws.tables[bucket].bucket: int(count) for bucket, count in pairs}

    def section_ends(self, step: int) -> Iterator[int]:
        """Yield the steps at which a section of the order or an epoch has ended, without an end, beginning with the
        epoch of `step`."""
        size, total = self.micro_batches_per_step, self.micro_batches_per_epoch
        for epoch in itertools.count((step - self.first_step) * size // total):
            for number in (epoch * total + self.order.section_ends(epoch)).tolist():
                yield self.first_step + number // size

    def _locate(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """For micro-batches numbered across epochs, return epoch, bucket index and index within the bucket, each
        (n,)."""
        epochs, within_epoch = np.divmod(numbers, self.micro_batches_per_epoch)
        buckets, numbers = np.empty_like(epochs), np.empty_like(epochs)
        for epoch in np.unique(epochs).tolist():
            members = epochs == epoch
            buckets[members], numbers[members] = self.order.locate(epoch, within_epoch[members])
        return epochs, buckets, numbers


class WholeOrder:
    """Draws and steps in random order over the whole set."""

    digest = None

    def __init__(self, draws: EpochDraws):
        self._draws = draws

    def section_ends(self, epoch: int) -> Ints:
        return self._draws.counts.sum(keepdims=True)

    def locate(self, epoch: int, numbers: Ints) -> tuple[Ints, Ints]:
        epoch_list, size = self._draws.list_epoch(epoch), self._draws.size
        within = (numbers >= epoch_list.first) & (numbers < epoch_list.first + epoch_list.steps * size)
        step, offset = np.divmod(numbers[within] - epoch_list.first, size)
        places = numbers.copy()
        if len(step):
            step = permute(step, epoch_list.steps, self._key(epoch))
            step = self._first_steps.apply(step) if epoch == 0 else step
            places[within] = epoch_list.first + step * size + offset
        return epoch_list.find(places)

    def _key(self, epoch: int) -> int:
        return derive_seed(f"{self._draws.seed}/{epoch}", "batches")

    @cached_property
    def _first_steps(self) -> Replacements:
        """Changes of the steps of the first epoch, so that they begin with the leading buckets."""
        epoch_list, size = self._draws.list_epoch(0), self._draws.size
        starts = np.empty_like(epoch_list.counts)
        starts[epoch_list.order] = epoch_list.ends - epoch_list.counts[epoch_list.order]
        steps = dict.fromkeys((starts[self._draws.leading_buckets] // size).tolist())
        leading = [step for step in steps if step < epoch_list.steps]
        first = np.arange(len(leading))
        return Replacements.lead(leading, permute(first, epoch_list.steps, self._key(0)) if leading else first)

    def draw(self, epoch: int, bucket: int, numbers: Ints) -> tuple[Ints, Ints]:
        size, table = self._draws.batch_size, self._draws.tables[bucket]
        position = (numbers[:, None] * size + np.arange(size)).ravel()
        repetition = position // table.draws if position.max() >= table.draws else np.int64(0)
        position -= repetition * table.draws
        key = derive_seed(f"{self._draws.seed}/{epoch}/{table.bucket}", "samples")
        rows, passes, epoch_passes = table.find_rows(epoch, permute(position, table.draws, key))
        passes += repetition * epoch_passes
        return rows.reshape(-1, size), passes.reshape(-1, size)


def _cost_classes(costs: Ints) -> Ints:
    """Return (buckets,) the cost class of each bucket. A class consists of buckets that cost at most MAX_COST_RATIO
    times its cheapest bucket."""
    classes, number, cheapest = np.zeros(len(costs), np.int64), -1, 0.0
    for index in np.argsort(costs, kind="stable"):
        if number < 0 or costs[index] > MAX_COST_RATIO * cheapest:
            number, cheapest = number + 1, float(costs[index])
        classes[index] = number
    return classes


class DrawTable:
    """The spans of one bucket as arrays, each (S,). starts: first rows. counts: numbers of rows. span_draws: numbers of
    draws in an epoch. ends: end of each span's draws among the bucket's draws. draws: draws of the bucket in an
    epoch."""

    def __init__(self, bucket: str, spans: Sequence[Span]):
        self.bucket = bucket
        self.starts = np.array([span.start for span in spans], np.int64)
        self.counts = np.array([span.count for span in spans], np.int64)
        self.span_draws = np.array([span.draws for span in spans], np.int64)
        self.ends = np.cumsum(self.span_draws)
        self.draws = int(self.ends[-1])

    def find_rows(self, epoch: int, draw: Ints) -> tuple[Ints, Ints, Ints]:
        """For draws of an epoch, return their rows, the number of earlier passes of each row, and the maximum number of
        passes in an epoch for a row of the draw's span, each (n,). draw: (n,) numbers of draws."""
        span = np.searchsorted(self.ends, draw, side="right")
        count, draws = self.counts[span], self.span_draws[span]
        lap, position = np.divmod(epoch * draws + draw - (self.ends[span] - draws), count)
        return self.starts[span] + position, lap, -(-draws // count)


def small_bucket_advice(buckets: Sequence[BucketDraws]) -> str:
    """Return advice on how to avoid small buckets."""
    least = min(bucket.distinct for bucket in buckets)
    return (
        f"Set train.batch_size: {least}; or use fewer and larger buckets (one `resolution` for all datasets, a lower "
        "`max_aspect`, a larger `bucket_step`, up to a quarter of the edge, or `crop_aspect: square`); or add samples. "
        "`repeats` does not help, because it only draws the same samples more often"
    )
