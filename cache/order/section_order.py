"""The order of training by sections of shards (`train.shuffle_shards: n`): a step needs few shards.

Draws, fill, passes and the cutting of a list of micro-batches into steps are the same as in `cache.order.schedule`, but
an epoch consists of sections:

1. Each epoch has a different random order of the shards of all buckets. Up to NEIGHBORS consecutive shards of a bucket
   stay together, because they share shards of texts. Each n shards are a section.
2. A section lists its micro-batches bucket after bucket, in the order of their cost. The order over the whole set
   does the same for an epoch. The steps that are completely within the section are permuted, and so are the draws of
   each bucket in these steps.
3. Draws of a bucket's last shard in a section that do not fill a micro-batch belong to the bucket's next section. A
   step that a section shares with the next section has draws of the section's last shards.

4. The first epoch begins with shards of the leading buckets of `EpochDraws`, and its first section with steps of the
   leading buckets that the section has, as far as they are completely within the section.

So the steps of a section need its n shards, one more shard of each bucket, and a few shards of a step. The plan of an
epoch consists of arrays with an entry for each shard. If rows of a shard are mixed with rows of other shards, as in a
set of several plans, they are looked up in the index when they are needed.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.order.schedule import EpochDraws, Ints, MakeOrder, Replacements
from cache.order.set_columns import IntColumn
from schemas.identity import derive_seed, mix_bits, permute_groups

NEIGHBORS = 8  # number of shards of one bucket that stay together; at most a quarter of a section
_CACHED_EPOCHS = 2  # cached plans of epochs: a step may end one epoch and begin the next
_CACHED_LOOKUPS = 1 << 12  # cached row numbers of shards


@dataclass(frozen=True)
class Blocks:
    """Blocks, as arrays with an entry for each block. A block is the rows of one span that are in one shard. Blocks are
    in the order of buckets, shards and spans.

    bucket, shard: bucket and shard number. first: first row. last: row after the last row. count: number of rows, fewer
    than last - first if rows of other shards are between them. rows_before: number of rows in earlier blocks of the
    span. rows: number of rows of the span. draws: number of draws of the span in an epoch.
    """

    bucket: Ints
    shard: Ints
    first: Ints
    last: Ints
    count: Ints
    rows_before: Ints
    rows: Ints
    draws: Ints

    def count_draws(self, epochs: int) -> Ints:
        """Return (blocks,) the number of draws in the first `epochs` epochs that take a row of each block."""
        laps, draws_of_lap = np.divmod(epochs * self.draws, self.rows)
        return laps * self.count + np.clip(draws_of_lap - self.rows_before, 0, self.count)


def find_blocks(draws: EpochDraws, shards: IntColumn) -> Blocks:
    """Return the blocks of the spans in `draws`. shards: column with the shard number of each row of the set."""
    parts = list[tuple[Ints, ...]]()
    for bucket, table in enumerate(draws.tables):
        for start, rows, span_draws in zip(
            table.starts.tolist(), table.counts.tolist(), table.span_draws.tolist(), strict=True
        ):
            column = shards.between(start, start + rows)
            run_first = np.append(0, np.flatnonzero(column[1:] != column[:-1]) + 1)
            run_last = np.append(run_first[1:], rows)
            numbers, run = np.unique(column[run_first].astype(np.int64), return_inverse=True)
            first, last, count = np.full(len(numbers), rows), np.zeros_like(numbers), np.zeros_like(numbers)
            np.minimum.at(first, run, run_first)
            np.maximum.at(last, run, run_last)
            np.add.at(count, run, run_last - run_first)
            order = np.argsort(first)
            rows_before = np.empty_like(count)
            rows_before[order] = np.cumsum(count[order]) - count[order]
            constants = [np.full(len(numbers), value) for value in (bucket, rows, span_draws)]
            parts.append((constants[0], numbers, start + first, start + last, count, rows_before, *constants[1:]))
    columns = list(map(np.concatenate, zip(*parts, strict=True)))
    order = np.lexsort((columns[1], columns[0]))
    return Blocks(*(np.ascontiguousarray(column[order], np.int64) for column in columns))


def order_by_sections(shards: IntColumn, shuffle_shards: int) -> MakeOrder:
    """Return the argument `order` of a `BatchSchedule`. shards: column with the shard number of each row of the set.
    shuffle_shards: number of shards in a section."""
    return lambda draws: SectionOrder(draws, shards, shuffle_shards)


@dataclass(frozen=True)
class Shuffle:
    """Ranges of numbers, each with its own permutation: starts, sizes and permutation keys, one for each range."""

    starts: Ints
    sizes: Ints
    keys: NDArray[np.uint64]

    def move(self, numbers: Ints) -> Ints:
        range_index = np.searchsorted(self.starts, numbers, side="right") - 1
        start = self.starts[range_index]
        return start + permute_groups(numbers - start, range_index, self.sizes, self.keys)


@dataclass(frozen=True)
class EpochPlan:
    """An epoch in sections. A cell is the set of micro-batches of one bucket in one section.

    blocks: block numbers in the order of draws, bucket after bucket. block_ends: end of each block's draws. taken:
    number of draws of each block in earlier epochs. draws: the shuffle of draws. first: number of micro-batches that
    complete a step of the previous epoch. steps: the shuffle of the steps after these. first_steps: changes of this
    shuffle, with which the first epoch begins with the leading buckets. cell_ends, cell_buckets, cell_firsts: for each
    cell, in the order of the epoch's list, the end of its micro-batches, its bucket, and the number of its first
    micro-batch within the bucket. section_ends: number of micro-batches up to the end of each section."""

    blocks: Ints
    block_ends: Ints
    draws_before: Ints
    draws: Shuffle
    first: int
    steps: Shuffle
    first_steps: Replacements
    cell_ends: Ints
    cell_buckets: Ints
    cell_firsts: Ints
    section_ends: Ints


class SectionOrder:
    """The order by sections. section: number of shards whose samples are mixed. Threads may share an order."""

    def __init__(self, draws: EpochDraws, shards: IntColumn, section: int):
        self._draws, self._shards, self._section = draws, shards, section
        self._blocks = find_blocks(draws, shards)
        self._scattered = self._blocks.last - self._blocks.first > self._blocks.count
        self._bucket_starts = np.cumsum([0, *(table.draws for table in draws.tables)])[:-1]
        self._plan = lru_cache(_CACHED_EPOCHS)(self._make_plan)
        self._rows_of = lru_cache(_CACHED_LOOKUPS)(self._look_up_rows)

    @cached_property
    def digest(self) -> str:
        digest = xxhash.xxh3_128()
        for column in (self._blocks.first, self._blocks.last, self._blocks.count):
            digest.update(column.astype("<i8").data)
        return digest.hexdigest()

    def section_ends(self, epoch: int) -> Ints:
        return self._plan(epoch).section_ends

    def locate(self, epoch: int, numbers: Ints) -> tuple[Ints, Ints]:
        plan, size = self._plan(epoch), self._draws.size
        step, offset = np.divmod(numbers - plan.first, size)
        places, is_permuted = numbers.copy(), (step >= 0) & (step < plan.steps.sizes.sum())
        step = plan.first_steps.apply(plan.steps.move(step[is_permuted]))
        places[is_permuted] = plan.first + step * size + offset[is_permuted]
        cell = np.searchsorted(plan.cell_ends, places, side="right")
        starts = np.append(0, plan.cell_ends[:-1])
        return plan.cell_buckets[cell], plan.cell_firsts[cell] + places - starts[cell]

    def draw(self, epoch: int, bucket: int, numbers: Ints) -> tuple[Ints, Ints]:
        plan, size, draws = self._plan(epoch), self._draws.batch_size, self._draws.tables[bucket].draws
        position = (numbers[:, None] * size + np.arange(size)).ravel()
        # Extra draws repeat the draws just before the bucket's last micro-batch, because their shards were needed last.
        fill = np.maximum(0, position - draws + 1)
        repetition = -(-fill // draws)
        position = np.where(fill, max(0, draws - size) + (fill - 1) % draws, position)
        position = plan.draws.move(position + self._bucket_starts[bucket])
        index = np.searchsorted(plan.block_ends, position, side="right")
        block = plan.blocks[index]
        # The k-th draw of a block over all epochs takes the block's row number k modulo its number of rows.
        draw_number = plan.draws_before[index] + position - np.append(0, plan.block_ends)[index]
        passes, offset = np.divmod(draw_number, self._blocks.count[block])
        rows = self._blocks.first[block] + offset
        for number in np.unique(block[self._scattered[block]]).tolist():
            members = block == number
            rows[members] = self._rows_of(number)[offset[members]]
        passes += repetition * -(-self._blocks.draws[block] // self._blocks.rows[block])
        return rows.reshape(-1, size), passes.reshape(-1, size)

    def _look_up_rows(self, block: int) -> Ints:
        """Return (count,) the row numbers of a block whose rows are mixed with rows of different shards."""
        first, last = int(self._blocks.first[block]), int(self._blocks.last[block])
        return first + np.flatnonzero(self._shards.between(first, last) == self._blocks.shard[block])

    def _keys(self, epoch: int, purpose: str, values: Ints) -> NDArray[np.uint64]:
        key = derive_seed(f"{self._draws.seed}/{epoch}", f"{purpose} by shards")
        return mix_bits(values.astype(np.uint64) ^ np.uint64(key))

    def _make_plan(self, epoch: int) -> EpochPlan:
        blocks, size = self._blocks, self._draws.batch_size
        draws_before = blocks.count_draws(epoch)
        epoch_draws = blocks.count_draws(epoch + 1) - draws_before
        rank, section = self._divide_shards(epoch, epoch_draws)
        # Draws: bucket after bucket, and within a bucket section after section.
        order = np.lexsort((rank, blocks.bucket))
        order = order[epoch_draws[order] > 0]
        bucket, section, ends = blocks.bucket[order], section[order], np.cumsum(epoch_draws[order])
        last = np.append((np.diff(bucket) != 0) | (np.diff(section) != 0), True)  # last block of each cell
        bucket, section = bucket[last], section[last]
        # The number of the bucket's micro-batches up to the end of each cell; the bucket's last one is filled.
        batch_ends, final = ends[last] - self._bucket_starts[bucket], np.append(np.diff(bucket) != 0, True)
        batch_ends = np.where(final, -(-batch_ends // size), batch_ends // size)
        firsts = np.where(np.append(True, final[:-1]), 0, np.append(0, batch_ends[:-1]))
        # The list: section after section; within a section, buckets by their cost, ascending and descending in turn.
        place = np.empty(len(self._draws.tables), np.int64)
        place[self._draws.list_epoch(epoch).order] = np.arange(len(place))
        listed = np.lexsort((np.where(section % 2, -place[bucket], place[bucket]), section))
        bucket, section, firsts, counts = bucket[listed], section[listed], firsts[listed], (batch_ends - firsts)[listed]
        cell_ends = np.cumsum(counts)
        section_ends = cell_ends[np.append(np.diff(section) != 0, True)]
        first, steps = self._divide_steps(epoch, section_ends)
        is_first = (section == 0) & (counts > 0) & (epoch == 0)
        first_steps = self._lead(steps, bucket[is_first], (cell_ends - counts)[is_first])
        # The draws of a step that a section shares with the next section are from the section's last shards, and have
        # a separate permutation.
        cuts = first + np.append(steps.starts, steps.sizes.sum()) * self._draws.size
        cuts = cuts[cuts < cell_ends[-1]]
        cell = np.searchsorted(cell_ends, cuts, side="right")
        cut_buckets, cut_numbers = bucket[cell], firsts[cell] + cuts - (cell_ends - counts)[cell]
        buckets, numbers = np.append(bucket, cut_buckets), np.append(firsts, cut_numbers)
        starts = np.unique(np.append(self._bucket_starts, self._bucket_starts[buckets] + numbers * size))
        draws = Shuffle(starts, np.diff(np.append(starts, ends[-1])), self._keys(epoch, "samples", starts))
        cells = cell_ends, bucket, firsts, section_ends
        return EpochPlan(order, ends, draws_before[order], draws, first, steps, first_steps, *cells)

    def _lead(self, steps: Shuffle, buckets: Ints, starts: Ints) -> Replacements:
        """Return the changes of the first range of `steps` with which it begins with the leading buckets. buckets,
        starts: (cells,) bucket number and place of the first micro-batch of each cell of the epoch's first section that
        has micro-batches."""
        begins = dict(zip(buckets.tolist(), (starts // self._draws.size).tolist(), strict=True))
        found = dict.fromkeys(begins[bucket] for bucket in self._draws.leading_buckets if bucket in begins)
        leading = [step for step in found if len(steps.sizes) and step < steps.sizes[0]]
        return Replacements.lead(leading, steps.move(np.arange(len(leading))))

    def _divide_shards(self, epoch: int, epoch_draws: Ints) -> tuple[Ints, Ints]:
        """Return (blocks,) the place of each block's shard in the epoch's order of shards, and (blocks,) its
        section."""
        blocks = self._blocks
        is_first = np.append(True, (np.diff(blocks.bucket) != 0) | (np.diff(blocks.shard) != 0))
        shard = np.cumsum(is_first) - 1  # numbered bucket after bucket
        bucket, number = blocks.bucket[is_first], np.arange(is_first.sum())
        count = min(NEIGHBORS, max(1, self._section // 4))
        shift = derive_seed(f"{self._draws.seed}/{epoch}", "neighbors by shards") % count
        group = (number - np.searchsorted(bucket, bucket) + shift) // count
        group = np.cumsum(np.append(True, (np.diff(bucket) != 0) | (np.diff(group) != 0)))
        priority = np.full(len(number), len(self._draws.leading_buckets))
        if epoch == 0:
            shard_draws = np.bincount(shard, epoch_draws)
            for place, leading_bucket in enumerate(self._draws.leading_buckets):
                largest = np.argmax(np.where(bucket == leading_bucket, shard_draws, -1))
                priority[group == group[largest]] = place
        keys = self._keys(epoch, "shards", number), self._keys(epoch, "groups of shards", group), priority
        rank = np.empty_like(number)
        rank[np.lexsort(keys)] = number
        is_drawn = np.zeros(len(number), bool)
        np.logical_or.at(is_drawn, rank[shard], epoch_draws > 0)
        section = (np.cumsum(is_drawn) - 1) // self._section  # by rank
        return rank[shard], section[rank[shard]]

    def _divide_steps(self, epoch: int, section_ends: Ints) -> tuple[int, Shuffle]:
        """Return the number of micro-batches that complete a step of the previous epoch, and the shuffle of the other
        steps of the epoch, which permutes steps that are completely within a section."""
        size, total = self._draws.size, int(section_ends[-1])
        first = min(-epoch * total % size, total)
        bounds = np.append(0, np.maximum(0, section_ends - first))  # counted from the first step of this epoch
        begins, ends = -(-bounds[:-1] // size), bounds[1:] // size
        starts = np.unique(np.concatenate([[0], begins, ends]))
        starts = starts[starts < (total - first) // size]
        sizes = np.diff(np.append(starts, (total - first) // size))
        return first, Shuffle(starts, sizes, self._keys(epoch, "steps", starts))
