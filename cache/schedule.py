"""The order of training: pure integers in, arrays out.

An epoch is a list of global batches, each of one bucket. The order of the draws within a bucket and that of the batches
within the epoch are pseudo-random permutations, computed at a point (a Feistel network over the next power of four,
repeated until the result is in range). Nothing is shuffled, stored or replayed: any batch of any epoch takes the same
few microseconds a sample for ten samples or a billion, and resuming is an integer. `Generator.permutation` would keep
eight bytes per sample and pass, and its stream may change between releases of numpy.

Draws: a bucket consists of spans, the rows of one dataset that share `repeats` and `weight`. A span of n rows is drawn
from d = max(1, n (1 + repeats) weight, halves rounded up) times in each epoch. Over the epochs its draws cycle through
its rows: draw k of epoch e (both from 0) is number t = e d + k, and with lap, position = divmod(t, n) it takes the row
at `position`, which had been taken `lap` times before. So over E epochs each row is taken floor or ceil of E d / n
times: with weight 0.5 every other epoch, with 1.5 once and twice in turn; where (1 + repeats) weight is whole, exactly
that often in every epoch. d is exact: the weight counts as the decimal number that it is written as (0.1 is a tenth).

Fill: no draw is dropped and every batch is full. Where the draws of a bucket do not divide by the global batch, the
first draws of this epoch's order fill its last batch; a bucket smaller than one batch repeats itself until the batch
is full. `BatchSchedule.buckets` counts these extra draws, which do not advance the cycle. One that repeats a draw
for the i-th time (from 1) has i ceil(d / n) passes more than that draw, which is more than the epoch's own draws give
the row: within an epoch no row has the same pass twice, so its captions keep taking turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from schemas.identity import derive_seed
from schemas.randomness import mix_bits, to_unit_interval

Ints = NDArray[np.int64]

_ROUNDS = 8


@dataclass(frozen=True)
class Span:
    """`count` rows of one bucket from `start` on, each drawn (1 + repeats) * weight times an epoch on average."""

    bucket: str
    start: int
    count: int
    repeats: int = 0
    weight: float = 1.0

    @property
    def draws(self) -> int:
        """Draws of one epoch: the product rounded, halves up, at least 1."""
        exact = self.count * (1 + self.repeats) * Fraction(repr(float(self.weight)))
        return max(1, (2 * exact.numerator + exact.denominator) // (2 * exact.denominator))


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's samples, all ranks together, of one bucket.

    rows: (G,) row numbers of the set. passes: (G,) how often each row was taken before, over all epochs (fill counts on
    from there), which chooses its caption. Entry i is position i of the global batch on any number of ranks.
    """

    step: int
    epoch: int
    bucket: str
    rows: Ints
    passes: Ints

    def for_rank(self, rank: int, world: int) -> tuple[Ints, "GlobalBatch"]:
        """This rank's positions and the batch cut to them; ranks get contiguous, equal, disjoint parts."""
        size = len(self.rows)
        assert size % world == 0 and 0 <= rank < world, f"{size} samples do not divide over {world} ranks"
        part = slice(rank * (size // world), (rank + 1) * (size // world))
        cut = GlobalBatch(self.step, self.epoch, self.bucket, self.rows[part], self.passes[part])
        return np.arange(part.start, part.stop), cut


@dataclass(frozen=True)
class BucketDraws:
    """The draws of one bucket in an epoch. distinct: how many of its samples are drawn. fill: extra draws that fill its
    last batch."""

    name: str
    samples: int
    distinct: int
    draws: int
    fill: int


class BatchSchedule:
    """The global batches of every epoch: a pure function of (spans, seed, global batch size).

    Spans of one bucket may be anywhere in the list; empty ones are left out. Memory: nothing per sample.
    """

    def __init__(self, spans: Sequence[Span], seed: int, global_batch: int):
        if global_batch < 1:
            raise ValueError(f"the global batch is {global_batch}; it must be at least 1")
        self.seed, self.global_batch = seed, global_batch
        grouped: dict[str, list[Span]] = {}
        for span in spans:
            if span.count:
                grouped.setdefault(span.bucket, []).append(span)
        if not grouped:
            raise ValueError("the training set has no samples; run `latentpress status` to see what is missing")
        self._tables = [_DrawTable(name, members) for name, members in grouped.items()]
        self._batches = np.array([-(-table.draws // global_batch) for table in self._tables], np.int64)
        self._batch_ends = np.cumsum(self._batches)

    @property
    def batches_per_epoch(self) -> int:
        return int(self._batch_ends[-1])

    @property
    def buckets(self) -> list[BucketDraws]:
        """Of each bucket, in the order in which their first spans were given."""
        found = []
        for table, batches in zip(self._tables, self._batches.tolist(), strict=True):
            samples, distinct = int(table.counts.sum()), int(np.minimum(table.counts, table.each).sum())
            fill = batches * self.global_batch - table.draws
            found.append(BucketDraws(table.bucket, samples, distinct, table.draws, fill))
        return found

    @property
    def small_buckets(self) -> list[BucketDraws]:
        """Buckets with fewer distinct samples than a global batch has: its batches repeat them."""
        return [bucket for bucket in self.buckets if bucket.distinct < self.global_batch]

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step `step` (from 0); the epoch is step // batches_per_epoch."""
        epoch, number = divmod(step, self.batches_per_epoch)
        order_key = derive_seed(f"{self.seed}/{epoch}", "batches")
        batch = permute(np.array([number]), self.batches_per_epoch, order_key)[0]
        which = int(np.searchsorted(self._batch_ends, batch, side="right"))
        table = self._tables[which]
        first = int(batch - (self._batch_ends[which] - self._batches[which])) * self.global_batch
        draws = np.arange(first, first + self.global_batch, dtype=np.int64)
        repetition, position = draws // table.draws, draws % table.draws
        key = derive_seed(f"{self.seed}/{epoch}/{table.bucket}", "samples")
        rows, passes, most = table.rows_of(epoch, permute(position, table.draws, key))
        return GlobalBatch(step, epoch, table.bucket, rows, passes + repetition * most)


class _DrawTable:
    """The spans of one bucket as arrays, (S,) each, in which `BatchSchedule.batch` looks draws up."""

    def __init__(self, bucket: str, spans: Sequence[Span]):
        self.bucket = bucket
        self.starts = np.array([span.start for span in spans], np.int64)
        self.counts = np.array([span.count for span in spans], np.int64)
        self.each = np.array([span.draws for span in spans], np.int64)
        self.ends = np.cumsum(self.each)
        self.draws = int(self.ends[-1])

    def rows_of(self, epoch: int, draw: Ints) -> tuple[Ints, Ints, Ints]:
        """(n,) of each draw: its row, the row's passes before, and the most passes an epoch gives a row of its span."""
        span = np.searchsorted(self.ends, draw, side="right")
        count, each = self.counts[span], self.each[span]
        lap, position = np.divmod(epoch * each + draw - (self.ends[span] - each), count)
        return self.starts[span] + position, lap, -(-each // count)


def small_bucket_advice(buckets: Sequence[BucketDraws], batch_size: int, world: int = 1) -> str:
    """How to avoid small buckets. batch_size: of one forward pass. world: number of processes."""
    least = min(bucket.distinct for bucket in buckets)
    if least >= batch_size * world:
        step = f"train.accumulate: {least // (batch_size * world)}"
    elif least >= world:
        step = f"train.accumulate: 1 and train.batch_size: {least // world}"
    else:
        step = f"train.accumulate: 1, train.batch_size: 1 and {least} processes"
    return (
        f"What helps: smaller steps ({step}); fewer and larger buckets (one `resolution` for all datasets, a lower "
        "`max_aspect`, or `crop_aspect: square`); more samples. `repeats` does not: it shows the same ones more often"
    )


def choose_captions(seed: int, rows: Ints, passes: Ints, alternatives: Ints) -> Ints:
    """The caption that each row uses in a pass: alternatives take turns, from a random start.

    Arrays are (n,). Over `alternatives[i]` consecutive passes row i uses each of its captions once.
    """
    offset = mix_bits(rows.astype(np.uint64) ^ np.uint64(derive_seed(str(seed), "captions")))
    return ((offset % alternatives.astype(np.uint64)).astype(np.int64) + passes) % alternatives


def draw_caption_dropout(seed: int, step: int, positions: Ints, share: float) -> NDArray[np.bool_]:
    """(n,) whether the null prompt replaces the caption at each position of the global batch of `step`."""
    bits = mix_bits(positions.astype(np.uint64) ^ np.uint64(derive_seed(f"{seed}/{step}", "dropout")))
    return to_unit_interval(bits) < share


def permute(positions: Ints, size: int, key: int) -> Ints:
    """The images of `positions` under the pseudo-random permutation of range(size) that `key` chooses."""
    if size == 1:
        return np.zeros_like(positions)
    half = max(2, ((size - 1).bit_length() + 1) // 2)
    keys = mix_bits(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key))
    found = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := found >= size).any():  # on average less than four rounds: the domain is smaller than 4 size
        found[outside] = _feistel(found[outside], half, keys)
    return found.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of range(4**half): each round mixes one half of the bits into the other."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> width, values & mask
    for key in keys:
        left, right = right, left ^ (mix_bits(right ^ key) & mask)
    return (left << width) | right
