"""The order of training is a pure function, fair to every sample, and cheap."""

import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.schedule import (
    BatchSchedule,
    BucketDraws,
    GlobalBatch,
    Span,
    choose_captions,
    draw_caption_dropout,
    permute,
    small_bucket_advice,
)

weights = st.one_of(st.just(1.0), st.sampled_from([0.1, 0.3, 0.5, 1.5, 2.25, 1e-4]), st.floats(0.01, 3))


@st.composite
def spans(draw, weight=weights) -> list[Span]:
    """Up to five spans in up to three buckets, in any order."""
    result, start = [], 0
    for _ in range(draw(st.integers(1, 5))):
        count, bucket = draw(st.integers(1, 12)), draw(st.sampled_from("abc"))
        result.append(Span(bucket, start, count, draw(st.integers(0, 3)), draw(weight)))
        start += count
    return result


def rows_of(bucket: str, plan_spans: list[Span]) -> set[int]:
    return {span.start + i for span in plan_spans if span.bucket == bucket for i in range(span.count)}


def draws_of(plan: BatchSchedule) -> int:
    return sum(bucket.draws for bucket in plan.buckets)


def short_of(plan: BatchSchedule) -> list[tuple[str, int]]:
    """Name and number of distinct samples of each small bucket."""
    return [(bucket.name, bucket.distinct) for bucket in plan.small_buckets]


def epoch_of(plan: BatchSchedule, epoch: int) -> list:
    return [plan.batch(epoch * plan.batches_per_epoch + i) for i in range(plan.batches_per_epoch)]


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@pytest.mark.slow
def test_small_permutations_are_all_reached_and_fair() -> None:
    seen = Counter(tuple(permute(np.arange(4), 4, key).tolist()) for key in range(1200))
    assert len(seen) == 24
    chi2 = sum((n - 50) ** 2 / 50 for n in seen.values())
    assert chi2 < 64  # 23 degrees of freedom: one in 100,000


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(spans(weight=st.sampled_from([1.0, 2.0, 3.0])), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 9))
def test_an_epoch_draws_every_sample_once_and_its_repeats(plan_spans, seed, epoch, size) -> None:
    """Where weights are whole numbers: exactly, in every epoch; what is over fills last batches."""
    plan = BatchSchedule(plan_spans, seed, size)
    batches = epoch_of(plan, epoch)
    drawn = Counter(row for batch in batches for row in batch.rows.tolist())
    wanted = Counter()
    for span in plan_spans:
        wanted.update({span.start + i: (1 + span.repeats) * int(span.weight) for i in range(span.count)})
    surplus = drawn - wanted
    assert not wanted - drawn
    assert surplus.total() == sum(bucket.fill for bucket in plan.buckets) == len(batches) * size - draws_of(plan)
    for batch in batches:
        assert set(batch.rows.tolist()) <= rows_of(batch.bucket, plan_spans)
        assert len(batch.rows) == size and batch.epoch == epoch


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(spans(), st.integers(0, 2**40), st.integers(1, 4))
def test_over_the_epochs_every_row_is_drawn_its_share(plan_spans, seed, epochs) -> None:
    """Floor or ceil of E d / n times, the passes of a row counting up from 0 without a gap."""
    plan = BatchSchedule(plan_spans, seed, 1)  # nothing to fill
    passes: dict[int, list[int]] = {}
    for step in range(epochs * plan.batches_per_epoch):
        batch = plan.batch(step)
        passes.setdefault(int(batch.rows[0]), []).append(int(batch.passes[0]))
    for span in plan_spans:
        share = Fraction(epochs * span.draws, span.count)
        for row in range(span.start, span.start + span.count):
            seen = passes.get(row, [])
            assert len(seen) in (floor(share), ceil(share))
            assert sorted(seen) == list(range(len(seen)))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(spans(), st.integers(0, 99), st.integers(0, 4), st.integers(1, 40))
def test_within_an_epoch_no_row_has_a_pass_twice(plan_spans, seed, epoch, size) -> None:
    """Fill included: a sample with enough captions shows another one each time."""
    for bucket in "abc":
        drawn = [batch for batch in epoch_of(BatchSchedule(plan_spans, seed, size), epoch) if batch.bucket == bucket]
        pairs = [pair for batch in drawn for pair in zip(batch.rows.tolist(), batch.passes.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs)


@given(st.integers(1, 10**7), st.integers(0, 1000), st.decimals("0.0001", "1000", places=4))
def test_draws_are_rounded_from_the_exact_product(count, extra, weight) -> None:
    exact = weight * count * (1 + extra)
    rounded = int(exact.quantize(Decimal(1), ROUND_HALF_UP))
    assert Span("a", 0, count, extra, float(weight)).draws == max(1, rounded)


def test_weights_in_words() -> None:
    """0.5: every row every other epoch; 1.5: once and twice in turn; of two datasets in one bucket both are drawn."""
    plan = BatchSchedule([Span("a", 0, 10, 0, 0.5), Span("a", 10, 4, 0, 1.5)], 0, 11)
    epochs = [Counter(row for batch in epoch_of(plan, epoch) for row in batch.rows.tolist()) for epoch in range(4)]
    assert not any(bucket.fill for bucket in plan.buckets) and plan.batches_per_epoch == 1
    for first, second in ((epochs[0], epochs[1]), (epochs[2], epochs[3])):
        assert {first[row] + second[row] for row in range(10)} == {1}
        assert [first[row] + second[row] for row in range(10, 14)] == [3, 3, 3, 3]
    assert epochs[0] == epochs[2] != epochs[1]


@settings(max_examples=25, deadline=None)
@given(spans(), st.integers(0, 99), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 40))
def test_ranks_share_one_global_batch(plan_spans, seed, world, step) -> None:
    whole = BatchSchedule(plan_spans, seed, 12).batch(step)
    parts = [BatchSchedule(plan_spans, seed, 12).batch(step).for_rank(rank, world) for rank in range(world)]
    assert {len(part.rows) for _, part in parts} == {12 // world}
    assert np.concatenate([positions for positions, _ in parts]).tolist() == list(range(12))
    assert np.concatenate([part.rows for _, part in parts]).tolist() == whole.rows.tolist()
    assert np.concatenate([part.passes for _, part in parts]).tolist() == whole.passes.tolist()


def test_seeds_and_epochs_differ_and_repeat_themselves() -> None:
    rows = [Span("a", 0, 500)]
    orders = {
        (seed, epoch): tuple(np.concatenate([b.rows for b in epoch_of(BatchSchedule(rows, seed, 10), epoch)]).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    again = np.concatenate([b.rows for b in epoch_of(BatchSchedule(rows, 1, 10), 1)])
    assert tuple(again.tolist()) == orders[1, 1]


def test_epochs_mix_their_batches_anew() -> None:
    """Not only the order of the batches differs: other samples stand together."""
    plan = BatchSchedule([Span("64x64", 0, 40)], 0, 4)
    first, second = ({frozenset(plan.batch(10 * epoch + i).rows.tolist()) for i in range(10)} for epoch in (0, 1))
    assert len(first & second) < 3


def test_buckets_alternate_within_an_epoch() -> None:
    plan = BatchSchedule([Span("a", 0, 300), Span("b", 300, 300)], 0, 10)
    names = [batch.bucket for batch in epoch_of(plan, 0)]
    changes = sum(x != y for x, y in pairwise(names))
    assert names.count("a") == names.count("b") == 30 and 15 < changes < 45


def test_leftovers_are_filled_and_short_buckets_named() -> None:
    plan = BatchSchedule([Span("wide", 0, 10), Span("tall", 10, 3, 1)], 0, 8)
    assert {bucket.name: bucket.fill for bucket in plan.buckets if bucket.fill} == {"wide": 6, "tall": 2}
    assert plan.buckets == [BucketDraws("wide", 10, 10, 10, 6), BucketDraws("tall", 3, 3, 6, 2)]
    assert short_of(plan) == [("tall", 3)]
    assert short_of(BatchSchedule([Span("tall", 10, 3, 200)], 0, 8)) == [("tall", 3)], "repeats add no samples"
    assert short_of(BatchSchedule([Span("tall", 0, 20, 0, 0.1)], 0, 8)) == [("tall", 2)], "of 20, an epoch draws 2"
    last = next(b for b in epoch_of(plan, 0) if b.bucket == "tall")
    assert set(last.rows.tolist()) == {10, 11, 12}
    with pytest.raises(ValueError, match="no samples"):
        BatchSchedule([], 0, 8)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_the_remedy_for_short_buckets_cures_them(counts, batch_size, accumulate, world) -> None:
    """With the named settings nothing is warned of and no step has a sample twice; repeats change neither."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    spans = [Span(f"b{i}", start, count) for i, (start, count) in enumerate(zip(starts, counts, strict=True))]
    plan = BatchSchedule(spans, 0, batch_size * accumulate * world)
    for short in plan.small_buckets:
        assert any(twice(batch) for batch in epoch_of(plan, 0) if batch.bucket == short.name)
    if not plan.small_buckets:
        return
    repeated = [replace(span, repeats=plan.global_batch) for span in spans]
    assert short_of(BatchSchedule(repeated, 0, plan.global_batch)) == short_of(plan)
    said = small_bucket_advice(plan.small_buckets, batch_size, world)
    accumulate = int(re.search(r"train\.accumulate: (\d+)", said)[1])
    batch_size = int(found[1]) if (found := re.search(r"train\.batch_size: (\d+)", said)) else batch_size
    world = int(found[1]) if (found := re.search(r"(\d+) processes", said)) else world
    cured = BatchSchedule(spans, 0, batch_size * accumulate * world)
    assert not cured.small_buckets and not any(twice(batch) for batch in epoch_of(cured, 0))


def twice(batch: GlobalBatch) -> bool:
    return len(set(batch.rows.tolist())) < len(batch.rows)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(0, 6), st.integers(1, 5), st.integers(0, 999))
def test_every_alternative_is_seen_as_often(count, extra, alternatives, seed) -> None:
    """Over as many passes as there are alternatives (in repeats or epochs), each caption is drawn equally often."""
    plan = BatchSchedule([Span("a", 0, count, extra)], seed, 1)
    drawn: dict[int, Counter] = {row: Counter() for row in range(count)}
    for step in range(plan.batches_per_epoch * alternatives):
        batch = plan.batch(step)
        number = choose_captions(seed, batch.rows, batch.passes, np.full(1, alternatives))
        drawn[int(batch.rows[0])][int(number[0])] += 1
    for counts in drawn.values():
        assert counts == Counter(dict.fromkeys(range(alternatives), 1 + extra))


def test_first_captions_differ_between_samples() -> None:
    rows = np.arange(4000)
    first = choose_captions(3, rows, np.zeros_like(rows), np.full(4000, 4))
    assert np.abs(np.bincount(first) - 1000).max() < 150


def test_dropout_share_and_independence_of_world() -> None:
    flags = np.concatenate([draw_caption_dropout(5, step, np.arange(100), 0.1) for step in range(200)])
    assert abs(flags.mean() - 0.1) < 0.01
    assert not draw_caption_dropout(5, 0, np.arange(1000), 0.0).any()
    assert draw_caption_dropout(5, 0, np.arange(1000), 1.0).all()
    assert (draw_caption_dropout(5, 7, np.arange(3, 9), 0.5) == draw_caption_dropout(5, 7, np.arange(9), 0.5)[3:]).all()


def test_a_billion_samples_cost_nothing() -> None:
    tracemalloc.start()
    plan = BatchSchedule(
        [Span("a", 0, 10**9, 1000), Span("a", 10**9, 10**9, 0, 0.3), Span("b", 2 * 10**9, 10**6)], 0, 256
    )
    steps = [plan.batch(step) for step in (0, 1, 10**9, plan.batches_per_epoch - 1)]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert all(len(set(batch.rows.tolist())) > 250 for batch in steps)
    assert draws_of(plan) == 1001 * 10**9 + 3 * 10**8 + 10**6


@pytest.mark.slow
def test_many_datasets_in_one_bucket() -> None:
    """Ten thousand of a hundred samples each, of unlike weights."""
    members = [Span("a", 100 * i, 100, i % 3, (1.0, 0.5, 0.25, 1.75)[i % 4]) for i in range(10_000)]
    plan = BatchSchedule(members, 0, 64)
    drawn = Counter(int(row) // 100 % 12 for step in range(400) for row in plan.batch(step).rows)
    shares = np.array([members[i].draws for i in range(12)])
    assert draws_of(plan) == shares.sum() * (10_000 // 12) + sum(span.draws for span in members[9996:])
    found = np.array([drawn[i] for i in range(12)])
    assert np.abs(found / found.sum() - shares / shares.sum()).max() < 0.01
