"""A stopped encoding stage drops its unit, reports what remains, and continues from there in the next run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

import cache.shards.arrow
import cache.shards.wds
from cache.store.files import Folder
from schemas.errors import INCOMPLETE
from schemas.interruption import pause
from stages import bucket, discover, encode_latents
from stages.encoding import member_reader, worker
from stages.encoding.vae.worker import LatentsWorker
from tests.background import LIMIT_S
from tests.forms import long
from tests.processes import ForkedProgram


@pytest.fixture
def home(project, built):
    return built(project(cache={"unit_mib": 0.004}), plan_eight)


def plan_eight(home) -> None:
    for number in range(8):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGINT)])
def test_a_signal_drops_the_unit_and_the_next_run_makes_the_same_shards(home, monkeypatch, number) -> None:
    encoded = []
    encode = LatentsWorker.encode

    def interrupted(self, names, batch, limit):
        encoded.extend(names)
        if len(encoded) == 3:
            os.kill(os.getpid(), number)
        return encode(self, names, batch, limit)

    monkeypatch.setattr(LatentsWorker, "encode", interrupted)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    report = home.run(encode_latents.run)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    before = home.shards("latents")
    assert 0 < len(before) < 8 and report.exit_code == INCOMPLETE
    assert report.remaining == 8 - len(before)
    assert report.details["stopped"].startswith(f"by {signal.Signals(number).name}; {report.remaining} units remain")
    assert leftovers(home.root) == []
    second = home.run(encode_latents.run)
    assert (second.done, second.remaining, second.exit_code) == (report.remaining, 0, 0)
    expected = home.shards("latents")
    assert before.items() <= expected.items()
    for name in expected:
        (home.root / "latents" / name).unlink()
    home.run(encode_latents.run)
    assert home.shards("latents") == expected


@pytest.mark.parametrize("format", ["arrow", "webdataset"])
def test_a_unit_that_waits_to_be_written_leaves_nothing(home, monkeypatch, format) -> None:
    """The disk is slower than the encoder: while one shard is written, another shard is encoded when the stage is
    stopped."""
    kind = {"arrow": cache.shards.arrow, "webdataset": cache.shards.wds}[format].ShardWriter
    finish, encode, drop = kind.finish, LatentsWorker.encode, worker._UnitShard.drop
    encoded, dropped = [], threading.Event()

    def count_and_encode(self, names, batch, limit):
        yield from encode(self, names, batch, limit)
        encoded.append(names)

    def noted(self):
        drop(self)
        dropped.set()

    def slow(self):
        while len(encoded) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        dropped.wait()
        return finish(self)

    monkeypatch.setattr(LatentsWorker, "encode", count_and_encode)
    monkeypatch.setattr(worker._UnitShard, "drop", noted)
    monkeypatch.setattr(kind, "finish", slow)
    report = home.run(encode_latents.run, f"cache.format={format}")
    assert len(home.shards("latents")) == 1 and report.remaining == 7
    assert leftovers(home.root) == []


def test_a_signal_between_two_steps_leaves_no_file_either(home, monkeypatch) -> None:
    """The file of a shard is open and not yet in use."""
    opened = []

    open_temp = Folder.open_temp

    def interrupted(self: Folder, rel: str) -> BinaryIO:
        opened.append(rel)
        if len(opened) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return open_temp(self, rel)

    monkeypatch.setattr(Folder, "open_temp", interrupted)
    report = home.run(encode_latents.run)
    assert report.details["stopped"].startswith("by SIGTERM") and len(opened) >= 3
    assert leftovers(home.root) == []


def hold_the_third_unit() -> None:
    encode, calls = LatentsWorker.encode, list[None]()

    def wait(self, names, batch, limit):
        calls.append(None)
        if len(calls) == 3:
            pause(LIMIT_S)
        yield from encode(self, names, batch, limit)

    LatentsWorker.encode = wait  # type: ignore[method-assign]


@pytest.mark.long
def test_a_stage_under_run_is_told_to_stop_and_reports(home, forked_programs, monkeypatch) -> None:
    """The signal reaches only the program, as with Docker and timeout; Ctrl-C in a terminal also reaches the stage."""
    monkeypatch.setattr(ForkedProgram, "prepare", staticmethod(hold_the_third_unit))
    home.settings["stages"]["order"] = ["encode-latents"]
    home.config()
    command = [sys.executable, "-m", "stages.cli", "run", "--config", str(home.folder / "pipeline.yaml"), "--json"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not home.shards("latents"):
            assert started.poll() is None
            time.sleep(0.01)
        started.terminate()
        report = json.loads(started.communicate()[0])
    finally:
        started.kill()
    assert started.returncode == INCOMPLETE and report["remaining"] == 1, "one stage"
    assert report["details"]["stopped"].startswith("by SIGTERM")
    (row,) = report["details"]["stages"]
    assert row["stage"] == "encode-latents" and row["remaining"] > 0
    assert leftovers(home.root) == []
    with pytest.raises(ProcessLookupError):
        while True:  # processes that only wait for a parent detect its end a little later
            os.killpg(started.pid, 0)
            time.sleep(0.01)


def hanging() -> Callable[[object], object]:
    def read(request: object) -> object:
        time.sleep(600)
        return request

    return read


@pytest.mark.slow
def test_a_signal_is_obeyed_while_a_decoder_hangs(home, monkeypatch) -> None:
    monkeypatch.setattr(member_reader, "make_member_reader", hanging)
    before = signal.getsignal(signal.SIGTERM)

    def tell() -> None:
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.01)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    began = time.monotonic()
    report = home.run(encode_latents.run)
    assert report.details["stopped"].startswith("by SIGTERM; 8 units remain")
    assert time.monotonic() - began < 100 < home.config().stages.item_timeout_s
