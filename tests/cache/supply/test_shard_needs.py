"""What is said to be needed is what reading opens."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cache.order.schedule import BatchSchedule
from cache.order.set_columns import IntColumn
from cache.order.shard_order import order_by_shards
from cache.sets.trainset import TrainSet
from cache.shards.shard_supply import StoredShards
from cache.store.store import Store
from cache.supply.step_needs import needed_shards
from schemas.config.training import Train
from tests.cache.sets.small_set import add_vision, make_source, opened

DROPOUT = 0.4


class Recorder(StoredShards):
    def __init__(self, data: TrainSet) -> None:
        super().__init__(data.store, data.shard_path)
        self.opened = set[int]()

    def open(self, number: int):
        self.opened.add(number)
        return super().open(number)


def opened_by_reading(data: TrainSet, schedule: BatchSchedule, step: int, rank: int, world: int) -> set[int]:
    data.use_supply(recorder := Recorder(data))
    for each in schedule.step(step, rank, world):
        texts = data.row_texts.draw(schedule.seed, DROPOUT, step, each.positions, each.rows, each.passes)
        for row, text in zip(each.rows.tolist(), texts.tolist(), strict=True):
            data.read_draw(row, text, each.bucket)
    return recorder.opened


@pytest.mark.parametrize("form", ["arrow", "webdataset"])
def test_needs_are_what_reading_opens(tmp_path: Path, form: str) -> None:
    """Latents, vision features, captions that take turns, null prompts of the set and of a sample; on any rank."""
    store = make_source(Store(tmp_path / "root"), form)
    add_vision(store, form)
    data = opened(store)
    column = IntColumn(data.tables["index"]["shard"])
    for order in (None, order_by_shards(column, 2)):
        schedule = BatchSchedule(data.spans, 5, 1, 2, order)
        for rank, world in ((0, 1), (1, 2)):
            needs = list(needed_shards(data, schedule, DROPOUT, 3, 13, rank, world))
            assert len(needs) == 10
            for step, need in enumerate(needs, 3):
                assert set(need.tolist()) == opened_by_reading(data, schedule, step, rank, world)
                assert (np.diff(need) > 0).all()
    assert len({tuple(need) for need in needs}) > 1
    endless = islice(needed_shards(data, schedule, DROPOUT, 3, None, 1, 2), 10)
    assert [need.tolist() for need in endless] == [need.tolist() for need in needs]


def test_the_order_is_chosen_by_the_settings(tmp_path: Path) -> None:
    data = opened(make_source(Store(tmp_path), "arrow"))
    settings = Train(seed=2, batch_size=1, accumulate=2)
    assert data.make_schedule(settings).order.digest is None
    found = data.make_schedule(settings.model_copy(update={"shuffle_shards": 2}), world=2)
    assert found.order.digest and (found.batch_size, found.global_batch, found.seed) == (1, 4, 2)
