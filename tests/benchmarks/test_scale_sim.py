"""The simulation beside cases that are known without it."""

import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from benchmarks import scale_sim, worker_simulation
from benchmarks.worker_simulation import Result, Settings, Simulation, Way

QUEUE, PARTS, STEAL = Way("--engine ray", 1), Way("--shard"), Way("--shard --steal", steal=True)
POOL = Way("--workers", parts=1, node_workers=2, held=3)


def settings(costs: list[float], workers: int, **other: Any) -> Settings:
    return Settings(np.array(costs), np.ones(len(costs)), workers, **other)


def run(costs: list[float], workers: int, way: Way, **other: Any) -> Result:
    return Simulation(settings(costs, workers, **other), way).run()


class Random:
    """In place of numpy's: draws that are given. slow: whether each node is, as it starts; losses: in seconds."""

    def __init__(self, losses: list[float], slow: list[bool]) -> None:
        self._losses, self._slow = losses, slow

    def random(self) -> float:
        return 0.0 if self._slow and self._slow.pop(0) else 1.0

    def exponential(self, mean: float) -> float:
        return self._losses.pop(0) if self._losses else 1e12


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch):
    def fix(losses: list[float], slow: list[bool] | None = None) -> None:
        monkeypatch.setattr(worker_simulation.np.random, "default_rng", lambda seed: Random(losses, slow or []))

    return fix


@pytest.mark.parametrize("way", [QUEUE, PARTS, STEAL])
def test_one_worker_takes_the_sum(way: Way) -> None:
    found = run([3.0, 5.0, 7.0], 1, way)
    assert found.end == pytest.approx(15, abs=0.2)  # a listing takes a little
    assert (found.useful, found.lost, found.twice) == (15, 0, 0)


@pytest.mark.parametrize("way", [QUEUE, PARTS, STEAL])
def test_equal_workers_divide_equal_units(way: Way) -> None:
    found = run([10.0] * 12, 4, way, start_s=5.0)
    assert found.end == pytest.approx(5 + 30, abs=0.2)
    assert (found.useful, found.lost, found.twice) == (120, 0, 0)


def test_parts_wait_for_the_longest_and_a_queue_does_not() -> None:
    """Units 0, 2, 4 and 1, 3, 5: 2,700 s and 300 s. From one queue: 900 | 100 900, then 100 900 and 100."""
    costs = [900.0, 100.0] * 3
    parts, queue, steal = (run(costs, 2, way) for way in (PARTS, QUEUE, STEAL))
    assert parts.end == pytest.approx(2700, abs=1) and parts.first_idle == pytest.approx(300, abs=1)
    assert queue.end == 1900
    # Its own 300 s, then the last unit of the other part: 1,200 s. At the second the owner is from 900 to 1,800.
    assert steal.end == pytest.approx(1800, abs=1) and steal.first_idle == pytest.approx(1200, abs=1)
    assert (steal.stolen, steal.twice) == (1, 0)


def test_a_loss_costs_what_was_in_flight(draws) -> None:
    """A node is lost after 14 s, 4 s into the second unit: 10 + (4) + 100 + 10 + 10 s."""
    draws([14.0])
    found = run([10.0] * 3, 1, QUEUE, loss=0.05, replace_s=100.0)
    assert (found.lost, found.useful, found.losses) == (4, 30, 1)
    assert found.end == 14 + 100 + 20


def test_a_node_is_lost_with_all_that_its_workers_have(draws) -> None:
    """Each of two processes is at its second unit and holds two more; those had cost nothing yet."""
    draws([14.0])
    found = run([10.0] * 12, 2, POOL, loss=0.05, replace_s=50.0)
    assert (found.lost, found.useful) == (8, 120)
    assert found.end == 14 + 50 + 50


def test_a_unit_that_loses_three_workers_is_left(draws) -> None:
    draws([5.0, 5.0, 5.0])
    found = run([10.0, 10.0], 1, QUEUE, loss=0.05, replace_s=0.0)
    assert (found.left, found.lost, found.useful) == (1, 15, 10)
    assert found.end == 15 + 10


def test_a_lost_unit_waits_at_the_end_of_the_queue_or_goes_first(draws) -> None:
    """Three units of 10 s on two workers, the first of which loses one after 5 s, for good: the other has one and then
    two to do, in either order. With a longer one among them the order counts."""
    costs = [20.0, 5.0, 5.0, 5.0, 5.0]
    ends = {}
    for requeue in ("front", "back"):
        draws([4.0])
        ends[requeue] = run(costs, 2, QUEUE, loss=0.05, replace_s=1.0, requeue=requeue).end
    assert ends == {"front": 25, "back": 30}


def test_a_slow_node(draws) -> None:
    draws([], [True, False])
    slow = {"slow": 0.5, "slow_factor": 3.0}
    assert run([10.0] * 4, 2, QUEUE, **slow).end == 30
    draws([], [True, False])
    assert run([10.0] * 4, 2, PARTS, **slow).end == pytest.approx(60, abs=0.2)
    ended = Result(useful=60, end=30, first_idle=30, minutes=Counter({0: 90}))
    summary = scale_sim.summarize(settings([10.0] * 4, 2, **slow), ended)
    assert summary["times_ideal"] == pytest.approx(30 / (40 / (0.5 + 0.5 / 3) / 2))
    assert (summary["idle"], summary["wasted"]) == (0, 0)
    assert (summary["requests_s"], summary["peak_requests_s"]) == (3, 1.5)


def test_requests() -> None:
    """18 and a listing at the start of each program, and one at its end; four for each small unit. `--steal` asks
    before each unit whether it is done, and lists before it gives up. A shard of 128 MiB goes in four parts."""
    assert run([1.0] * 5, 2, QUEUE).minutes == {0: 19 + 4 * 5}
    assert run([1.0] * 4, 2, PARTS).minutes == {0: 2 * 20 + 4 * 4}
    assert run([1.0] * 2, 2, STEAL).minutes == {0: 2 * 20 + 2 * (1 + 4 + 1)}
    assert [worker_simulation.count_uploads(mib) for mib in (1, 64, 65, 128, 2048)] == [1, 1, 5, 6, 66]


def test_constants_of_the_engine() -> None:
    pytest.importorskip("ray")
    from stages.engines import ray

    assert worker_simulation.MAX_UNIT_TRIES == ray.MAX_UNIT_TRIES


def test_units_of_a_plan() -> None:
    seconds, sizes = scale_sim.make_units(1000, 128, 2.0, 3, 0.3, seed=1)
    assert seconds.sum() == pytest.approx(2000) and sizes.sum() == pytest.approx(1000)
    assert sizes.max() == 128 and (sizes < 128).sum() == 3


def test_the_table(monkeypatch, capsys) -> None:
    """The same for the same seed; `--steal` ends sooner than without."""

    def rows(*words: str) -> list[dict[str, Any]]:
        given = ["scale_sim", "--unit-mib", "128", "--hours", "2", "--workers", "40", "--json", *words]
        monkeypatch.setattr(sys, "argv", given)
        scale_sim.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    found = rows("--slow", "0.2", "--seed", "3")
    assert found == rows("--slow", "0.2", "--seed", "3") != rows("--slow", "0.2", "--seed", "4")
    by_name = {row["name"]: row for row in found}
    assert len(by_name) == 5
    assert by_name["--shard --steal"]["end_h"] < by_name["--shard"]["end_h"]
    assert by_name["--engine ray"]["end_h"] <= by_name["--shard --steal"]["end_h"]
    monkeypatch.setattr(sys, "argv", ["scale_sim", "--unit-mib", "512", "--hours", "1", "--workers", "4"])
    scale_sim.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3, "a node of eight workers is not divided"
