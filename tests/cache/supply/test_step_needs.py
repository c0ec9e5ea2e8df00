"""Which shards the coming steps need; the train.shuffle_shards that is named for a folder of copies fits in it,
whatever the sizes of the shards."""

import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.order.shard_order import ShardOrder
from cache.sets.trainset import TrainSet
from cache.shards.shard_supply import StoredShards, SupplyError
from cache.store.store import Store
from cache.supply import local_cache
from cache.supply.local_cache import Ranks, supply_from_copies
from cache.supply.step_needs import (
    FittingOrder,
    StepNeeds,
    checked_steps,
    explain_order,
    largest_window,
    mean_bytes,
    needed_shards,
    round_up_gb,
)
from schemas.config.training import Train
from tests.cache.sets.small_set import opened
from tests.cache.sets.test_trainset import entry, publish
from tests.forms import long

GB = 10**9
BUCKETS = "32x32", "64x32", "64x64@5"


def test_needs_of_steps() -> None:
    needs = StepNeeds(5)
    for numbers in ({1, 2}, {2}, set(), {3, 1}):
        needs.add(numbers)
    assert (needs.first, needs.end, needs.entries, len(needs)) == (5, 9, 5, 3)
    assert needs.order() == [(5, 1), (5, 2), (8, 3)]
    assert needs.order([3, 9]) == [(4, 9), (4, 3), (5, 1), (5, 2)], "what is read beside the steps is urgent, too"
    assert needs.next_bytes([1, 10, 100, 1000], 1) == 110 and needs.next_bytes([1, 10, 100, 1000], 2, [0]) == 111
    assert needs.finish(6) == [2] and sorted(needs.now) == [] and 2 not in needs and 1 in needs
    assert sorted(needs.finish(20)) == [1, 3] and needs.first == 21
    needs.add({7})  # step 9, which is done
    assert len(needs) == 0 and needs.end == 10


def test_what_every_step_needs_comes_first() -> None:
    needs = StepNeeds(0, always=[4])
    needs.add({1, 4})
    assert needs.order([1]) == [(-1, 4), (-1, 1)] and needs.next_bytes([1] * 5, 1) == 2
    assert needs.finish(0) == [1, 4] and needs.order() == [(0, 4)]


def test_the_bytes_of_steps_in_a_row() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, 20).tolist()
    needs = [{*rng.integers(0, 20, 5).tolist()} for _ in range(30)]
    windows = [needs[first] | needs[first + 1] | needs[first + 2] for first in range(28)]
    assert largest_window(needs, sizes, 3) == max(sum(sizes[i] for i in one) for one in windows) + max(sizes)
    assert largest_window([{3}], sizes, 3) == sizes[3] + max(sizes) and largest_window([], sizes, 3) == max(sizes)
    assert mean_bytes(needs, sizes) == pytest.approx(np.mean([sum(sizes[i] for i in one) for one in needs]))
    assert mean_bytes([], sizes) == 0


def test_what_an_order_over_the_whole_set_asks_for() -> None:
    """100 shards of latents and 200 of texts, 1 GB each, of which a step needs 16: 5 in 6 are not there."""
    said = explain_order("s", 50 * GB, 300 * GB, 16 * GB, 12, 0)
    assert "have 300 GB, and train.local_cache.max_gb is 50" in said
    assert "about 13,333 MB a step, or 13,333 MB/s" in said
    assert said.endswith("Set train.shuffle_shards: 12, or raise max_gb to 300")
    said = explain_order("s", 50 * GB, 300 * GB, 16 * GB, None, 60 * GB)
    assert said.endswith("Raise max_gb to 60 and set train.shuffle_shards: 2, or raise max_gb to 300")
    assert explain_order("s", 50 * GB, 300 * GB, 16 * GB, None, 301 * GB).endswith("one second. Raise max_gb to 300")


@given(st.integers(1, 10**15))
def test_gigabytes_that_are_enough(size: int) -> None:
    """Of three digits, and never fewer bytes: as the options take them."""
    said = round_up_gb(size)
    assert size <= round(float(said) * 1e9) + (size < 1000) and float(said) * 1e9 < 1.0101 * size + 1
    assert len(said.replace(".", "").lstrip("0").partition("e")[0].rstrip("0")) <= 3
    assert (round_up_gb(1_234_000_000), round_up_gb(1_230_000_000), round_up_gb(300 * GB)) == ("1.24", "1.23", "300")


def make_set(name: str, rng: np.random.Generator) -> tuple[TrainSet, list[int]]:
    """A remote set of several buckets, and sizes of its shards: those of texts up to 20 times as large as latents, or
    smaller, with a few large ones."""
    each, text_each = int(rng.integers(2, 12)), int(rng.integers(1, 24))
    counts = rng.integers(each, 16 * each, int(rng.integers(1, 4))).tolist()
    shards, index, texts = list[tuple[str, str]](), list[tuple](), list[tuple]()
    for bucket, count in zip(BUCKETS, counts, strict=False):
        for i in range(count):
            if i % each == 0:
                shards.append((f"latents/f/l{len(shards)}.arrow", "latents"))
            number = len(texts)
            caption = number if rng.random() < 0.8 else int(rng.integers(0, sum(counts)))  # of another sample's shard
            index.append(entry(f"s{number:04}", bucket, (len(shards) - 1, i % each), [caption]))
            texts.append((f"t{number}", number // text_each, number % text_each))
    latents, text_shards = len(shards), -(-len(texts) // text_each)
    shards += [(f"text/f/t{i}.arrow", "text") for i in range(text_shards)]
    texts = [(id, latents + shard, row) for id, shard, row in texts]
    store = Store(f"memory://{name}")
    publish(store, shards, texts, index, null_text=None)
    sizes = rng.lognormal(0, rng.choice([0.1, 1.0]), len(shards)) * 1e6
    sizes[latents:] *= rng.choice([0.2, 1.0, 20.0])
    return opened(store), sizes.astype(int).tolist()


def settings_of(rng: np.random.Generator) -> tuple[Train, Ranks]:
    world = int(rng.choice([1, 1, 2, 4]))
    values = {"batch_size": int(rng.integers(1, 4)), "accumulate": int(rng.integers(1, 4)), "steps": 300}
    values |= {"seed": int(rng.integers(0, 1 << 20)), "reading": {"threads": int(rng.integers(1, 5))}}
    return Train.model_validate(values), Ranks(0, world, int(rng.integers(1, world + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed if seed < 4 else long(seed) for seed in range(10)])
def test_what_is_named_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check accepts it on every rank, there is room for every section and, but for 2, for two in a row; and the
    warning names it."""
    rng = np.random.default_rng(seed)
    data, sizes = make_set(f"fitting{seed}", rng)
    settings, ranks = settings_of(rng)
    steps, ahead = range(int(rng.integers(0, 40)), settings.steps), settings.reading.steps_ahead + 1
    orders, total = FittingOrder(settings, data, steps, ranks.world, sizes, ahead), sum(sizes)
    least = orders.least_bytes()
    assert orders.find(least - 1) is None
    for share in (least, (2 * least + total) // 3, (least + 2 * total) // 3) if least < total else (least,):
        limit, value = ranks.local * share, orders.find(share)
        assert value is not None and value % 2 == 0
        chosen = settings.model_copy(update={"shuffle_shards": value})
        for rank in range(ranks.world):
            assert check(monkeypatch, data, sizes, limit, chosen, steps, ranks._replace(rank=rank)) == []
        found = sections(data, chosen, ranks.world, steps)
        assert max(size_of(sizes, one) for one in found) <= share
        assert value == 2 or max(size_of(sizes, one | other) for one, other in pairwise(found)) <= share
        try:
            warned = check(monkeypatch, data, sizes, limit, settings, steps, ranks)
        except SupplyError:  # the order over the whole set can't be read at all
            continue
        assert [re.findall(r"Set train\.shuffle_shards: (\d+), or", one) for one in warned] == (
            [[str(value)]] if total > limit else []
        )


def sections(data: TrainSet, settings: Train, world: int, steps: range) -> list[set[int]]:
    """The shards that each section needs, and those that the steps between two epochs' sections need: looked up in
    another way than the code does."""
    schedule, found = data.make_schedule(settings, world), list[set[int]]()
    assert isinstance(schedule.order, ShardOrder)
    needs = needed_shards(data, schedule, settings.caption_dropout, steps.start, steps.stop)
    previous = None
    for step, own in zip(steps, needs, strict=True):
        epoch, number = divmod(step * schedule.micro_batches_per_step, schedule.micro_batches_per_epoch)
        section = epoch, int(np.searchsorted(schedule.order.section_bounds(epoch), number, side="right"))
        # What an epoch begins with belongs to the steps that the one before ends with.
        section = section if section[1] else previous or section
        if section != previous:
            found.append(set())
        found[-1].update(own.tolist())
        previous = section
    return found


def size_of(sizes: list[int], shards: set[int]) -> int:
    """With one more."""
    return sum(sizes[number] for number in shards) + max(sizes)


def check(monkeypatch, data: TrainSet, sizes: list[int], limit: int, settings: Train, steps, ranks) -> list[str]:
    """The warnings of the check, where copies of these sizes may have `limit` bytes; SupplyError where refused."""
    shards = [SimpleNamespace(name=f"{number}.arrow", bytes=size) for number, size in enumerate(sizes)]
    copies = SimpleNamespace(shards=shards, folder=SimpleNamespace(limit=limit))
    monkeypatch.setattr(local_cache, "open_copies", lambda *_: copies)
    monkeypatch.setattr(local_cache, "FetchedShards", lambda *_: StoredShards(data.store, data.shard_path))
    warnings = list[str]()
    supply_from_copies(settings, data, data.make_schedule(settings, ranks.world), steps, ranks, warnings.append)
    return warnings


def test_all_of_a_section_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has more steps than are looked at in any case: else a value is named whose first steps fit."""
    shards = [(f"latents/f/l{number}.arrow", "latents") for number in range(20)]
    index = [entry(f"s{i:03}", "32x32", (i // 10, i % 10), [0]) for i in range(200)]
    publish(store := Store("memory://long"), [*shards, ("text/f/t.arrow", "text")], [("t0", 20, 0)], index)
    data, sizes, settings = opened(store), [GB] * 20 + [1], Train(batch_size=1, steps=10**6)
    orders = FittingOrder(settings, data, range(settings.steps), 1, sizes, 3)
    monkeypatch.setattr("cache.supply.step_needs.CHECKED_DRAWS", 2)
    value = orders.find(11 * GB + 1)
    assert value is not None and 6 <= value <= 10
    found = sections(data, settings.model_copy(update={"shuffle_shards": value}), 1, range(200))
    assert max(size_of(sizes, one | other) for one, other in pairwise(found)) <= 11 * GB + 1


def test_the_steps_that_are_looked_at() -> None:
    assert checked_steps(range(5, 100), 4, 40) == range(5, 15)
    assert checked_steps(range(5, 8), 4, 40) == range(5, 8) and checked_steps(range(5, 8), 99, 40) == range(5, 6)
