"""The rows of a training set that each shard has, and how often an epoch draws from them: arrays, an entry a shard.

Rows of a set are in the order of their shards, unless it is of several plans, whose samples are sorted into each other.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cache.order.schedule import EpochDraws, Ints
from cache.order.set_columns import IntColumn


@dataclass(frozen=True)
class Blocks:
    """The rows of one span that are in one shard, as arrays with an entry for each block, in the order of buckets,
    shards and spans.

    bucket, shard: their numbers. first, last: its first row, and the row after its last. count: its rows; fewer than
    last - first where others are between them. below: rows of the span that are in its blocks before. rows, draws: of
    the whole span, and in an epoch.
    """

    bucket: Ints
    shard: Ints
    first: Ints
    last: Ints
    count: Ints
    below: Ints
    rows: Ints
    draws: Ints

    @cached_property
    def starts(self) -> Ints:
        """(parts,) the first block of each part: what a shard has of a bucket."""
        new = (np.diff(self.bucket) != 0) | (np.diff(self.shard) != 0)
        return np.append(0, np.flatnonzero(new) + 1)

    def taken(self, draws: Ints) -> Ints:
        """Count how many of the first `draws` draws of its span, over all epochs, take one of its rows."""
        laps, rest = np.divmod(draws, self.rows)
        return laps * self.count + np.clip(rest - self.below, 0, self.count)


def find_blocks(draws: EpochDraws, shards: IntColumn) -> Blocks:
    """The blocks of the spans in `draws`. shards: of each row of the set the number of its shard."""
    parts = list[tuple[Ints, ...]]()
    for bucket, table in enumerate(draws.tables):
        for start, count, span_draws in zip(
            table.starts.tolist(), table.counts.tolist(), table.each.tolist(), strict=True
        ):
            numbers, first, last, sizes = _runs_by_shard(shards.between(start, start + count))
            constants = [np.full(len(sizes), value) for value in (bucket, count, span_draws)]
            parts.append((numbers, first + start, last + start, sizes, np.cumsum(sizes) - sizes, *constants))
    shard, first, last, sizes, below, buckets, rows, drawn = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((shard, buckets))
    columns = (buckets, shard, first, last, sizes, below, rows, drawn)
    return Blocks(*(np.ascontiguousarray(column[order], np.int64) for column in columns))


def _runs_by_shard(shards: NDArray[np.int32]) -> tuple[Ints, Ints, Ints, Ints]:
    """(k,) of each shard in a span's column, in the order of their first rows: its number, first row, row after the
    last, count of rows."""
    first = np.append(0, np.flatnonzero(shards[1:] != shards[:-1]) + 1)
    last = np.append(first[1:], len(shards))
    numbers = shards[first].astype(np.int64)
    order = np.argsort(numbers, kind="stable")
    new = np.append(0, np.flatnonzero(np.diff(numbers[order])) + 1)
    if len(new) == len(numbers):
        return numbers, first, last, last - first
    counts = np.add.reduceat((last - first)[order], new)
    numbers, first, last = numbers[order][new], first[order][new], last[order][np.append(new[1:], len(order)) - 1]
    by_row = np.argsort(first)
    return numbers[by_row], first[by_row], last[by_row], counts[by_row]
