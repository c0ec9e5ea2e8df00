"""The draws of a set: in which order its rows are trained on, and which caption a draw reads. The same on any rank."""

import numpy as np
from numpy.typing import NDArray

from cache.order.schedule import BatchSchedule, Ints
from cache.order.set_columns import IntColumn
from cache.order.shard_order import order_by_shards
from cache.sets.trainset import TrainSet
from schemas.config.training import Train
from schemas.identity import derive_seed
from schemas.randomness import mix_bits, to_unit_interval


def make_schedule(data: TrainSet, settings: Train, world: int = 1) -> BatchSchedule:
    """The order in which a run of `world` processes trains on a set."""
    order = None
    if settings.shuffle_shards is not None:
        order = order_by_shards(IntColumn(data.tables["index"]["shard"]), settings.shuffle_shards)
    global_batch = settings.batch_size * settings.accumulate * world
    return BatchSchedule(data.spans, settings.seed, settings.batch_size, global_batch, order)


def choose_captions(seed: int, rows: Ints, passes: Ints, alternatives: Ints) -> Ints:
    """The caption that each row uses in a pass: alternatives take turns, from a random start.

    Arrays are (n,). Over `alternatives[i]` consecutive passes row i uses each of its captions once.
    """
    offset = mix_bits(rows.astype(np.uint64) ^ np.uint64(derive_seed(str(seed), "captions")))
    return ((offset % alternatives.astype(np.uint64)).astype(np.int64) + passes) % alternatives


def draw_caption_dropout(seed: int, step: int | range, positions: Ints, share: float) -> NDArray[np.bool_]:
    """(n,) whether the null prompt replaces the caption at each position of the global batch of `step`; of several
    steps (steps, n), as their positions."""
    steps = [step] if isinstance(step, int) else step
    keys = np.array([derive_seed(f"{seed}/{each}", "dropout") for each in steps], np.uint64)
    keys = keys if isinstance(step, int) else keys[:, None]
    return to_unit_interval(mix_bits(positions.astype(np.uint64) ^ keys)) < share
