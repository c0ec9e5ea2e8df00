"""Copies of remote shards: fetched once, within the limit, as far ahead as the plan says."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache.shards.shard_supply import SupplyError
from cache.store.store import Store
from cache.supply import step_needs
from tests.background import until
from tests.cache.sets.test_read_draw import FORMS
from tests.cache.store.remote_place import COUNT, Place, read, sizes, total


@FORMS
def test_each_shard_is_fetched_once_and_found_by_the_next_run(tmp_path: Path, form: str) -> None:
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    for run in range(2):
        supply = place.supply()
        supply.follow(0, iter([{number, (number + 1) % COUNT} for number in range(COUNT)] * 2))
        for step in range(2 * COUNT):
            read(supply, step % COUNT)
            read(supply, (step + 1) % COUNT)
            supply.finished(step)
        found = total(supply)
        assert found["shards_fetched"] == (COUNT if run == 0 else 0)
        assert found["shards_found"] >= (0 if run == 0 else COUNT)
        assert found["shards_fetched_mb"] == pytest.approx(sum(place.sizes) / 1e6 if run == 0 else 0, abs=1e-3)
        supply.close()
    assert len(place.copies()) == COUNT * (1 if form == "arrow" else 2)
    assert sum(path.stat().st_size for path in place.copies()) == sum(place.sizes)


def test_a_replaced_object_is_another_copy(place: Place) -> None:
    supply = place.supply()
    read(supply, 3)
    supply.close()
    (old,) = place.copies()
    other = Place(place.store, place.folder)  # written again, at another time
    assert [other.store.read_bytes(path) for path in other.paths] == [
        place.store.read_bytes(path) for path in place.paths
    ]
    supply = other.supply()
    read(supply, 3)
    assert total(supply)["shards_fetched"] == 1 and old in place.copies() and len(place.copies()) == 2
    supply.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_limit_holds_and_what_is_needed_last_goes(place: Place, threads: int) -> None:
    """With room for 4 of 10 shards, a random order of 60 steps of 2 shards. In the folder are never more bytes; not
    many more are fetched than if each gave way only when another is needed (Belady)."""
    limit, rng = 4, np.random.default_rng(0)
    steps = [{*rng.choice(COUNT, 2, replace=False).tolist()} for _ in range(60)]
    supply = place.supply(limit, threads)
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, sum(sizes(place)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    supply.follow(0, iter(steps))
    for step, numbers in enumerate(steps):
        for number in sorted(numbers):
            read(supply, number)
        supply.finished(step)
    ended.set()
    watcher.join()
    assert 0 < most <= limit * max(place.sizes)
    fetched, least = total(supply)["shards_fetched"], belady(steps, limit)
    assert least <= fetched <= 1.2 * least
    supply.close()


def belady(steps: list[set[int]], room: int) -> int:
    """Fetches where what is needed last gives way, computed from the whole future."""
    here, fetches = set[int](), 0
    for step, numbers in enumerate(steps):
        for number in sorted(numbers - here):
            while len(here) >= room:
                later = {
                    each: next((n for n in range(step, len(steps)) if each in steps[n]), len(steps)) for each in here
                }
                here.remove(max(later, key=later.__getitem__))
            here.add(number)
            fetches += 1
    return fetches


def test_a_shard_read_before_its_step_needs_no_step_to_finish(place: Place) -> None:
    """As by a validation, while the copies are full of what is needed earlier."""
    supply = place.supply(limit=4)
    supply.follow(0, iter([{0}, {1}, {2}, {3}, {8}, {9}]))
    until(lambda: len([path for path in place.copies() if path.suffix == ".arrow"]) == 4)
    for number in (9, 7, 8):
        read(supply, number)
    for step, number in enumerate((0, 1, 2, 3, 8, 9)):
        read(supply, number)
        supply.finished(step)
    supply.close()


def test_steps_that_do_not_fit_are_refused(place: Place) -> None:
    supply = place.supply(limit=2)
    supply.follow(0, iter([{0, 1}, {2, 3, 4}]))
    for number in (0, 1):
        read(supply, number)
    supply.finished(0)
    with pytest.raises(SupplyError, match=r"max_gb \(.*\) is too little: the shards of step 2 have") as caught:
        for number in (2, 3, 4):
            read(supply, number)
    assert caught.value.exit_code == 2 and "train.batch_size" in caught.value.next_step
    supply.close()


def test_an_error_of_the_plan_is_raised_where_a_shard_is_awaited(place: Place) -> None:
    def plan() -> Iterator[set[int]]:
        yield {0}
        raise ZeroDivisionError("in the plan")

    supply = place.supply()
    supply.follow(0, plan())
    read(supply, 0)
    supply.finished(0)
    with pytest.raises(ZeroDivisionError, match="in the plan"):
        until(lambda: read(supply, 1))  # again, where it came before the plan was read so far
    supply.close()


def test_the_plan_is_read_a_bounded_number_of_steps_ahead(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_needs, "MOST_STEPS", 20)
    given = 0

    def plan() -> Iterator[set[int]]:
        nonlocal given
        while True:
            yield {given % COUNT}
            given += 1

    supply = place.supply()
    supply.follow(0, plan())
    until(lambda: given >= 15)
    time.sleep(0.1)
    assert given <= 20
    for step in range(30):
        read(supply, step % COUNT)
        supply.finished(step)
    until(lambda: given >= 45)
    assert given <= 50
    supply.close()
