"""The order of training is a pure function, fair to every sample, and cheap."""

import time
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.plan import Plan, Span, caption_dropped, caption_number, shuffled

repeats = st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=12))


@st.composite
def spans(draw) -> list[Span]:
    result, start = [], 0
    for number in range(draw(st.integers(1, 4))):
        extra = draw(repeats)
        count = draw(st.integers(1, 12)) if isinstance(extra, int) else len(extra)
        result.append(Span(f"{number}", start, count, extra if isinstance(extra, int) else np.array(extra)))
        start += count
    return result


def expected(plan_spans: list[Span]) -> Counter:
    return Counter(
        {
            span.start + i: 1 + int(np.broadcast_to(span.repeats, span.count)[i])
            for span in plan_spans
            for i in range(span.count)
        }
    )


def epoch_of(plan: Plan, epoch: int) -> list:
    return [plan.batch(epoch * plan.batches_per_epoch + i) for i in range(plan.batches_per_epoch)]


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    assert sorted(shuffled(np.arange(size), size, key).tolist()) == list(range(size))


def test_small_permutations_are_all_reached_and_fair() -> None:
    seen = Counter(tuple(shuffled(np.arange(4), 4, key).tolist()) for key in range(4800))
    assert len(seen) == 24
    chi2 = sum((n - 200) ** 2 / 200 for n in seen.values())
    assert chi2 < 64  # 23 degrees of freedom: one in 100,000


@settings(max_examples=80, deadline=None)
@given(spans(), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 9))
def test_an_epoch_draws_every_sample_once_and_its_repeats(plan_spans, seed, epoch, size) -> None:
    plan = Plan(plan_spans, seed, size)
    batches = epoch_of(plan, epoch)
    drawn = Counter(row for batch in batches for row in batch.rows.tolist())
    surplus = drawn - expected(plan_spans)
    assert not expected(plan_spans) - drawn
    assert surplus.total() == sum(plan.filled.values()) == len(batches) * size - plan.samples
    for batch in batches:
        span = next(span for span in plan_spans if span.bucket == batch.bucket)
        assert ((span.start <= batch.rows) & (batch.rows < span.start + span.count)).all()
        assert len(batch.rows) == size and batch.epoch == epoch


@settings(max_examples=50, deadline=None)
@given(spans(), st.integers(0, 99), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 40))
def test_ranks_share_one_global_batch(plan_spans, seed, world, step) -> None:
    whole = Plan(plan_spans, seed, 12).batch(step)
    parts = [Plan(plan_spans, seed, 12).batch(step).share(rank, world) for rank in range(world)]
    assert {len(part.rows) for _, part in parts} == {12 // world}
    assert np.concatenate([positions for positions, _ in parts]).tolist() == list(range(12))
    assert np.concatenate([part.rows for _, part in parts]).tolist() == whole.rows.tolist()
    assert np.concatenate([part.passes for _, part in parts]).tolist() == whole.passes.tolist()


def test_seeds_and_epochs_differ_and_repeat_themselves() -> None:
    rows = [Span("a", 0, 500)]
    orders = {
        (seed, epoch): tuple(np.concatenate([b.rows for b in epoch_of(Plan(rows, seed, 10), epoch)]).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    again = np.concatenate([b.rows for b in epoch_of(Plan(rows, 1, 10), 1)])
    assert tuple(again.tolist()) == orders[1, 1]


def test_epochs_mix_their_batches_anew() -> None:
    """Not only the order of the batches differs: other samples stand together."""
    plan = Plan([Span("64x64", 0, 40)], 0, 4)
    first, second = ({frozenset(plan.batch(10 * epoch + i).rows.tolist()) for i in range(10)} for epoch in (0, 1))
    assert len(first & second) < 3


def test_buckets_alternate_within_an_epoch() -> None:
    plan = Plan([Span("a", 0, 300), Span("b", 300, 300)], 0, 10)
    names = [batch.bucket for batch in epoch_of(plan, 0)]
    changes = sum(x != y for x, y in pairwise(names))
    assert names.count("a") == names.count("b") == 30 and 15 < changes < 45


def test_leftovers_are_filled_and_short_buckets_named() -> None:
    plan = Plan([Span("wide", 0, 10), Span("tall", 10, 3, 1)], 0, 8)
    assert plan.filled == {"wide": 6, "tall": 2}
    assert [(s.bucket, s.count, s.repeats) for s in plan.shortages] == [("tall", 6, 2)]
    assert Plan([Span("tall", 10, 3, 2)], 0, 8).shortages == []
    last = next(b for b in epoch_of(plan, 0) if b.bucket == "tall")
    assert set(last.rows.tolist()) == {10, 11, 12}
    with pytest.raises(ValueError, match="no samples"):
        Plan([], 0, 8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, 6), st.integers(1, 5), st.integers(0, 999))
def test_every_alternative_is_seen_as_often(count, extra, alternatives, seed) -> None:
    """Over as many passes as there are alternatives (in repeats or epochs), each caption is drawn equally often."""
    plan = Plan([Span("a", 0, count, extra)], seed, 1)
    drawn: dict[int, Counter] = {row: Counter() for row in range(count)}
    for step in range(plan.batches_per_epoch * alternatives):
        batch = plan.batch(step)
        number = caption_number(seed, batch.rows, batch.passes, np.full(1, alternatives))
        drawn[int(batch.rows[0])][int(number[0])] += 1
    for counts in drawn.values():
        assert counts == Counter(dict.fromkeys(range(alternatives), 1 + extra))


def test_first_captions_differ_between_samples() -> None:
    rows = np.arange(4000)
    first = caption_number(3, rows, np.zeros_like(rows), np.full(4000, 4))
    assert np.abs(np.bincount(first) - 1000).max() < 150


def test_dropout_share_and_independence_of_world() -> None:
    flags = np.concatenate([caption_dropped(5, step, np.arange(100), 0.1) for step in range(200)])
    assert abs(flags.mean() - 0.1) < 0.01
    assert not caption_dropped(5, 0, np.arange(1000), 0.0).any()
    assert caption_dropped(5, 0, np.arange(1000), 1.0).all()
    assert (caption_dropped(5, 7, np.arange(3, 9), 0.5) == caption_dropped(5, 7, np.arange(9), 0.5)[3:]).all()


def test_a_billion_samples_cost_nothing() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    plan = Plan([Span("a", 0, 10**9, 1000), Span("b", 10**9, 10**6)], 0, 256)
    steps = [plan.batch(step) for step in (0, 1, 10**9, plan.batches_per_epoch - 1)]
    assert time.perf_counter() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert all(len(set(batch.rows.tolist())) > 250 for batch in steps)


def test_a_million_samples_of_different_repeats() -> None:
    extra = np.arange(10**6, dtype=np.int32) % 3
    began = time.perf_counter()
    plan = Plan([Span("a", 0, 10**6, extra)], 0, 64)
    for step in range(200):
        plan.batch(step)
    assert time.perf_counter() - began < 2
    assert plan.samples == 10**6 + int(extra.sum())
