"""Batches copied in one go equal batches of samples read one by one."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache.order.schedule import BatchSchedule
from cache.store.damage import DamageError
from schemas.config.training import Reading
from tests.trainer.runs import opened
from trainer.data import BatchLoader, prefetch


def test_samples_that_differ_are_converted_and_completed(make_config, make_set, helpers) -> None:
    config = make_config("t2i")
    items, null, prompts = helpers.mixed_items(config)
    mask = np.zeros(items[0].latent.shape[1:], np.float32)
    items = [
        replace(item, bucket="64x64", latent=items[0].latent, mask=mask if i % 2 else None)
        for i, item in enumerate(items)
    ]
    make_set(config, items, null, prompts)
    data = opened(config)
    result = BatchLoader(data, BatchSchedule(data.spans, 0, 4, 4), 0.0).step(0).micro_batches[0].batch
    assert result.extras["mask"].sum((1, 2, 3)).unique().tolist() == [0.0, float(mask.size)]


def flat(config, threads: int) -> list:
    data = opened(config)
    loader = BatchLoader(data, BatchSchedule(data.spans, 3, 2, 4), 0.3, reading=Reading(threads=threads))
    return [
        [
            part.batch.ids,
            part.batch.text_BLD.tolist(),
            part.batch.latents_BCTHW.tolist(),
            part.noise_BCTHW.tolist(),
            part.identities,
        ]
        for step in loader.steps(0, 12)
        for part in step.micro_batches
    ]


def test_threads_change_nothing(make_config, make_set) -> None:
    config = make_config("t2i")
    make_set(config, dtype="bfloat16")
    expected = flat(config, 1)
    assert len(expected) == 24
    assert flat(config, 3) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_arrives_at_its_place_with_any_threads(ready, threads) -> None:
    config = ready("t2i")
    data = opened(config)
    schedule = BatchSchedule(data.spans, 3, 2, 2)
    damaged = int(schedule.step(5)[0].rows[1])
    first = min(step for step in range(20) if damaged in schedule.step(step)[0].rows)
    expected = data.sample(damaged).tensors["latent"].numpy().tobytes()
    for path in Path(config.root).glob("latents/*/*.arrow"):
        raw = path.read_bytes()
        if expected in raw:
            path.write_bytes(raw.replace(expected, bytes([expected[0] ^ 1]) + expected[1:]))
    steps = BatchLoader(data, schedule, 0.0, reading=Reading(threads=threads)).steps(0, 20)
    read = []
    with pytest.raises(DamageError, match="latents") as caught:
        for each in steps:
            read.append(each.step)
    assert first > 0 and read == list(range(first)) and caught.value.row is not None


def test_several_threads_read_at_once_in_order_and_end() -> None:
    together, waiting = threading.Barrier(3), []

    def read(number: int) -> int:
        waiting.append(number)
        if number < 3:
            together.wait(timeout=60)  # all three are read at the same time
        return -number

    results = prefetch(read, range(1000), depth=1, threads=3)
    assert [next(results) for _ in range(10)] == [-number for number in range(10)]
    assert len(waiting) <= 10 + 3
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_numbers_that_are_not_finite_are_looked_for_after_the_copy(make_config, make_set, helpers) -> None:
    config = make_config("t2i")
    items, null, prompts = helpers.mixed_items(config)
    items[0].latent[3, 0, 2, 1] = np.inf
    make_set(config, items, null, prompts)
    data = opened(config)
    data.text_widths = {}
    loader = BatchLoader(data, BatchSchedule(data.spans, 0, 12, 12), 0.0)
    result = {}
    for step in range(2):
        for part in loader.step(step).micro_batches:
            result[step] = bool(part.batch.is_finite())
    assert sorted(result.values()) == [False, True]
    for step, finite in result.items():
        if finite:
            loader.check_step(step)
        else:
            with pytest.raises(DamageError, match="NaN or infinite"):
                loader.check_step(step)
