"""Which shards the coming steps of training read: a function of the set, the schedule and the choice of captions."""

from collections.abc import Iterator

import numpy as np

from cache.order.schedule import BatchSchedule, Ints
from cache.order.set_columns import IntColumn, ListColumn
from cache.sets.draws import choose_captions, draw_caption_dropout
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
    lists, null_texts, text_shards = (
        ListColumn(index["texts"]),
        IntColumn(index["null_text"]),
        IntColumn(texts["shard"]),
    )
    null = data.meta["null_text"]
    together = max(1, min(PLANNED_DRAWS // schedule.global_batch, int(schedule.steps_per_epoch)))
    own = len(range(rank, schedule.micro_batches_per_step, world)) * schedule.batch_size  # draws of a step
    while last is None or first < last:
        stop = first + together if last is None else min(last, first + together)
        planned = schedule.plan(first, stop, rank, world)
        rows, steps = planned.rows.ravel(), np.arange(stop - first).repeat(own)
        found = [part.take(rows) for part in parts]
        if not data.packed:
            captions = choose_captions(schedule.seed, rows, planned.passes.ravel(), lists.lengths(rows))
            numbers = lists.take(rows, captions)
            positions = (planned.places[:, None] * schedule.batch_size + np.arange(schedule.batch_size)).reshape(
                -1, own
            )
            without = draw_caption_dropout(schedule.seed, range(first, stop), positions, caption_dropout).ravel()
            numbers[without] = null_texts.take(rows[without], -1 if null is None else null)
            found.append(np.full(len(rows), -1))  # a missing null prompt is for the reader to report
            found[-1][numbers >= 0] = text_shards.take(numbers[numbers >= 0])
        yield from _distinct(np.tile(steps, len(found)), np.concatenate(found), stop - first)
        first = stop


def _distinct(steps: Ints, shards: Ints, count: int) -> Iterator[Ints]:
    """The distinct shards, but -1, of each of `count` steps."""
    size = int(shards.max()) + 2
    pairs = np.unique(steps * size + shards + 1)
    pairs = pairs[pairs % size > 0]
    for own in np.split(pairs, np.searchsorted(pairs, np.arange(1, count) * size)):
        yield own % size - 1
