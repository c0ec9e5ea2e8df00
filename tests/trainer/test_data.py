"""Shards become batches: exact values, padding, randomness by position, a thread that hides nothing."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from cache.order.schedule import BatchSchedule
from cache.shards.tensors import Array
from cache.store.damage import DamageError
from tests.trainer.runs import opened
from trainer import data as trainer_data
from trainer.data import BatchLoader, prefetch
from trainer.reading import to_tensor


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


@pytest.mark.parametrize("form", ["arrow", "webdataset"])
@pytest.mark.parametrize("kind", ["t2i", "i2i", "i2v", "sana"])
def test_batches_hold_what_the_shards_hold(make_config, make_set, made, kind, form) -> None:
    config = make_config(kind)
    items, null, prompts = made.mixed_items(config)
    make_set(config, items, null, prompts, form=form)
    ordered = sorted(items, key=lambda item: item.bucket)
    seen = set()
    for step in range(6):
        for part in feed(config).step(step).micro_batches:
            batch = part.batch
            assert part.noise_BCTHW.shape == batch.latents_BCTHW.shape
            for i, id in enumerate(batch.ids):
                item = ordered[int(id.removeprefix("set1-sample"))]
                seen.add(id)
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
    assert len(seen) == len(items)


def test_bfloat16_sets_are_read(make_config, make_set) -> None:
    config = make_config("t2i")
    make_set(config, dtype="bfloat16")
    batch = feed(config).step(0).micro_batches[0].batch
    assert batch.latents_BCTHW.dtype == torch.float32
    assert torch.equal(batch.latents_BCTHW, batch.latents_BCTHW.bfloat16().float())


def test_dropped_captions_are_the_null_prompt(make_config, make_set, made) -> None:
    config = make_config("t2i")
    items, null, prompts = made.mixed_items(config)
    make_set(config, items, null, prompts)
    batch = feed(config, dropout=1.0).step(0).micro_batches[0].batch
    assert np.array_equal(batch.text_BLD.numpy(), np.stack([null["embeds"]] * 2))
    assert np.array_equal(batch.pooled_BD.numpy(), np.stack([null["pooled"]] * 2))


def test_alternative_captions_take_turns(make_config, make_set, made) -> None:
    """Over two passes a sample with two captions is seen with each; of two samples' captions none is mixed up."""
    config = make_config("t2i")
    items, null, prompts = made.mixed_items(config)
    make_set(config, items, null, prompts)
    ordered, seen = sorted(items, key=lambda item: item.bucket), set()
    passes = feed(config, 4, 4).schedule.micro_batches_per_epoch * 2
    for step in range(passes):
        (part,) = feed(config, 4, 4).step(step).micro_batches
        for id, text_LD, mask_L in zip(part.batch.ids, part.batch.text_BLD, part.batch.text_mask_BL, strict=True):
            number = int(id.removeprefix("set1-sample"))
            texts = [caption["embeds"] for caption in ordered[number].texts]
            which = [np.array_equal(text_LD[mask_L].numpy(), text) for text in texts]
            assert sum(which) == 1
            seen.add((number, which.index(True)))
    assert seen == {(number, i) for number, item in enumerate(ordered) for i in range(len(item.texts))}


def test_weights_are_followed_and_held_out_samples_never_drawn(make_config, make_set, made) -> None:
    """Over two epochs: every other epoch at 0.5, three times at 1.5, once an epoch else."""
    config = make_config("t2i")
    items, null, prompts = made.mixed_items(config)
    weights = [0.5, 1.0, 1.5, 1.0] * 3
    roles = ["train"] * 8 + ["eval"] * 4
    items = [
        replace(item, bucket="64x64", latent=items[0].latent, weight=weight, role=role)
        for item, weight, role in zip(items, weights, roles, strict=True)
    ]
    make_set(config, items, null, prompts)
    reader = feed(config, 1, 1)
    drawn = Counter(
        reader.step(step).micro_batches[0].batch.ids[0] for step in range(2 * reader.schedule.micro_batches_per_epoch)
    )
    ordered = sorted(items, key=lambda item: item.place)
    assert drawn == {f"set1-sample{i}": int(2 * item.weight) for i, item in enumerate(ordered) if item.role == "train"}
    assert len(reader.data) == 8 and len(reader.data.eval_rows) == 4


def test_ranks_share_the_micro_batches_of_a_step(make_config, make_set) -> None:
    config = make_config("t2i")
    make_set(config)

    def flat(part) -> list:
        return [part.batch.ids, part.batch.text_BLD.tolist(), part.noise_BCTHW.tolist(), part.uniform_B.tolist()]

    for step, world in enumerate((2, 4, 4)):
        drawing = {"dropout": 0.3, "low_discrepancy": step == 2}
        whole = feed(config, 2, 8, **drawing).step(step)
        ranks = [feed(config, 2, 8, **drawing, rank=rank, world=world).step(step) for rank in range(world)]
        assert [len(each.micro_batches) for each in ranks] == [4 // world] * world
        together = [part for parts in zip(*(each.micro_batches for each in ranks), strict=True) for part in parts]
        assert [flat(part) for part in together] == [flat(part) for part in whole.micro_batches]
        assert {each.buckets == whole.buckets for each in ranks} == {True} and sum(whole.buckets.values()) == 4
    uniform = torch.cat([part.uniform_B for part in whole.micro_batches])
    assert sorted((uniform * 8).long().tolist()) == list(range(8)), "one draw in each eighth of the last step"


@pytest.mark.slow
def test_reading_ahead_keeps_order_and_is_bounded() -> None:
    asked: list[int] = []

    def read(number: int) -> int:
        asked.append(number)
        return number * number

    results = prefetch(read, range(3, 50), depth=2)
    assert next(results) == 9
    time.sleep(0.3)
    assert len(asked) <= 4
    assert list(results) == [n * n for n in range(4, 50)]


def test_an_error_in_the_thread_arrives_at_its_place() -> None:
    def read(number: int) -> int:
        if number == 2:
            raise DamageError("x/latents/f/u.arrow", "its checksum does not match", 2, "id")
        return number

    results = prefetch(read, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(DamageError):
        next(results)


def test_only_a_long_wait_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_data, "SAID_S", 60.0)
    shown: list[int] = []
    arrive = threading.Event()

    @contextmanager
    def show() -> Iterator[None]:
        shown.append(1)
        arrive.set()
        yield
        shown.append(-1)

    def read(number: int) -> int:
        assert number < 3 or arrive.wait(60)
        return number

    results = prefetch(read, range(5), depth=1, waiting=show)
    assert [next(results) for _ in range(3)] == [0, 1, 2] and shown == []
    monkeypatch.setattr(trainer_data, "SAID_S", 0.01)
    assert [*results] == [3, 4] and shown == [1, -1]
