"""--max-time: what is begun is finished; --steal: which units a part takes, and how little is done twice."""

from collections import Counter, deque
from collections.abc import Iterator
from operator import length_hint
from pathlib import Path

import numpy as np
import pytest

from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.cli.options import Partition
from schemas.randomness import mix_bits
from stages import bucket, discover, encode_latents
from stages.encoding.unit_queue import Claims, Shards, TimedUnits, take_units
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

    monkeypatch.setattr(TimedUnits, "expected_seconds", slow)
    report = home.run(encode_latents.run, max_time=3600.0)
    assert report.exit_code == 3 and report.remaining == 5 and report.done == 3
    assert report.details["stopped"] == "by --max-time; 5 units remain, what is done is kept"
    assert len(home.shards("latents")) == 3
    assert home.run(encode_latents.run, max_time=3600.0).done == 5


def rank(unit: int, part: int, total: int) -> int:
    return int(mix_bits(np.array([unit * total + part + 1], np.uint64))[0])


def choices(remaining: list[int], finished: list[int], total: int, leave: int = 1) -> dict[int, list[int]]:
    claims = Claims(np.array(remaining), total, leave)
    claims.add_finished(finished)
    return {part: claims.choose(np.array(remaining), part).tolist() for part in finished}


@pytest.mark.parametrize("leave", [1, 3])
def test_parts_that_are_done_divide_what_remains(leave: int) -> None:
    """Each unit goes to the part of the highest random weight, and the first of each part stay where they are."""
    total, finished = 7, [1, 4, 6]
    random = np.random.default_rng(0)
    remaining = sorted(n for n in random.choice(200, 120, replace=False).tolist() if n % total not in finished)
    found = choices(remaining, finished, total, leave)
    own = {part: [n for n in remaining if n % total == part] for part in range(total)}
    ahead = {n: place for units in own.values() for place, n in enumerate(units)}
    assert sorted(n for units in found.values() for n in units) == [n for n in remaining if ahead[n] >= leave]
    for part, units in found.items():
        assert units, "it has a share"
        assert all(max(finished, key=lambda each: rank(n, each, total)) == part for n in units)
        assert [ahead[n] for n in units] == sorted((ahead[n] for n in units), reverse=True), "the last ones first"


def test_a_part_that_is_done_later_takes_units_over_and_moves_no_others() -> None:
    remaining = [n for n in range(1000) if n % 10 > 3]
    before, after = (choices(remaining, finished, 10) for finished in ([0, 1, 2], [0, 1, 2, 3]))
    assert all(set(after[part]) <= set(before[part]) for part in (0, 1, 2))
    assert 100 < len(after[3]) < 200, "about a quarter of 594"
    again = Claims(np.array(remaining), 10)
    for part in (3, 0, 2, 1):  # as they happen to end
        again.add_finished([part])
    assert again.choose(np.array(remaining), 3).tolist() == after[3]


class Part:
    """A worker that reads ahead all that it is given, and asks for the shard right before it encodes a unit."""

    def __init__(self, own: list[Unit], units: list[Unit], part: Partition, shards: Shards) -> None:
        self.queue = TimedUnits(iter(()), 1, lambda: float("inf"))
        self.queue.units = take_units(own, units, part, 1, shards, self.queue, clock=lambda: 0.0)
        self.shards, self.ahead = shards, deque[Unit]()

    def finish(self, unit: Unit, elsewhere: bool = False) -> None:
        list(self.queue.finish([UnitResult(unit.unit_id, "", elsewhere=elsewhere)]))

    def next_unit(self) -> Unit | None:
        while True:
            while (unit := next(self.queue, None)) is not None:
                self.ahead.append(unit)
            if not self.ahead:
                return None
            unit = self.ahead.popleft()
            if not self.shards.has(unit):
                return unit
            self.finish(unit, elsewhere=True)

    def __iter__(self) -> Iterator[Unit]:
        while (unit := self.next_unit()) is not None:
            yield unit
            self.finish(unit)


class Cluster:
    """Parts with a store in common. A shard appears when its unit ends, `pace` steps after it began."""

    def __init__(self, folder: Path, units: int, pace: list[int], format: str = "arrow") -> None:
        self.store, self.pace, self.done = Store(folder), pace, Counter[str]()
        self.units = [Unit(f"u{number:03d}", "latents", "8x8@1", ("a",), 1) for number in range(units)]
        self.format = format

    def work_of(self, number: int) -> "Part":
        part = Partition(number, len(self.pace))
        shards = Shards(self.store, "latents/f", self.format)
        return Part(part.select(self.units), self.units, part, shards)

    def end(self, unit: Unit) -> None:
        self.done[unit.unit_id] += 1
        self.store.publish_bytes(f"latents/f/{unit.unit_id}.{'tar' if self.format == 'webdataset' else 'arrow'}", b"")

    def run(self) -> int:
        """Steps until all have ended."""
        work = {number: self.work_of(number) for number in range(len(self.pace))}
        busy: dict[int, tuple[Unit, int]] = {}
        for step in range(10_000):
            for number, (unit, begun) in list(busy.items()):
                if step - begun == self.pace[number]:
                    self.end(unit)
                    work[number].finish(unit)
                    del busy[number]
            for number in [number for number in work if number not in busy]:
                unit = work[number].next_unit()
                if unit is None:
                    del work[number]
                else:
                    busy[number] = unit, step
            if not work:
                return step
        raise AssertionError("it does not end")


@pytest.mark.parametrize("format", ["arrow", "webdataset"])
def test_a_slow_part_is_helped_and_little_is_done_twice(tmp_path: Path, format: str) -> None:
    """Of 60 units, 15 each, one part takes eight times as long: alone 120 steps, together 60 / 3.125 = 19.2."""
    cluster = Cluster(tmp_path, 60, [1, 1, 8, 1], format)
    steps = cluster.run()
    assert set(cluster.done) == {unit.unit_id for unit in cluster.units}
    assert steps <= 30
    assert cluster.done.total() - 60 <= 3


def test_parts_of_one_pace_do_their_own(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 40, [2, 2, 2, 2])
    assert cluster.run() == 20
    assert cluster.done.total() == 40


@pytest.mark.parametrize("pace", [[1, 1, 9], [1, 9, 1, 1], [1, 1, 1, 1, 40]])
def test_parts_that_end_at_once_do_not_encode_the_same(tmp_path: Path, pace: list[int]) -> None:
    """Each helps the slow one, of whose units each does at most one that another is at. What a part has read ahead
    before its own units were done would be all that the others have left, in the same order for each."""
    cluster = Cluster(tmp_path, 90, pace)
    cluster.run()
    assert set(cluster.done) == {unit.unit_id for unit in cluster.units}
    assert cluster.done.total() - 90 <= len(pace)


def test_the_unit_that_a_lost_part_was_at_stays(tmp_path: Path) -> None:
    """Others do the rest of its part. Started again it does that one."""
    cluster = Cluster(tmp_path, 12, [1, 1, 1])
    for number in (0, 1):
        for unit in cluster.work_of(number):
            cluster.end(unit)
    assert {unit.unit_id for unit in cluster.units} - set(cluster.done) == {"u002"}
    assert [unit.unit_id for unit in cluster.work_of(2)] == ["u002"]


def test_what_is_encoded_again_is_its_owners(tmp_path: Path) -> None:
    """Its shard exists, and lacks members whose files are there now."""
    cluster = Cluster(tmp_path, 4, [1, 1])
    for unit in cluster.units:
        cluster.end(unit)
    for number, expected in ((0, ["u002"]), (1, [])):
        part = Partition(number, 2)
        own = [unit for unit in part.select(cluster.units) if unit.unit_id == "u002"]
        shards = Shards(cluster.store, "latents/f", "arrow", again={"u002"})
        assert [unit.unit_id for unit in Part(own, cluster.units, part, shards)] == expected
