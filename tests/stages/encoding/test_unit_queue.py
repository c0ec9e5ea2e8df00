"""Processes that are started with the same command share the units; with --max-time what is begun is finished."""

import os
import signal
import time
from collections import Counter
from operator import length_hint

import pytest

from cache.sets.plans import Unit
from schemas.errors import INCOMPLETE
from stages import bucket, discover, encode_latents
from stages.encoding.unit_queue import OpenUnits, order_units, process_name
from stages.encoding.vae.worker import LatentsWorker
from stages.engines import local
from tests.processes import Child, ForkedWorkers
from tests.torture.kills import wait_for

UNITS = [Unit(f"u{number}", "latents", "8x8@1", ("a",), 1) for number in range(400)]


def test_each_process_has_an_order_of_its_own() -> None:
    orders = [order_units(UNITS, process) for process in ("one", "other", "one")]
    assert orders[0] == orders[2] != orders[1]
    assert all(sorted(order, key=UNITS.index) == UNITS for order in orders)
    same = sum(one is other for one, other in zip(orders[0], orders[1], strict=True))
    assert same < 10, "of 400 places"
    left = order_units(UNITS[::2], "one")
    assert left == [unit for unit in orders[0] if unit in left], "what others did changes no order"
    assert process_name() != process_name()


@pytest.mark.parametrize("paces", [[1, 1, 1], [1, 1, 8, 1], [2, 3, 5, 7, 9]])
def test_few_units_are_done_twice(paces: list[int]) -> None:
    """Simulated: a shard appears `pace` steps after its unit was begun."""
    done, busy = Counter[str](), dict[int, tuple[Unit, int]]()
    orders = {number: iter(order_units(UNITS, f"process {number}")) for number in range(len(paces))}
    step = 0
    while orders:
        for number, (unit, begun) in list(busy.items()):
            if step - begun == paces[number]:
                done[unit.unit_id] += 1
                del busy[number]
        for number in [number for number in orders if number not in busy]:
            unit = next((unit for unit in orders[number] if unit.unit_id not in done), None)
            if unit is None:
                del orders[number]
            else:
                busy[number] = unit, step
        step += 1
    assert done.keys() == {unit.unit_id for unit in UNITS}
    assert done.total() - len(UNITS) < len(UNITS) / 10
    assert step <= 1.15 * len(UNITS) / sum(1 / pace for pace in paces) + max(paces)


def test_units_with_a_shard_are_passed_over_and_units_end_once_the_time_is_up() -> None:
    checks, passed = list[None](), list[Unit]()
    common = lambda: checks.append(None), UNITS[:2].__contains__, passed.append
    units = OpenUnits(iter(UNITS), time.monotonic() + 60, *common)
    assert (next(units), length_hint(units), len(checks), passed) == (UNITS[2], 397, 3, UNITS[:2])
    late = OpenUnits(iter(UNITS), time.monotonic(), *common)
    assert next(late, None) is None and length_hint(late) == 0


def plan(project, count: int):
    home = project(cache={"unit_mib": 0.004})
    for number in range(count):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket):
        home.run(program.run)
    return home


def whole(home) -> dict[str, bytes]:
    """The shards of one process, which are then removed."""
    home.run(encode_latents.run)
    shards = home.shards("latents")
    for name in shards:
        (home.root / "latents" / name).unlink()
    return shards


@pytest.mark.slow
def test_time_that_is_up_ends_the_stage_between_two_units(project, monkeypatch) -> None:
    """The unit in work is finished, and units that were read ahead remain."""
    home = plan(project, 8)
    expected, encode = whole(home), LatentsWorker.encode

    def last(self, names, batch, limit):
        yield from encode(self, names, batch, limit)
        object.__setattr__(self.job, "until", 0.0)

    monkeypatch.setattr(LatentsWorker, "encode", last)
    report = home.run(encode_latents.run, max_time=3600.0)
    assert (report.exit_code, report.done, report.remaining) == (INCOMPLETE, 1, 7)
    assert report.details["stopped"] == "by --max-time; 7 units remain, what is done is kept"
    assert len(home.shards("latents")) == 1 and not list(home.root.rglob("*.tmp"))
    monkeypatch.undo()
    assert home.run(encode_latents.run, max_time=3600.0).done == 7
    assert home.shards("latents") == expected


@pytest.mark.long
def test_worker_processes_finish_one_unit_each_once_the_time_is_up(project, monkeypatch) -> None:
    home = plan(project, 12)
    encode = LatentsWorker.encode

    def slow(self, names, batch, limit):
        yield from encode(self, names, batch, limit)
        while time.monotonic() < self.job.until:
            time.sleep(0.01)

    monkeypatch.setattr(local, "multiprocessing", ForkedWorkers().multiprocessing)
    monkeypatch.setattr(LatentsWorker, "encode", slow)
    report = home.run(encode_latents.run, "stages.encode-latents.workers=2", max_time=10.0)
    assert report.exit_code == INCOMPLETE and report.done == len(home.shards("latents")) <= 2
    assert report.remaining == 12 - report.done and not report.failed
    assert report.details["stopped"].startswith("by --max-time") and not list(home.root.rglob("*.tmp"))


@pytest.mark.long
def test_processes_of_one_command_share_the_work_and_one_may_be_killed(project, monkeypatch, tmp_path) -> None:
    """Every unit is done, few are done twice, and the bytes are those of one process."""
    home = plan(project, 30)
    expected, encode = whole(home), LatentsWorker.encode

    def slow(self, names, batch, limit):
        time.sleep(0.3)
        yield from encode(self, names, batch, limit)

    def work(number: int) -> None:
        (tmp_path / f"ready-{number}").touch()
        wait_for((tmp_path / "go").exists)
        report = home.run(encode_latents.run)
        assert (report.exit_code, report.remaining, report.done + report.skipped) == (0, 0, 30)
        (tmp_path / f"done-{number}").write_text(str(report.done))

    monkeypatch.setattr(LatentsWorker, "encode", slow)
    children = [Child(lambda number=number: work(number)) for number in range(4)]
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
    (tmp_path / "go").touch()
    wait_for(lambda: len(home.shards("latents")) >= 5)
    os.kill(children[0].pid, signal.SIGKILL)
    assert [child.wait() for child in children[1:]] == [0, 0, 0]
    assert home.shards("latents") == expected
    done = [int(path.read_text()) for path in tmp_path.glob("done-*")]
    assert len(done) == 3 and sum(map(bool, done)) >= 2, done
    assert sum(done) < 2 * 30, "a process does not see what the others have in work"
    assert home.run(encode_latents.run).done == 0
