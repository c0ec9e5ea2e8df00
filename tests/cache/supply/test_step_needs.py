"""Which shards the coming steps need."""

from itertools import pairwise

from cache.supply.step_needs import StepNeeds


def test_needs_of_steps() -> None:
    needs = StepNeeds(5)
    for numbers in ({1, 2}, {2}, set(), {3, 1}):
        needs.add(numbers)
    assert (needs.first, needs.end, needs.entries, sorted(needs)) == (5, 9, 5, [1, 2, 3])
    assert [needs.next_need(number) for number in (1, 2, 3, 4)] == [5, 5, 8, None]
    assert [needs.take(), needs.take(), needs.take(), needs.take()] == [1, 2, 3, None]
    assert [*needs.later_than(5, [1, 2, 3])] == [3] and [*needs.later_than(4, [2, 3])] == [3, 2]
    assert needs.finish(6) == [2] and sorted(needs.now) == []
    needs.put_back(1)
    needs.put_back(2)
    assert needs.take() == 1 and needs.take() is None and needs.next_need(1) == 8
    assert sorted(needs.finish(20)) == [1, 3] and needs.first == 21
    needs.add({7})  # step 9, which is done
    assert len(needs) == 0 and needs.end == 10
    assert all(one <= other for one, other in pairwise([needs.end, needs.first]))
