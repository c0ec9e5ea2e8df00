"""Which shards the coming steps need."""

from cache.supply.step_needs import StepNeeds


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
