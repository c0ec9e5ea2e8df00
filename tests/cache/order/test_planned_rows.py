"""Many steps planned at once are the steps one by one, and those of the releases before."""

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.order.schedule import BatchSchedule, Span
from tests.cache.order.test_schedule import BUCKETS, spans

A, B, C = BUCKETS


@pytest.mark.parametrize(
    ("members", "seed", "batch_size", "global_batch", "expected"),
    [
        ([Span(A, 0, 10), Span(B, 10, 3, 1)], 0, 8, 16, "31f56f5b0c527c19"),
        (
            [Span(C, 0, 1000, 2, 0.3), Span(A, 1000, 37), Span(A, 1037, 5, 0, 1.5), Span(B, 2000, 64)],
            *(7, 4, 64, "d1db1c186dc1c080"),
        ),
        (
            [Span(A, 0, 10**9, 1000), Span(A, 10**9, 10**9, 0, 0.3), Span(B, 2 * 10**9, 10**6)],
            *(3, 16, 64, "dccd3024c1155580"),
        ),
        ([Span(A, 0, 3)], 0, 1, 8, "561579fbe18afb78"),
    ],
)
def test_the_order_is_that_of_earlier_releases(members, seed, batch_size, global_batch, expected) -> None:
    """Another order would be noticed by nobody, and runs would resume on other samples."""
    schedule, found = BatchSchedule(members, seed, batch_size, global_batch), xxhash.xxh3_64()
    ranks = [schedule, BatchSchedule(members, seed, batch_size, global_batch)]
    for step in (*range(60), 10**6, 10**8 + 1):
        for rank, own in enumerate(ranks):
            for each in own.step(step, rank, 2):
                values = (each.positions.tolist(), each.rows.tolist(), each.passes.tolist())
                found.update("/".join(map(str, (each.epoch, each.bucket, *values))).encode())
    assert found.hexdigest() == expected


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(spans(), st.integers(0, 99), st.integers(1, 4), st.integers(1, 4), st.integers(0, 50), st.integers(0, 5))
def test_many_steps_are_planned_as_one_by_one(plan_spans, seed, batch_size, count, first, steps) -> None:
    schedule = BatchSchedule(plan_spans, seed, batch_size, batch_size * count)
    names = [bucket.name for bucket in schedule.buckets]
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        epochs, buckets, positions, rows, passes = schedule.plan(first, first + steps, rank, world)
        listed = [each for step in range(first, first + steps) for each in schedule.step(step, rank, world)]
        assert rows.shape == passes.shape == positions.shape == (len(listed), batch_size)
        for number, each in enumerate(listed):
            for columns, column in ((rows, each.rows), (passes, each.passes), (positions, each.positions)):
                assert columns[number].tolist() == column.tolist()
            assert (epochs[number], names[buckets[number]]) == (each.epoch, each.bucket)
