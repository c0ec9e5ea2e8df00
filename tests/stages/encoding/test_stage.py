"""Processes with the same command share the units; with --max-time, a unit in progress is finished; default number of
workers."""

import os
import signal
import time
from typing import Any

import pytest
import torch

from schemas.config.encoding import Encoding, EngineName
from schemas.errors import INCOMPLETE
from stages import bucket, discover, encode_latents
from stages.encoding import stage
from stages.encoding.stage import choose_workers
from stages.encoding.vae.worker import LatentsWorker
from stages.engines import local
from tests.background import until
from tests.conftest import own_order
from tests.processes import Child, ForkedWorkers


def plan(project, count: int):
    home = project(cache={"unit_mib": 0.004})
    for number in range(count):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket):
        home.run(program.run)
    return home


def pop_shards(home) -> dict[str, bytes]:
    """The shards of one process. Removes them afterwards."""
    home.run(encode_latents.run)
    shards = home.shards("latents")
    for name in shards:
        (home.root / "latents" / name).unlink()
    return shards


@pytest.mark.slow
def test_time_that_is_up_ends_the_stage_between_two_units(project, monkeypatch) -> None:
    """The unit in progress is finished, and units that were read ahead remain."""
    home = plan(project, 4)
    expected, encode = pop_shards(home), LatentsWorker.encode

    def last(self, names, batch, limit):
        yield from encode(self, names, batch, limit)
        object.__setattr__(self.job, "until", 0.0)

    monkeypatch.setattr(LatentsWorker, "encode", last)
    report = home.run(encode_latents.run, max_time=3600.0)
    assert (report.exit_code, report.done, report.remaining) == (INCOMPLETE, 1, 3)
    assert report.details["workers"].startswith("1, ") and f"workers: {report.details['workers']}" in home.said
    assert report.details["stopped"] == "by --max-time; 3 units remain, finished units are kept"
    assert len(home.shards("latents")) == 1 and not list(home.root.rglob("*.tmp"))
    monkeypatch.undo()
    assert home.run(encode_latents.run, max_time=3600.0).done == 3
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
    """Every unit is encoded, few units are encoded twice, and the bytes equal the bytes of one process."""
    home = plan(project, 30)
    expected, encode = pop_shards(home), LatentsWorker.encode

    def slow(self, names, batch, limit):
        time.sleep(0.3)
        yield from encode(self, names, batch, limit)

    def work(number: int) -> None:
        (tmp_path / f"ready-{number}").touch()
        until((tmp_path / "go").exists)
        report = home.run(encode_latents.run)
        assert (report.exit_code, report.remaining, report.done + report.skipped) == (0, 0, 30)
        (tmp_path / f"done-{number}").write_text(str(report.done))

    monkeypatch.setattr(stage, "order_units", own_order)
    monkeypatch.setattr(LatentsWorker, "encode", slow)
    children = [Child(lambda number=number: work(number)) for number in range(4)]
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
    (tmp_path / "go").touch()
    until(lambda: len(home.shards("latents")) >= 5)
    os.kill(children[0].pid, signal.SIGKILL)
    assert [child.wait() for child in children[1:]] == [0, 0, 0]
    assert home.shards("latents") == expected
    counts = [int(path.read_text()) for path in tmp_path.glob("done-*")]
    assert len(counts) == 3 and sum(map(bool, counts)) >= 2, counts
    assert sum(counts) < 2 * 30, "a process does not see the units in progress elsewhere"
    assert home.run(encode_latents.run).done == 0


@pytest.mark.parametrize(
    ("cards", "options", "engine", "workers", "reason"),
    [
        (4, {}, "local", 4, "one for each accelerator"),
        (0, {}, "local", 1, "no accelerator"),
        (4, {"device": "cpu"}, "local", 1, "the device is cpu"),
        (4, {"device": "cuda:2"}, "local", 1, "the device is cuda:2"),
        (4, {"workers": 2}, "local", 2, "as configured"),
        (4, {}, "ray", 1, "--workers"),
    ],
)
def test_one_for_each_card_by_default(
    monkeypatch, cards: int, options: dict[str, Any], engine: EngineName, workers: int, reason: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: cards)
    result, text = choose_workers(engine, Encoding(**options))
    assert result == workers and reason in text
