"""The order by sections of shards: the draws of the order over the whole set, and few shards at a time."""

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.order.schedule import BatchSchedule, Span
from cache.order.section_order import order_by_sections
from cache.order.set_columns import IntColumn
from tests.cache.order.test_schedule import BUCKETS, epoch_of, spans

A, B, C = BUCKETS


def column(shards: np.ndarray, chunks: int = 1) -> IntColumn:
    return IntColumn(pa.chunked_array([pa.array(part.astype(np.int32)) for part in np.array_split(shards, chunks)]))


@st.composite
def sharded(draw) -> tuple[list[Span], np.ndarray]:
    """Spans, and the shard of each row: each bucket has shards of its own, which its spans share; rows of a span in
    the order of their shards, or not."""
    members = draw(spans())
    shards = np.zeros(sum(span.count for span in members), np.int64)
    each, ordered = draw(st.integers(1, 5)), draw(st.booleans())
    for span in members:
        row_shards = draw(st.lists(st.integers(0, each - 1), min_size=span.count, max_size=span.count))
        first = each * BUCKETS.index(span.bucket)
        shards[span.start : span.start + span.count] = first + np.array(sorted(row_shards) if ordered else row_shards)
    return members, shards


def by_shards(members, shards, seed, batch_size, global_batch, shuffle_shards) -> BatchSchedule:
    order = order_by_sections(column(shards, 2), shuffle_shards)
    return BatchSchedule(members, seed, batch_size, global_batch, order)


sizes = st.tuples(st.integers(1, 6), st.integers(1, 5))  # batch size, micro-batches of a step
shuffles = st.integers(2, 9)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(sharded(), st.integers(0, 2**40), st.integers(0, 3), sizes, shuffles)
def test_an_epoch_draws_what_the_order_over_the_whole_set_draws(given, seed, epoch, size, shuffle) -> None:
    """The same rows in the same passes, each draw once; extra draws fill a bucket's last micro-batch."""
    (members, shards), (batch_size, count) = given, size
    plan = by_shards(members, shards, seed, batch_size, batch_size * count, shuffle)
    whole_order = BatchSchedule(members, seed, 1, 1)
    buckets = {row: span.bucket for span in members for row in range(span.start, span.start + span.count)}
    row_counts, expected = Counter(), Counter()
    for each in epoch_of(plan, epoch):
        assert {buckets[row] for row in each.rows.tolist()} == {each.bucket}
        row_counts.update(zip(each.rows.tolist(), each.passes.tolist(), strict=True))
    assert set(row_counts.values()) == {1}, "within an epoch no row has a pass twice"
    for each in epoch_of(whole_order, epoch):
        expected.update(zip(each.rows.tolist(), each.passes.tolist(), strict=True))
    fill = sum(bucket.fill for bucket in plan.buckets)
    assert row_counts.total() == expected.total() + fill
    if all((np.diff(shards[span.start : span.start + span.count]) >= 0).all() for span in members):
        assert not expected - row_counts and (row_counts - expected).total() == fill


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(sharded(), st.integers(0, 99), st.sampled_from([1, 2, 3, 6]), shuffles, st.integers(0, 40), st.integers(1, 5))
def test_any_step_of_any_number_of_ranks(given, seed, batch_size, shuffle, first, steps) -> None:
    """A step does not depend on earlier requests for steps, or on the number of ranks."""
    schedule = by_shards(*given, seed, batch_size, 12, shuffle)
    *_, rows, passes = schedule.plan(first, first + steps)
    for step in reversed(range(first, first + steps)):
        fresh = by_shards(*given, seed, batch_size, 12, shuffle)
        for world in (1, 2, 3):
            parts = [fresh.step(step, rank, world) for rank in range(world)]
            found = sorted((each for part in parts for each in part), key=lambda each: each.positions[0])
            assert np.concatenate([each.positions for each in found]).tolist() == list(range(12))
            in_step = slice((step - first) * 12 // batch_size, (step - first + 1) * 12 // batch_size)
            assert [each.rows.tolist() for each in found] == rows[in_step].tolist()
            assert [each.passes.tolist() for each in found] == passes[in_step].tolist()
        assert fresh.step_buckets(step) == Counter(each.bucket for each in found)


def large_set(counts: list[int], rows: int, generations: int = 1) -> tuple[list[Span], np.ndarray]:
    """A bucket for each of `counts`, of two datasets, in shards of this many rows. generations: plans by which the
    samples were added, each with shards of its own."""
    members, shards, start, shard_count = [], [], 0, 0
    rng = np.random.default_rng(0)
    for number, count in enumerate(counts):
        name = f"{64 + 16 * number}x64@1"
        added = rng.integers(0, generations, count)
        row_shards = np.zeros(count, np.int64)
        for each in range(generations):
            at = np.flatnonzero(added == each)
            row_shards[at] = shard_count + np.arange(len(at)) // rows
            shard_count = max(shard_count, int(row_shards.max()) + 1)
        first = rng.permutation(count) < count // 3  # of the first dataset: shards have rows of both
        shards += [row_shards[first], row_shards[~first]]
        members += [Span(name, start, int(first.sum())), Span(name, start + int(first.sum()), int((~first).sum()))]
        start += count
    return members, np.concatenate(shards)


def shards_by_step(plan: BatchSchedule, shards: np.ndarray, steps: int) -> list[set[int]]:
    found = shards[plan.plan(0, steps)[3]].reshape(steps, -1)
    return [set(each.tolist()) for each in found]


@pytest.mark.parametrize(
    ("counts", "rows", "generations", "batch"),
    [
        ([3000, 1500, 700, 300, 120, 31], 25, 1, 20),
        ([2000, 900], 25, 3, 16),
    ],
)
@pytest.mark.parametrize("shuffle", [4, 24])
def test_steps_need_few_shards(counts, rows, generations, batch, shuffle) -> None:
    """The steps of a section need its shards, one more shard of each bucket, and the shards of a shared step. Each
    shard is needed in one section, or in two consecutive sections."""
    members, shards = large_set(counts, rows, generations)
    plan = by_shards(members, shards, 7, 4, batch, shuffle)
    bounds = [0, *itertools.takewhile(lambda step: step <= 2 * int(plan.steps_per_epoch), plan.section_ends(0))]
    needs = shards_by_step(plan, shards, bounds[-1])
    sections = [set.union(set(), *needs[first:last]) for first, last in itertools.pairwise(bounds)]
    more = len(counts) + 2 * (2 + -(-batch // rows))
    assert max(map(len, sections)) <= shuffle + more
    assert sum(map(len, sections)) <= 2 * len(set(shards.tolist())) + more * len(sections)
    whole_shards = shards_by_step(BatchSchedule(members, 7, 4, batch), shards, bounds[-1])
    if shuffle == 4 and batch < rows:
        assert len(set.union(*whole_shards[bounds[1] : bounds[2]])) > 2 * len(sections[1])


@pytest.mark.parametrize("shuffle", [4, 24, 1000])
def test_a_run_begins_with_the_largest_bucket_of_each_class(shuffle) -> None:
    """Also if a section has few shards: they are not the same in another run."""
    members, shards = large_set([300, 200, 900, 150, 120, 310], 25)
    first_sections = set()
    for seed in range(5):
        plan = by_shards(members, shards, seed, 4, 8, shuffle)
        steps = [plan.step_buckets(step) for step in range(next(plan.section_ends(0)))]
        for number, bucket in enumerate(["144x64@1", "112x64@1", "80x64@1"]):
            assert any(bucket in step for step in steps[: number + 1])
        first_sections.add(frozenset(shards[plan.plan(0, len(steps))[3]].ravel().tolist()))
    assert len(first_sections) > 2 or shuffle == 1000


def test_samples_of_a_section_are_mixed() -> None:
    """Micro-batches have samples of most shards of their section; other epochs, seeds and places have other ones."""
    members, shards = large_set([4000], 25)
    plan = by_shards(members, shards, 0, 8, 8, 16)
    epochs = [plan.plan(500 * epoch, 500 * (epoch + 1))[3] for epoch in range(2)]
    mixed = [len(set(shards[rows].tolist())) for rows in epochs[0]]
    assert np.mean(mixed) > 4.9, "8 draws of 8 shards have 5.3 on average"
    first, second = ({frozenset(rows.tolist()) for rows in each} for each in epochs)
    assert len(first & second) < 3
    order = [dict.fromkeys(shards[rows].ravel().tolist()) for rows in epochs]
    assert list(order[0]) != list(order[1]) and list(order[0]) != sorted(order[0])
    assert np.array_equal(np.sort(epochs[0].ravel()), np.arange(4000))


def test_the_digest_says_which_rows_share_a_shard() -> None:
    members, shards = large_set([300, 100], 25)
    found = [
        by_shards(members, each, 0, 2, 4, n).order.digest for each, n in ((shards, 2), (shards, 8), (shards // 2, 2))
    ]
    assert found[0] == found[1] != found[2]
    assert BatchSchedule(members, 0, 2, 4).order.digest is None
