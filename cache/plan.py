"""The order of training: pure integers in, arrays out.

An epoch is a list of global batches, each of one bucket. Both orders, of the samples within a bucket and of the
batches within the epoch, are pseudo-random permutations that are computed at a point (a Feistel network over the
next power of four, walked until it lands inside): nothing is shuffled, stored or replayed, so any batch of any
epoch costs the same few microseconds per sample whether the set has ten samples or a billion, and resuming is an
integer. The alternative, `Generator.permutation`, keeps eight bytes per sample and pass, and its stream may change
between releases of numpy.

Leftovers: nothing is dropped and every batch is full. When the samples of a bucket (times their passes) do not
divide by the global batch, its last batch is filled with the samples that began this epoch's order; a bucket
smaller than one batch repeats itself until the batch is full. `Plan.filled` counts these extra draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.identity import seed_of

Ints = NDArray[np.int64]

_ROUNDS = 8


@dataclass(frozen=True)
class Span:
    """The rows of one bucket: `count` rows from `start` on. repeats: extra passes, one number or one per row."""

    bucket: str
    start: int
    count: int
    repeats: int | NDArray[np.integer] = 0


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's samples, all ranks together, of one bucket.

    rows: (G,) row numbers of the set. passes: (G,) how often each row had been drawn before, over all epochs
    (fill included), which chooses its caption. Entry i is position i of the global batch on any number of ranks.
    """

    step: int
    epoch: int
    bucket: str
    rows: Ints
    passes: Ints

    def share(self, rank: int, world: int) -> tuple[Ints, "GlobalBatch"]:
        """This rank's positions and the batch cut to them; ranks get contiguous, equal, disjoint parts."""
        size = len(self.rows)
        assert size % world == 0 and 0 <= rank < world, f"{size} samples do not divide over {world} ranks"
        part = slice(rank * (size // world), (rank + 1) * (size // world))
        cut = GlobalBatch(self.step, self.epoch, self.bucket, self.rows[part], self.passes[part])
        return np.arange(part.start, part.stop), cut


@dataclass(frozen=True)
class Shortage:
    """A bucket with fewer samples (repeats included) than one global batch; `repeats` is the least that would do."""

    bucket: str
    count: int
    repeats: int


class Plan:
    """The global batches of every epoch: a pure function of (spans, seed, global batch size).

    Memory: nothing per sample, or 12 bytes per sample of a bucket whose rows differ in their repeats.
    """

    def __init__(self, spans: Sequence[Span], seed: int, global_batch: int):
        if global_batch < 1:
            raise ValueError(f"the global batch is {global_batch}; it must be at least 1")
        self.seed, self.global_batch = seed, global_batch
        self.spans = [span for span in spans if span.count]
        self._ends = [_ends(span) for span in self.spans]
        self.draws = np.array([_draws(span) for span in self.spans], dtype=np.int64)
        self._batches = -(-self.draws // global_batch)
        self._until = np.cumsum(self._batches)
        if not len(self.spans):
            raise ValueError("the training set has no samples; run `latentpress status` to see what is missing")

    @property
    def samples(self) -> int:
        """Draws of one epoch, repeats counted, fill not."""
        return int(self.draws.sum())

    @property
    def batches_per_epoch(self) -> int:
        return int(self._until[-1])

    @property
    def filled(self) -> dict[str, int]:
        """bucket -> draws of an epoch that only fill its last batch; buckets without any are left out."""
        extra = self._batches * self.global_batch - self.draws
        return {span.bucket: int(n) for span, n in zip(self.spans, extra, strict=True) if n}

    @property
    def shortages(self) -> list[Shortage]:
        """Buckets smaller than one global batch."""
        return [
            Shortage(span.bucket, int(draws), -(-self.global_batch // span.count) - 1)
            for span, draws in zip(self.spans, self.draws, strict=True)
            if draws < self.global_batch
        ]

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step `step` (from 0); the epoch is step // batches_per_epoch."""
        epoch, number = divmod(step, self.batches_per_epoch)
        place = shuffled(np.array([number]), self.batches_per_epoch, seed_of(f"{self.seed}/{epoch}", "batches"))[0]
        which = int(np.searchsorted(self._until, place, side="right"))
        span, draws = self.spans[which], int(self.draws[which])
        first = int(place - (self._until[which] - self._batches[which])) * self.global_batch
        lap, position = np.divmod(np.arange(first, first + self.global_batch), draws)
        key = seed_of(f"{self.seed}/{epoch}/{span.bucket}", "samples")
        row, repeat, passes = _drawn(span, self._ends[which], shuffled(position, draws, key))
        return GlobalBatch(step, epoch, span.bucket, span.start + row, epoch * passes + repeat + lap)


def _ends(span: Span) -> Ints | None:
    """(count,) end of each row's draws among the bucket's, or None where all rows have equally many."""
    if isinstance(span.repeats, int):
        return None
    passes = 1 + np.asarray(span.repeats)
    assert passes.shape == (span.count,), f"{passes.shape} repeats for {span.count} rows"
    return None if (passes == passes[0]).all() else np.cumsum(passes, dtype=np.int64)


def _draws(span: Span) -> int:
    repeats = np.asarray(span.repeats)
    return span.count * (1 + int(repeats)) if repeats.ndim == 0 else int(span.count + repeats.sum(dtype=np.int64))


def _drawn(span: Span, ends: Ints | None, draw: Ints) -> tuple[Ints, Ints, Ints]:
    """(row within the span, repeat number, passes of that row in one epoch) of each draw."""
    if ends is None:
        passes = 1 + int(np.asarray(span.repeats).flat[0])
        row, repeat = np.divmod(draw, passes)
        return row, repeat, np.full_like(row, passes)
    row = np.searchsorted(ends, draw, side="right")
    begin = np.where(row > 0, ends[row - 1], 0)
    return row, draw - begin, ends[row] - begin


def caption_number(seed: int, rows: Ints, passes: Ints, alternatives: Ints) -> Ints:
    """Which of each row's alternative captions a pass uses: they take turns, starting anywhere.

    All arguments (n,). Over `alternatives[i]` consecutive passes row i shows each of its captions once.
    """
    offset = _mix(rows.astype(np.uint64) ^ np.uint64(seed_of(str(seed), "captions")))
    return ((offset % alternatives.astype(np.uint64)).astype(np.int64) + passes) % alternatives


def caption_dropped(seed: int, step: int, positions: Ints, share: float) -> NDArray[np.bool_]:
    """(n,) whether the caption at each position of the global batch of `step` gives way to the null prompt."""
    bits = _mix(positions.astype(np.uint64) ^ np.uint64(seed_of(f"{seed}/{step}", "dropout")))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share


def shuffled(positions: Ints, size: int, key: int) -> Ints:
    """The places that a pseudo-random permutation of range(size), chosen by `key`, gives to `positions`.

    A bijection of range(size) for every key. Costs O(len(positions)), whatever `size`.
    """
    if size == 1:
        return np.zeros_like(positions)
    half = max(2, ((size - 1).bit_length() + 1) // 2)
    keys = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key))
    places = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := places >= size).any():  # on average less than four rounds: the domain is under 4 size
        places[outside] = _feistel(places[outside], half, keys)
    return places.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of range(4**half): each round mixes one half of the bits into the other."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> width, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << width) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
