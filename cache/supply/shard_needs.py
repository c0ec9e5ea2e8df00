"""Which shards the coming steps of training read: a function of the set, the schedule and the choice of captions."""

from collections.abc import Iterator

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
    """Of each step from `first` on, to below `last` or without end: the numbers of the shards that rank `rank` of
    `world` reads, each once, in increasing order. They are those of latents and further kinds, of the captions chosen,
    and of the null prompts in place of dropped ones. Computed as it is asked for; memory: nothing per sample.
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
        found = [part.take(rows.ravel()) for part in parts]
        if not data.packed:
            drawn = data.row_texts.draw(schedule.seed, caption_dropout, steps, positions, rows, passes).ravel()
            found.append(np.full(len(drawn), -1))  # a missing null prompt is for the reader to report
            found[-1][drawn != NO_TEXT] = text_shards.take(drawn[drawn != NO_TEXT])
        steps = (steps - first).repeat(schedule.batch_size)
        yield from _distinct(np.tile(steps, len(found)), np.concatenate(found), stop - first)
        first = stop


def _distinct(steps: Ints, shards: Ints, count: int) -> Iterator[Ints]:
    """The distinct shards, but -1, of each of `count` steps."""
    size = int(shards.max()) + 2
    pairs = np.unique(steps * size + shards + 1)
    pairs = pairs[pairs % size > 0]
    for own in np.split(pairs, np.searchsorted(pairs, np.arange(1, count) * size)):
        yield own % size - 1
