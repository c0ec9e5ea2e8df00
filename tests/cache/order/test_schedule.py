"""The order of training is a pure function, fair to every sample, and cheap."""

import tracemalloc
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.order.schedule import (
    BatchSchedule,
    BucketDraws,
    MicroBatchRows,
    Span,
)
from cache.sets.trainset import choose_captions, draw_caption_dropout

BUCKETS = ("64x64@1", "64x96@1", "640x640@5")
A, B, C = BUCKETS
weights = st.one_of(st.just(1.0), st.sampled_from([0.1, 0.3, 0.5, 1.5, 2.25, 1e-4]), st.floats(0.01, 3))


@st.composite
def spans(draw, weight=weights) -> list[Span]:
    """Up to five spans in up to three buckets, in any order."""
    result, start = [], 0
    for _ in range(draw(st.integers(1, 5))):
        count, bucket = draw(st.integers(1, 12)), draw(st.sampled_from(BUCKETS))
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


def epoch_of(plan: BatchSchedule, epoch: int) -> list[MicroBatchRows]:
    """The micro-batches of an epoch, which may begin and end within a step."""
    count, size = plan.micro_batches_per_epoch, plan.micro_batches_per_step
    first, last = epoch * count, (epoch + 1) * count
    listed = [each for step in range(first // size, -(-last // size)) for each in plan.step(step)]
    found = listed[first % size :][:count]
    assert {each.epoch for each in found} == {epoch}
    return found


def micro_batch(plan: BatchSchedule, number: int) -> MicroBatchRows:
    """Number `number` of a schedule of one micro-batch a step."""
    [found] = plan.step(number)
    return found


@settings(max_examples=20)
@given(spans(), st.integers(0, 40), st.integers(0, 12))
def test_an_order_may_begin_with_a_later_step(members: list[Span], begun: int, step: int) -> None:
    plan, moved = (BatchSchedule(members, 7, 2, 4) for _ in range(2))
    moved.step(step)  # they are not the steps of the order that begins later
    moved.first_step = begun
    assert moved.step_buckets(begun + step) == plan.step_buckets(step)
    for one, other in zip(moved.step(begun + step, 1, 2), plan.step(step, 1, 2), strict=True):
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))
    ranges = moved.plan(begun + step, begun + step + 3), plan.plan(step, step + 3)
    assert all(map(np.array_equal, *ranges))


sizes = st.tuples(st.integers(1, 9), st.integers(1, 6))  # batch size, micro-batches of a step


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(spans(weight=st.sampled_from([1.0, 2.0, 3.0])), st.integers(0, 2**40), st.integers(0, 5), sizes)
def test_an_epoch_draws_every_sample_once_and_its_repeats(plan_spans, seed, epoch, size) -> None:
    """Exactly, in every epoch, if weights are whole numbers; extra draws fill a bucket's last micro-batch."""
    batch_size, count = size
    plan = BatchSchedule(plan_spans, seed, batch_size, batch_size * count)
    batches = epoch_of(plan, epoch)
    row_counts = Counter(row for batch in batches for row in batch.rows.tolist())
    expected = Counter()
    for span in plan_spans:
        expected.update({span.start + i: (1 + span.repeats) * int(span.weight) for i in range(span.count)})
    surplus = row_counts - expected
    assert not expected - row_counts
    assert surplus.total() == sum(bucket.fill for bucket in plan.buckets)
    assert all(bucket.fill < batch_size for bucket in plan.buckets)
    for batch in batches:
        assert set(batch.rows.tolist()) <= rows_of(batch.bucket, plan_spans)
        assert len(batch.rows) == batch_size


@pytest.mark.slow
@given(spans(), st.integers(0, 99), st.integers(0, 4), st.integers(1, 40))
def test_within_an_epoch_no_row_has_a_pass_twice(plan_spans, seed, epoch, size) -> None:
    """Fill included: a sample with enough captions shows another one each time."""
    batches = epoch_of(BatchSchedule(plan_spans, seed, size, size), epoch)
    for bucket in BUCKETS:
        own_batches = [batch for batch in batches if batch.bucket == bucket]
        pairs = [pair for batch in own_batches for pair in zip(batch.rows.tolist(), batch.passes.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs)


@given(st.integers(1, 10**7), st.integers(0, 1000), st.decimals("0.0001", "1000", places=4))
def test_draws_are_rounded_from_the_exact_product(count, extra, weight) -> None:
    exact = weight * count * (1 + extra)
    rounded = int(exact.quantize(Decimal(1), ROUND_HALF_UP))
    assert Span("a", 0, count, extra, float(weight)).draws == max(1, rounded)


def test_weights_in_words() -> None:
    """0.5: every row every other epoch; 1.5: once and twice in turn; of two datasets in one bucket both are drawn."""
    plan = BatchSchedule([Span(A, 0, 10, 0, 0.5), Span(A, 10, 4, 0, 1.5)], 0, 11, 11)
    epochs = [Counter(row for batch in epoch_of(plan, epoch) for row in batch.rows.tolist()) for epoch in range(4)]
    assert not any(bucket.fill for bucket in plan.buckets) and plan.steps_per_epoch == 1
    for first, second in ((epochs[0], epochs[1]), (epochs[2], epochs[3])):
        assert {first[row] + second[row] for row in range(10)} == {1}
        assert [first[row] + second[row] for row in range(10, 14)] == [3, 3, 3, 3]
    assert epochs[0] == epochs[2] != epochs[1]


@pytest.mark.slow
@given(spans(), st.integers(0, 99), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 40))
def test_positions_count_through_a_step(plan_spans, seed, batch_size, step) -> None:
    """Any number of ranks shares them: rank r takes numbers r, r + R, ... of the list."""
    schedule = BatchSchedule(plan_spans, seed, batch_size, 12)
    found = schedule.step(step)
    assert len(found) == 12 // batch_size
    for other in (schedule, BatchSchedule(plan_spans, seed, batch_size, 12)):  # whatever was asked for before
        other.step(step + 3)
        for one, expected_batch in zip(other.step(step), found, strict=True):
            assert one.rows.tolist() == expected_batch.rows.tolist()
            assert one.passes.tolist() == expected_batch.passes.tolist()
    assert np.concatenate([each.positions for each in found]).tolist() == list(range(12))
    plan = BatchSchedule(plan_spans, seed, batch_size, 12)
    for world in (each for each in (1, 2, 3, 4) if plan.micro_batches_per_step % each == 0):
        parts = [plan.step(step, rank, world) for rank in range(world)]
        together = [each for row in zip(*parts, strict=True) for each in row]
        assert [each.rows.tolist() for each in together] == [each.rows.tolist() for each in found]
        assert [each.positions.tolist() for each in together] == [each.positions.tolist() for each in found]
    assert plan.step_buckets(step) == Counter(each.bucket for each in found)
    with pytest.raises(ValueError, match="can't be divided"):
        BatchSchedule(plan_spans, seed, 5, 12)


@pytest.mark.slow
@given(spans(), st.integers(0, 99), st.integers(1, 4), st.sampled_from([2, 3, 4]), st.integers(0, 3))
def test_a_step_is_of_one_bucket_or_of_neighbours_in_cost(plan_spans, seed, batch_size, count, epoch) -> None:
    """At most one step of an epoch begins or ends in each bucket's list without being of that bucket alone."""
    plan = BatchSchedule(plan_spans, seed, batch_size, batch_size * count)
    per_epoch = plan.micro_batches_per_epoch
    costs = {bucket: number // 2 for number, bucket in enumerate(BUCKETS)}  # the first two are alike, the third is not
    first, last = epoch * per_epoch, (epoch + 1) * per_epoch
    mixed = 0
    for step in range(-(-first // count), last // count):  # whole steps of this epoch
        found = [costs[each.bucket] for each in plan.step(step)]
        assert found == sorted(found, reverse=epoch % 2 == 0)
        mixed += len({each.bucket for each in plan.step(step)}) > 1
    assert mixed <= len(plan.buckets) - 1
    ends = plan.step(last // count)  # perhaps of two epochs, whose neighbors are alike
    order = [costs[each.bucket] for each in ends if each.epoch in (epoch, epoch + 1)]
    changes = sum(x != y for x, y in pairwise(order))
    assert changes <= 2


#: Cost classes by pixels: 1024x1024 and 832x1216 are of one class, as are 512x512 and 512x512 with a small reference.
LEADING = ("512x512@9", "1024x1024@1", "512x768@1", "512x512@1+64x64", "256x256@1")
MANY_BUCKETS = (*LEADING, "832x1216@1", "512x512@1", "256x240@1")


@pytest.mark.slow
@given(
    st.permutations(MANY_BUCKETS),
    st.lists(st.integers(1, 90), min_size=8, max_size=8),
    st.integers(0, 2**40),
    sizes,
    st.integers(0, 7),
)
def test_a_run_begins_with_the_largest_bucket_of_each_class(names, counts, seed, size, begun) -> None:
    """From the most expensive class to the cheapest. Steps of the first epoch only: a bucket may be only in the step
    that ends the epoch and begins the second."""
    (batch_size, count), starts = size, np.cumsum([0, *counts])[:-1].tolist()
    members = [Span(name, start, number) for name, start, number in zip(names, starts, counts, strict=True)]
    plan = BatchSchedule(members, seed, batch_size, batch_size * count)
    plan.first_step = begun  # a run on new data
    steps = [plan.step_buckets(begun + step) for step in range(plan.micro_batches_per_epoch // count)]
    if count == 1:
        assert [*map(set, steps[: len(LEADING)])] == [{bucket} for bucket in LEADING]
    for number, bucket in enumerate(LEADING):
        found = [step for step, buckets in enumerate(steps) if bucket in buckets]
        assert not found or found[0] <= number


def test_the_steps_after_the_first_ones_are_mixed() -> None:
    members = [Span("512x512@1", 0, 500), Span("256x256@1", 500, 500)]
    orders = [BatchSchedule(members, seed, 1, 1).plan(0, 1000)[1] for seed in range(9)]
    assert {tuple(order[:2].tolist()) for order in orders} == {(0, 1)}
    assert len({tuple(order[2:10].tolist()) for order in orders}) == 9
    assert all(200 < order[:500].sum() < 300 and order.sum() == 500 for order in orders)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_begins_with_the_largest_bucket(world) -> None:
    members = [Span("256x256@1", 0, 400), Span("1024x1024@1", 400, 9), Span("512x512@1", 409, 40)]
    for seed in range(8):
        plan = BatchSchedule(members, seed, 1, 4)
        for step, bucket in enumerate(["1024x1024@1", "512x512@1", "256x256@1"]):
            parts = [plan.step(step, rank, world) for rank in range(world)]
            assert [len(part) for part in parts] == [4 // world] * world
            assert bucket in {each.bucket for part in parts for each in part}
            if step == 0:
                assert {each.bucket for part in parts for each in part} == {bucket}


def test_small_collections_repeat_nothing() -> None:
    """Eight photos in six buckets, in steps of four: two steps show each photo once."""
    counts = {"640x448@1": 2, "448x640@1": 2, "512x512@1": 1, "576x448@1": 1, "448x576@1": 1, "704x384@1": 1}
    starts = np.cumsum([0, *counts.values()])
    spans = [Span(name, int(start), count) for (name, count), start in zip(counts.items(), starts, strict=False)]
    plan = BatchSchedule(spans, 0, 1, 4)
    assert plan.steps_per_epoch == 2 and not plan.small_buckets
    together = set()
    for epoch in range(20):
        steps = [plan.step(2 * epoch + number) for number in range(2)]
        assert sorted(int(each.rows[0]) for step in steps for each in step) == list(range(8))
        together |= {frozenset(int(each.rows[0]) for each in step) for step in steps}
    assert len(together) > 10, "other photos are together in other epochs"


def test_an_epoch_may_end_within_a_step() -> None:
    plan = BatchSchedule([Span(A, 0, 3)], 0, 1, 2)
    assert plan.steps_per_epoch == 1.5
    listed = [each for step in range(3) for each in plan.step(step)]
    assert [each.epoch for each in listed] == [0, 0, 0, 1, 1, 1]
    for epoch in (listed[:3], listed[3:]):
        assert sorted(int(each.rows[0]) for each in epoch) == [0, 1, 2]
    long_steps = BatchSchedule([Span(A, 0, 3)], 0, 1, 8)  # a step of more than two epochs
    assert [each.epoch for each in long_steps.step(0)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert Counter(int(each.rows[0]) for number in range(3) for each in long_steps.step(number)) == {0: 8, 1: 8, 2: 8}


def test_leftovers_are_filled_and_short_buckets_named() -> None:
    plan = BatchSchedule([Span(A, 0, 10), Span(B, 10, 3, 1)], 0, 8, 16)
    assert plan.buckets == [BucketDraws(A, 10, 10, 10, 6), BucketDraws(B, 3, 3, 6, 2)]
    assert short_of(plan) == [(B, 3)]
    assert short_of(BatchSchedule([Span(B, 10, 3, 200)], 0, 8, 8)) == [(B, 3)], "repeats add no samples"
    assert short_of(BatchSchedule([Span(B, 0, 20, 0, 0.1)], 0, 8, 8)) == [(B, 2)], "of 20, an epoch draws 2"
    last = next(each for each in epoch_of(plan, 0) if each.bucket == B)
    assert set(last.rows.tolist()) == {10, 11, 12}
    with pytest.raises(ValueError, match="no samples"):
        BatchSchedule([], 0, 8, 8)


@pytest.mark.slow
@given(st.integers(1, 7), st.integers(0, 6), st.integers(1, 5), st.integers(0, 999))
def test_every_alternative_is_seen_as_often(count, extra, alternatives, seed) -> None:
    """Over as many passes as there are alternatives (in repeats or epochs), each caption is drawn equally often."""
    plan = BatchSchedule([Span(A, 0, count, extra)], seed, 1, 1)
    row_counts: dict[int, Counter] = {row: Counter() for row in range(count)}
    for number in range(plan.micro_batches_per_epoch * alternatives):
        batch = micro_batch(plan, number)
        number = choose_captions(seed, batch.rows, batch.passes, np.full(1, alternatives))
        row_counts[int(batch.rows[0])][int(number[0])] += 1
    for counts in row_counts.values():
        assert counts == Counter(dict.fromkeys(range(alternatives), 1 + extra))


def test_dropout_share_and_independence_of_world() -> None:
    flags = np.concatenate([draw_caption_dropout(5, step, np.arange(100), 0.1) for step in range(200)])
    assert abs(flags.mean() - 0.1) < 0.01
    assert not draw_caption_dropout(5, 0, np.arange(1000), 0.0).any()
    assert draw_caption_dropout(5, 0, np.arange(1000), 1.0).all()
    assert (draw_caption_dropout(5, 7, np.arange(3, 9), 0.5) == draw_caption_dropout(5, 7, np.arange(9), 0.5)[3:]).all()


def test_a_billion_samples_cost_nothing() -> None:
    tracemalloc.start()
    members = [Span(A, 0, 10**9, 1000), Span(A, 10**9, 10**9, 0, 0.3), Span(B, 2 * 10**9, 10**6)]
    plan = BatchSchedule(members, 0, 64, 256)
    steps = [plan.step(step) for step in (0, 1, 10**9, int(plan.steps_per_epoch) - 1)]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert all(len({row for each in found for row in each.rows.tolist()}) > 250 for found in steps)
    assert draws_of(plan) == 1001 * 10**9 + 3 * 10**8 + 10**6


@pytest.mark.parametrize(
    ("members", "seed", "batch_size", "global_batch", "expected"),
    [
        ([Span(A, 0, 10), Span(B, 10, 3, 1)], 0, 8, 16, "206c7b155c91f462"),
        (
            [Span(C, 0, 1000, 2, 0.3), Span(A, 1000, 37), Span(A, 1037, 5, 0, 1.5), Span(B, 2000, 64)],
            *(7, 4, 64, "a68b782dddf9a27b"),
        ),
        (
            [Span(A, 0, 10**9, 1000), Span(A, 10**9, 10**9, 0, 0.3), Span(B, 2 * 10**9, 10**6)],
            *(3, 16, 64, "e98be755f3ebfb22"),
        ),
        ([Span(A, 0, 3)], 0, 1, 8, "561579fbe18afb78"),
    ],
)
def test_the_order_is_that_of_earlier_releases(members, seed, batch_size, global_batch, expected) -> None:
    """Another order would be noticed by nobody, and runs would resume on other samples."""
    schedule, found = BatchSchedule(members, seed, batch_size, global_batch), xxhash.xxh3_64()
    ranks = [schedule, BatchSchedule(members, seed, batch_size, global_batch)]
    for step in (*range(60), 10**6, 10**8 + 1):
        for rank, rank_schedule in enumerate(ranks):
            for each in rank_schedule.step(step, rank, 2):
                values = (each.positions.tolist(), each.rows.tolist(), each.passes.tolist())
                found.update("/".join(map(str, (each.epoch, each.bucket, *values))).encode())
    assert found.hexdigest() == expected
