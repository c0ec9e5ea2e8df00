"""--max-time: what is begun is finished."""

from operator import length_hint

import pytest

from cache.sets.plans import Unit
from stages import bucket, discover, encode_latents
from stages.encoding import timed_units
from stages.encoding.timed_units import TimedUnits
from stages.engines.jobs import UnitResult


def units(count: int, members: int = 4) -> list[Unit]:
    return [Unit(f"u{number}", "latents", "8x8@1", tuple("abcdefgh"[:members]), 1) for number in range(count)]


def finish(queue: TimedUnits) -> list[UnitResult]:
    """One of the units that were given."""
    return list(queue.finish([UnitResult("u", "shard")]))


class Work:
    """One worker, which takes a second for a member, after `first` seconds of loading its model."""

    def __init__(self, units: list[Unit], limit: float, workers: int = 1) -> None:
        self.now, self.limit = 0.0, limit
        self.queue = TimedUnits(iter(units), workers, lambda: limit - self.now, clock=lambda: self.now)

    def do(self, unit: Unit, seconds: float = 1.0) -> None:
        for _ in unit.members:
            self.now += seconds
            self.queue.advance(1)
        finish(self.queue)


def test_no_unit_is_begun_that_would_not_be_finished() -> None:
    work = Work(units(10), limit=18.5)
    done = 0
    for unit in work.queue:
        work.do(unit)
        done += 1
    assert (done, work.queue.reason, length_hint(work.queue), work.now) == (4, "--max-time", 0, 16.0)
    assert next(work.queue, None) is None


def test_without_a_limit_and_without_a_rate_all_are_begun() -> None:
    assert len(list(TimedUnits(iter(units(5)), 1, lambda: float("inf")))) == 5
    queue = TimedUnits(iter(units(5)), 1, lambda: 0.001)
    assert len(list(queue)) == 5 and queue.reason == ""


def test_units_that_wait_for_their_turn_and_other_workers_count() -> None:
    """Two workers with a unit each share the rate of both; a unit that is given ahead waits for the one before."""
    work = Work(units(10), limit=100.0, workers=2)
    first, second = next(work.queue), next(work.queue)
    work.queue.advance(1)
    work.now = 1.0
    work.queue.advance(1)  # 1 member a second, 6 of 8 left
    assert work.queue.expected_seconds(units(1)[0]) == pytest.approx(6 + 2 * 4)
    finish(work.queue)
    finish(work.queue)
    work.queue.advance(6)
    work.now = 7.0
    # Of two workers one is idle: Ray has no room for it. The rate, 7 members in 7 s, is that of one.
    assert work.queue.expected_seconds(units(1)[0]) == pytest.approx(4)
    work.queue.advance(-4)  # a unit is done again
    assert work.queue.expected_seconds(units(1)[0]) == pytest.approx((4 + 4) / (3 / 7))
    assert first != second


def test_units_that_others_did_are_among_the_results() -> None:
    queue = TimedUnits(iter(units(2)), 1, lambda: float("inf"))
    next(queue)
    assert queue.in_work == 1
    queue.pass_over(units(9)[8])
    assert [(result.unit_id, result.elsewhere) for result in finish(queue)] == [("u", False), ("u8", True)]
    assert queue.in_work == 0 and not list(queue.finish([]))


@pytest.mark.slow
def test_an_encoding_stage_ends_between_units_and_says_what_remains(project, monkeypatch) -> None:
    home = project(cache={"unit_mib": 0.004})
    for number in range(8):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket):
        home.run(program.run)
    begun, expected = [], TimedUnits.expected_seconds

    def slow(self: TimedUnits, unit: Unit) -> float:
        begun.append(unit.unit_id)
        return 4000.0 if len(begun) == 4 else expected(self, unit)

    monkeypatch.setattr(timed_units.TimedUnits, "expected_seconds", slow)
    report = home.run(encode_latents.run, max_time=3600.0)
    assert report.exit_code == 3 and report.remaining == 5 and report.done == 3
    assert report.details["stopped"] == "by --max-time; 5 units remain, what is done is kept"
    assert len(home.shards("latents")) == 3
    assert home.run(encode_latents.run, max_time=3600.0).done == 5
