"""The order of training: pure integers in, arrays out.

An epoch is a list of global batches, each of one bucket. Both orders, of the draws within a bucket and of the
batches within the epoch, are pseudo-random permutations that are computed at a point (a Feistel network over the
next power of four, walked until it lands inside): nothing is shuffled, stored or replayed, so any batch of any
epoch costs the same few microseconds per sample whether the set has ten samples or a billion, and resuming is an
integer. The alternative, `Generator.permutation`, keeps eight bytes per sample and pass, and its stream may change
between releases of numpy.

Draws: a bucket is made of spans, the rows of one dataset that share `repeats` and `weight`. A span of n rows is
drawn from d = max(1, n (1 + repeats) weight, halves rounded up) times in each epoch. Over the epochs its draws walk
its rows round and round: draw k of epoch e (both from 0) is number t = e d + k of the walk, and with
lap, position = divmod(t, n) it takes the row at `position`, which had been taken `lap` times before. So over E
epochs each row is taken floor or ceil of E d / n times: weight 0.5 shows every row every other epoch, 1.5 once and
twice in turn, and where (1 + repeats) weight is whole every epoch shows every row exactly so often. d is exact: the
weight counts as the decimal number that it is written as (0.1 is a tenth), in rational arithmetic.

Leftovers: nothing is dropped and every batch is full. When the draws of a bucket do not divide by the global batch,
its last batch is filled with the draws that began this epoch's order; a bucket smaller than one batch repeats itself
until the batch is full. `BatchSchedule.filled` counts these extra draws. They take no part in the walk. One that
repeats a draw for the i-th time (from 1) counts i ceil(d / n) passes more than that draw, which is beyond all that the
epoch's walk gives the row: within an epoch no row has the same pass twice, so its captions keep taking turns.
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
    """`count` rows of one bucket from `start` on, each drawn (1 + repeats) * weight times in an epoch, on average."""

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

    rows: (G,) row numbers of the set. passes: (G,) how often the walk had taken each row before, over all epochs
    (fill counts on from there), which chooses its caption. Entry i is position i of the global batch on any number
    of ranks.
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
class SmallBucket:
    """A bucket of which an epoch draws fewer samples (`count`, each counted once) than one global batch has places, so
    that every step of it has a sample more than once."""

    bucket: str
    count: int


@dataclass(frozen=True)
class BucketDraws:
    """What an epoch draws of one bucket. fill: extra draws that fill its last batch."""

    name: str
    samples: int
    draws: int
    fill: int


class BatchSchedule:
    """The global batches of every epoch: a pure function of (spans, seed, global batch size).

    Spans of one bucket may stand anywhere in the list; empty ones are left out. Memory: nothing per sample.
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
        self._walks = [_DrawTable(name, members) for name, members in grouped.items()]
        self._batches = np.array([-(-walk.draws // global_batch) for walk in self._walks], np.int64)
        self._until = np.cumsum(self._batches)

    @property
    def draws_per_epoch(self) -> int:
        """Draws of one epoch, repeats and weights counted, fill not."""
        return sum(walk.draws for walk in self._walks)

    @property
    def batches_per_epoch(self) -> int:
        return int(self._until[-1])

    @property
    def buckets(self) -> list[BucketDraws]:
        """In the order in which their first spans were given."""
        return [
            BucketDraws(walk.bucket, int(walk.counts.sum()), walk.draws, int(batches) * self.global_batch - walk.draws)
            for walk, batches in zip(self._walks, self._batches, strict=True)
        ]

    @property
    def fill_counts(self) -> dict[str, int]:
        """bucket -> draws of an epoch that only fill its last batch; buckets without any are left out."""
        return {bucket.name: bucket.fill for bucket in self.buckets if bucket.fill}

    @property
    def small_buckets(self) -> list[SmallBucket]:
        """Buckets smaller than one global batch. Repeats make none larger: the samples are the same."""
        found = (SmallBucket(walk.bucket, int(np.minimum(walk.counts, walk.each).sum())) for walk in self._walks)
        return [short for short in found if short.count < self.global_batch]

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step `step` (from 0); the epoch is step // batches_per_epoch."""
        epoch, number = divmod(step, self.batches_per_epoch)
        place = permute(np.array([number]), self.batches_per_epoch, derive_seed(f"{self.seed}/{epoch}", "batches"))[0]
        which = int(np.searchsorted(self._until, place, side="right"))
        walk = self._walks[which]
        first = int(place - (self._until[which] - self._batches[which])) * self.global_batch
        places = np.arange(first, first + self.global_batch, dtype=np.int64)
        again, position = places // walk.draws, places % walk.draws
        key = derive_seed(f"{self.seed}/{epoch}/{walk.bucket}", "samples")
        rows, passes, most = walk.rows_of(epoch, permute(position, walk.draws, key))
        return GlobalBatch(step, epoch, walk.bucket, rows, passes + again * most)


class _DrawTable:
    """The spans of one bucket as arrays, (S,) each: what `BatchSchedule.batch` looks draws up in."""

    def __init__(self, bucket: str, spans: Sequence[Span]):
        self.bucket = bucket
        self.starts = np.array([span.start for span in spans], np.int64)
        self.counts = np.array([span.count for span in spans], np.int64)
        self.each = np.array([span.draws for span in spans], np.int64)
        self.ends = np.cumsum(self.each)
        self.draws = int(self.ends[-1])

    def rows_of(self, epoch: int, draw: Ints) -> tuple[Ints, Ints, Ints]:
        """(row, its passes before, the most passes that an epoch gives a row of its span) of each draw of an epoch."""
        span = np.searchsorted(self.ends, draw, side="right")
        count, each = self.counts[span], self.each[span]
        lap, position = np.divmod(epoch * each + draw - (self.ends[span] - each), count)
        return self.starts[span] + position, lap, -(-each // count)


def small_bucket_advice(shortages: Sequence[SmallBucket], batch_size: int, world: int = 1) -> str:
    """What to do about them. batch_size: of one forward pass; world: processes."""
    least = min(short.count for short in shortages)
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
    """Which of each row's alternative captions a pass uses: they take turns, starting anywhere.

    All arguments (n,). Over `alternatives[i]` consecutive passes row i shows each of its captions once.
    """
    offset = mix_bits(rows.astype(np.uint64) ^ np.uint64(derive_seed(str(seed), "captions")))
    return ((offset % alternatives.astype(np.uint64)).astype(np.int64) + passes) % alternatives


def draw_caption_dropout(seed: int, step: int, positions: Ints, share: float) -> NDArray[np.bool_]:
    """(n,) whether the caption at each position of the global batch of `step` gives way to the null prompt."""
    bits = mix_bits(positions.astype(np.uint64) ^ np.uint64(derive_seed(f"{seed}/{step}", "dropout")))
    return to_unit_interval(bits) < share


def permute(positions: Ints, size: int, key: int) -> Ints:
    """The places that a pseudo-random permutation of range(size), chosen by `key`, gives to `positions`.

    A bijection of range(size) for every key. Costs O(len(positions)), whatever `size`.
    """
    if size == 1:
        return np.zeros_like(positions)
    half = max(2, ((size - 1).bit_length() + 1) // 2)
    keys = mix_bits(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key))
    places = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := places >= size).any():  # on average less than four rounds: the domain is under 4 size
        places[outside] = _feistel(places[outside], half, keys)
    return places.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of range(4**half): each round mixes one half of the bits into the other."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> width, values & mask
    for key in keys:
        left, right = right, left ^ (mix_bits(right ^ key) & mask)
    return (left << width) | right
