"""The order of training by shards: few shards are needed at a time, each for one short stretch of an epoch's steps.

For sets whose shards are far away or are made while training goes on (`train.shuffle_shards: N`). Draws, fill, passes
and the cutting of an epoch's list into steps are those of `cache.order.schedule`; another order is given to the draws
of each bucket and to the steps:

1. In each epoch a bucket's shards are in a random order, but NEIGHBORS that follow each other in the set stay
   together, as they share shards of texts. Its draws are in the order of their shards. Steps of this bucket alone take
   them one after another.
2. An event is a shard whose draws complete at least one step, with the shards before it that completed none. The events
   of all buckets are in a random order, each bucket's own ones in the order of its shards and those of neighbors
   together: so a bucket comes up as often as it has shards.
3. Events are divided into sections of N / 2 shards. Within a section, a bucket's draws are permuted, and so are the
   steps of all buckets.
4. Steps of several buckets, and the steps that an epoch shares with its neighbors, are at its beginning and its end.

So steps of one section need its N / 2 shards, and of each bucket at most one more shard, begun in the bucket's section
before. Steps in which one section ends and the next begins need N: those that a cache holds while the next ones come.
Where a step has more samples than a shard, sections are larger than N / 2, by the shards of a step.

Fill: the draws that fill a bucket's last micro-batch are those that come before it, whose shards were needed last.

A shard's draws in an epoch are computed from the cycle of its rows; an epoch is planned as arrays with an entry for
each shard (of each dataset in it). Rows of a set are in the order of their shards; where it is of several plans, whose
samples are sorted into each other, a shard's rows are looked up in the index when they are needed.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.order.schedule import EpochDraws, EpochList, Ints, MakeOrder
from cache.order.set_columns import IntColumn
from schemas.identity import derive_seed
from schemas.randomness import mix_bits, permute, permute_groups

NEIGHBORS = 8  # shards of one bucket that stay together, other ones in each epoch; at most a quarter of a section
_KEPT_EPOCHS = 2  # planned: a step may end one and begin the next
_KEPT_LOOKUPS = 1 << 12  # shards whose rows were looked up


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


def order_by_shards(shards: IntColumn, shuffle_shards: int) -> MakeOrder:
    """The argument `order` of a `BatchSchedule`. shards: of each row of the set the number of its shard.
    shuffle_shards: the shards that are needed at a time."""
    return lambda draws: ShardOrder(draws, shards, max(1, shuffle_shards // 2))


@dataclass(frozen=True)
class BlockOrder:
    """Blocks in the order of an epoch's draws, bucket after bucket. ends: where their draws end. taken: how often each
    was taken in the epochs before. part_buckets, part_ends: the same of parts, what a shard has of a bucket."""

    blocks: Ints
    ends: Ints
    taken: Ints
    part_buckets: Ints
    part_neighbors: Ints
    part_ends: Ints


@dataclass(frozen=True)
class Events:
    """Parts in which steps of their bucket alone end, in the order of their bucket. before, steps: steps of the bucket
    that end before it, and in it. section: in which it is."""

    buckets: Ints
    before: Ints
    steps: Ints
    section: Ints


@dataclass(frozen=True)
class Shuffle:
    """Ranges of numbers, each permuted by itself: where they start, their sizes, and the keys of their permutations."""

    starts: Ints
    sizes: Ints
    keys: NDArray[np.uint64]

    def move(self, numbers: Ints) -> Ints:
        which = np.searchsorted(self.starts, numbers, side="right") - 1
        start = self.starts[which]
        return start + permute_groups(numbers - start, which, self.sizes, self.keys)


@dataclass(frozen=True)
class EpochPlan:
    """An epoch's list as this order takes it.

    head, rotation: (buckets,) micro-batches that are listed before the bucket's first step alone; and those that the
    list has at its start, in a step of several buckets, and this order at its end. mixed: places in the list, counted
    in steps, of the steps of several buckets. order, draws: of the draws of all buckets, and their shuffle. steps: the
    shuffle of steps of one bucket, whose ranges are sections; step_count: how many these are. group_*: of the steps of
    one bucket in one section, section after section: where they end, their bucket, and how many of its steps are before
    the group less how many of all.
    """

    listed: EpochList
    head: Ints
    rotation: Ints
    mixed: Ints
    order: BlockOrder
    draws: Shuffle
    steps: Shuffle
    step_count: int
    group_ends: Ints
    group_buckets: Ints
    group_shifts: Ints


class ShardOrder:
    """section: shards whose samples are mixed. Threads may share it."""

    def __init__(self, draws: EpochDraws, shards: IntColumn, section: int):
        self._draws, self._shards, self._section = draws, shards, section
        self._blocks = find_blocks(draws, shards)
        self._scattered = self._blocks.last - self._blocks.first > self._blocks.count
        self._any_scattered = bool(self._scattered.any())
        self._bucket_ends = np.cumsum([table.draws for table in draws.tables])
        self._bucket_starts = np.append(0, self._bucket_ends[:-1])
        self._plan = lru_cache(_KEPT_EPOCHS)(self._make_plan)
        self._rows_of = lru_cache(_KEPT_LOOKUPS)(self._look_up_rows)

    @cached_property
    def digest(self) -> str:
        digest = xxhash.xxh3_128()
        for column in (self._blocks.starts, self._blocks.first, self._blocks.last, self._blocks.count):
            digest.update(column.astype("<i8").data)
        return digest.hexdigest()

    def section_ends(self, epoch: int) -> Ints:
        plan = self._plan(epoch)
        ends = plan.listed.first + np.append(plan.steps.starts[1:], plan.step_count) * self._draws.size
        return np.append(ends, self._draws.counts.sum())

    def locate(self, epoch: int, numbers: Ints) -> tuple[Ints, Ints]:
        plan, size = self._plan(epoch), self._draws.size
        step, offset = np.divmod(numbers - plan.listed.first, size)
        buckets, within = np.empty_like(numbers), np.empty_like(numbers)
        alone = (step >= 0) & (step < plan.step_count)
        if alone.any():
            moved = plan.steps.move(step[alone])
            group = np.searchsorted(plan.group_ends, moved, side="right")
            buckets[alone] = bucket = plan.group_buckets[group]
            within[alone] = plan.head[bucket] + (moved + plan.group_shifts[group]) * size + offset[alone]
        if not alone.all():
            places, mixed = numbers[~alone], step[~alone] - plan.step_count
            mixing = (mixed >= 0) & (mixed < len(plan.mixed))
            if mixing.any():
                key = self._key(epoch, "mixed steps")
                moved = plan.mixed[permute(mixed[mixing], len(plan.mixed), key)]
                places[mixing] = plan.listed.first + moved * size + offset[~alone][mixing]
            bucket, number = plan.listed.find(places)
            buckets[~alone], within[~alone] = bucket, (number - plan.rotation[bucket]) % plan.listed.counts[bucket]
        return buckets, within

    def draw(self, epoch: int, bucket: int, numbers: Ints) -> tuple[Ints, Ints]:
        plan, size, draws = self._plan(epoch), self._draws.batch_size, self._draws.tables[bucket].draws
        position = (numbers[:, None] * size + np.arange(size)).ravel()
        repetition: Ints | int = 0
        if position.max() >= draws:
            fill = position - draws
            repetition = np.where(fill >= 0, 1 + fill // draws, 0)
            position = np.where(fill >= 0, max(0, draws - size) + fill % draws, position)
        position += self._bucket_starts[bucket]
        position = plan.draws.move(position)
        which = np.searchsorted(plan.order.ends, position, side="right")
        block = plan.order.blocks[which]
        # The k-th draw of a block over all epochs takes its row k modulo their number.
        taken = plan.order.taken[which] + position - np.append(0, plan.order.ends)[which]
        passes, offset = np.divmod(taken, self._blocks.count[block])
        rows = self._blocks.first[block] + offset
        if self._any_scattered:
            members = np.flatnonzero(self._scattered[block])
            scattered, which = np.unique(block[members], return_inverse=True)
            block_rows = [np.zeros(0, np.int64), *map(self._rows_of, scattered.tolist())]
            starts = np.cumsum([len(block) for block in block_rows])[:-1]
            rows[members] = np.concatenate(block_rows)[starts[which] + offset[members]]
        passes += repetition * -(-self._blocks.draws[block] // self._blocks.rows[block])
        return rows.reshape(-1, size), passes.reshape(-1, size)

    def _look_up_rows(self, block: int) -> Ints:
        """(count,) the rows of a block among those of other shards."""
        first, last = int(self._blocks.first[block]), int(self._blocks.last[block])
        return first + np.flatnonzero(self._shards.between(first, last) == self._blocks.shard[block])

    def _key(self, epoch: int, purpose: str) -> int:
        return derive_seed(f"{self._draws.seed}/{epoch}", f"{purpose} by shards")

    def _keys(self, epoch: int, purpose: str, values: Ints) -> NDArray[np.uint64]:
        return mix_bits(values.astype(np.uint64) ^ np.uint64(self._key(epoch, purpose)))

    def _make_plan(self, epoch: int) -> EpochPlan:
        listed, size = self._draws.listed(epoch), self._draws.size
        first, stop = listed.first, listed.first + listed.steps * size
        ends = np.empty_like(listed.ends)
        ends[listed.order] = listed.ends
        starts = ends - listed.counts
        begin = first - (first - np.maximum(starts, first)) // size * size  # of its first step alone, if it has one
        steps = np.maximum(0, (np.clip(ends, first, stop) - first) // size - (begin - first) // size)
        head = np.clip(first - starts, 0, listed.counts)
        rotation = np.where(head > 0, 0, np.minimum(begin, ends) - starts)
        inner = ends[(ends > first) & (ends < stop)] - first
        mixed = np.unique(inner[inner % size > 0] // size)
        order = self._order_blocks(epoch)
        events = self._find_events(epoch, head, steps, order)
        draws, sections = self._divide_draws(epoch, head, steps, events), self._divide_steps(epoch, events)
        return EpochPlan(listed, head, rotation, mixed, order, draws, *sections)

    def _order_blocks(self, epoch: int) -> BlockOrder:
        blocks = self._blocks
        taken = blocks.taken(epoch * blocks.draws)
        drawn = blocks.taken((epoch + 1) * blocks.draws) - taken
        buckets, part_draws = blocks.bucket[blocks.starts], np.add.reduceat(drawn, blocks.starts)
        number, count = np.arange(len(buckets)), min(NEIGHBORS, max(1, self._section // 4))
        position = number - np.searchsorted(buckets, buckets) + self._key(epoch, "neighbours") % count
        neighbors = np.cumsum(_changes(buckets, position // count), dtype=np.int64)
        keys = self._keys(epoch, "shards", number), self._keys(epoch, "groups of shards", neighbors)
        parts = np.lexsort((*keys, buckets))
        parts = parts[part_draws[parts] > 0]
        counts = np.diff(np.append(blocks.starts, len(drawn)))[parts]
        order = np.repeat(blocks.starts[parts] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        order = order[drawn[order] > 0]
        columns = buckets[parts], neighbors[parts], np.cumsum(part_draws[parts])
        return BlockOrder(order, np.cumsum(drawn[order]), taken[order], *columns)

    def _find_events(self, epoch: int, head: Ints, steps: Ints, order: BlockOrder) -> Events:
        bucket, size = order.part_buckets, self._draws.batch_size
        first = np.append(True, bucket[1:] != bucket[:-1])
        draws = order.part_ends - self._bucket_starts[bucket] - head[bucket] * size
        done = np.clip(draws // (self._draws.size * size), 0, steps[bucket])
        last = np.append(first[1:], True)  # the fill of a bucket's last micro-batch may be in its last step
        done[last] = steps[bucket[last]]
        before = np.where(first, 0, np.append(0, done[:-1]))
        events = np.flatnonzero(done > before)
        buckets = bucket[events]
        follows = np.append(False, buckets[1:] == buckets[:-1])
        parts = events - np.where(follows, np.append(0, events[:-1]), np.searchsorted(bucket, buckets) - 1)
        # Groups of neighbors in random order, those of a bucket in their own.
        new = _changes(buckets, order.part_neighbors[events])
        shuffled = np.argsort(self._keys(epoch, "events", np.arange(new.sum())), kind="stable")
        position = np.argsort(buckets[new][shuffled], kind="stable")
        in_order = np.argsort(position[np.cumsum(new) - 1], kind="stable")
        section = np.empty_like(events)
        section[in_order] = (np.cumsum(parts[in_order]) - 1) // self._section
        return Events(buckets, before[events], (done - before)[events], section)

    def _divide_draws(self, epoch: int, head: Ints, steps: Ints, events: Events) -> Shuffle:
        def first_draw(bucket: Ints, step: Ints) -> Ints:
            return self._bucket_starts[bucket] + (head[bucket] + step * self._draws.size) * size

        size, every = self._draws.batch_size, np.arange(len(self._bucket_ends))
        new = _changes(events.buckets, events.section)
        rest = first_draw(every, steps)
        starts = [
            self._bucket_starts,
            first_draw(events.buckets[new], events.before[new]),
            rest[rest < self._bucket_ends],
        ]
        firsts = np.unique(np.concatenate(starts))
        sizes = np.diff(np.append(firsts, self._bucket_ends[-1]))
        return Shuffle(firsts, sizes, self._keys(epoch, "samples", firsts))

    def _divide_steps(self, epoch: int, events: Events) -> tuple[Shuffle, int, Ints, Ints, Ints]:
        order = np.lexsort((events.buckets, events.section))
        buckets, section, steps = events.buckets[order], events.section[order], events.steps[order]
        ends = np.cumsum(steps)
        new = _changes(section, buckets)
        group_starts = (ends - steps)[new]
        starts = (ends - steps)[_changes(section)]
        sizes, group_ends = np.diff(np.append(starts, steps.sum())), np.append(group_starts, steps.sum())[1:]
        keys = self._keys(epoch, "steps", np.arange(len(starts)))
        shifts = events.before[order][new] - group_starts
        return Shuffle(starts, sizes, keys), int(steps.sum()), group_ends, buckets[new], shifts


def _changes(*columns: Ints) -> NDArray[np.bool_]:
    """(n,) whether an entry is the first, or one of the columns differs from the entry before."""
    different = [np.append(True, column[1:] != column[:-1])[: len(column)] for column in columns]
    return np.logical_or.reduce(different)
