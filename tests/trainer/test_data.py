"""Shards become batches: exact values, padding, randomness by position, errors of the reading thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cache.order.schedule import BatchSchedule
from cache.shards.tensors import Array
from tests.forms import in_turn
from tests.trainer.runs import opened
from trainer import data as trainer_data
from trainer.data import BatchLoader, prefetch, to_tensor


def feed(config, batch_size: int = 2, global_batch: int = 4, **options) -> BatchLoader:
    data = opened(config)
    return BatchLoader(
        data, BatchSchedule(data.spans, 3, batch_size, global_batch), options.pop("dropout", 0.0), **options
    )


def test_tensor_keeps_every_bit_and_is_writable() -> None:
    values = torch.tensor([1.5, -2.25, 3e38, 1e-40]).bfloat16()
    array = Array.from_numpy(values.view(torch.uint16).numpy(), "bfloat16")
    copied = to_tensor(array)
    assert copied.dtype == torch.bfloat16 and torch.equal(copied, values)
    copied[0] = 7
    assert to_tensor(array)[0] == 1.5
    assert torch.equal(
        to_tensor(Array.from_numpy(np.arange(6.0).reshape(2, 3).astype("f4"))), torch.arange(6.0).view(2, 3)
    )


@pytest.mark.parametrize(("kind", "form"), in_turn(["t2i", "i2i", "i2v", "sana"], ["arrow", "webdataset"]))
def test_batches_hold_what_the_shards_hold(make_config, make_set, helpers, kind, form) -> None:
    config = make_config(kind)
    items, null, prompts = helpers.mixed_items(config)
    make_set(config, items, null, prompts, form=form)
    ordered = sorted(items, key=lambda item: item.bucket)
    known_ids, loader = set(), feed(config)
    for step in range(6):
        for part in loader.step(step).micro_batches:
            batch = part.batch
            assert part.noise_BCTHW.shape == batch.latents_BCTHW.shape
            for i, id in enumerate(batch.ids):
                item = ordered[int(id.removeprefix("set1-sample"))]
                known_ids.add(id)
                assert item.bucket == batch.bucket
                assert np.array_equal(batch.latents_BCTHW[i].numpy(), item.latent)
                length = int(batch.text_mask_BL[i].sum())
                assert batch.text_mask_BL[i, :length].all() and not batch.text_BLD[i, length:].any()
                text = batch.text_BLD[i, :length].numpy()
                assert any(np.array_equal(text, caption["embeds"]) for caption in item.texts)
                assert (batch.pooled_BD is None) == (kind == "sana")
                assert (batch.condition_BCTHW is None) == (kind in ("t2i", "sana"))
                if batch.condition_BCTHW is not None:
                    assert np.array_equal(batch.condition_BCTHW[i].numpy(), item.condition)
    assert len(known_ids) == len(items)


def test_bfloat16_sets_are_read(make_config, make_set) -> None:
    config = make_config("t2i")
    make_set(config, dtype="bfloat16")
    batch = feed(config).step(0).micro_batches[0].batch
    assert batch.latents_BCTHW.dtype == torch.float32
    assert torch.equal(batch.latents_BCTHW, batch.latents_BCTHW.bfloat16().float())


def test_ranks_share_the_micro_batches_of_a_step(ready) -> None:
    config = ready("t2i")

    def flat(part) -> list:
        return [part.batch.ids, part.batch.text_BLD.tolist(), part.noise_BCTHW.tolist(), part.uniform_B.tolist()]

    for step, world in enumerate((2, 4, 4)):
        drawing = {"dropout": 0.3, "low_discrepancy": step == 2}
        full = feed(config, 2, 8, **drawing).step(step)
        ranks = [feed(config, 2, 8, **drawing, rank=rank, world=world).step(step) for rank in range(world)]
        assert [len(each.micro_batches) for each in ranks] == [4 // world] * world
        together = [part for parts in zip(*(each.micro_batches for each in ranks), strict=True) for part in parts]
        assert [flat(part) for part in together] == [flat(part) for part in full.micro_batches]
        assert {each.buckets == full.buckets for each in ranks} == {True} and sum(full.buckets.values()) == 4
    uniform = torch.cat([part.uniform_B for part in full.micro_batches])
    assert sorted((uniform * 8).long().tolist()) == list(range(8)), "one draw in each eighth of the last step"


def test_only_a_long_wait_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_data, "SHOW_WAIT_AFTER_S", 60.0)
    steps_read: list[int] = []
    arrive = threading.Event()

    @contextmanager
    def show() -> Iterator[None]:
        steps_read.append(1)
        arrive.set()
        yield
        steps_read.append(-1)

    def read(number: int) -> int:
        assert number < 3 or arrive.wait(60)
        return number

    results = prefetch(read, range(5), depth=1, waiting=show)
    assert [next(results) for _ in range(3)] == [0, 1, 2] and steps_read == []
    monkeypatch.setattr(trainer_data, "SHOW_WAIT_AFTER_S", 0.01)
    assert [*results] == [3, 4] and steps_read == [1, -1]
