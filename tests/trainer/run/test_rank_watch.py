"""A rank that dies, stops or hangs ends the run on all other ranks, which name it."""

import os
import signal
import time

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from schemas.errors import INCOMPLETE
from tests.trainer.runs import lines, on_ranks, write
from trainer.data import BatchLoader
from trainer.run.ranks import RunFiles
from trainer.setup import prepare

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]


@pytest.fixture
def run_ranks(ready, tmp_path):
    """run_ranks(timeout, codes, signals) -> the report of rank 0. signals: rank -> signal that the rank gets after a
    step."""

    def run(timeout: float, codes: tuple[int, int], signals: dict[int, int], strategy: str = "ddp") -> dict:
        config = ready("t2i", steps=100_000, parallel={"timeout": timeout, "strategy": strategy})
        path = write(config, tmp_path)

        def send(children: list[int]) -> None:
            deadline = time.monotonic() + 120
            while signals and not lines(config) and time.monotonic() < deadline:
                time.sleep(0.05)
            for rank, number in signals.items():
                os.kill(children[rank], number)
                if number == signal.SIGSTOP:
                    os.waitid(os.P_PID, children[1 - rank], os.WNOWAIT | os.WEXITED)
                    os.kill(children[rank], signal.SIGKILL)

        return on_ranks(path, codes, send)

    return run


@pytest.mark.long
def test_a_rank_that_is_killed(run_ranks) -> None:
    report = run_ranks(600, (INCOMPLETE, -signal.SIGKILL), {1: signal.SIGKILL})
    assert report["error"]["type"] == "RankLostError"
    assert report["error"]["message"].startswith("rank 1 (process ") and "not answered for 5 s" in str(report)


def test_a_rank_that_fails(run_ranks, monkeypatch) -> None:
    def step(self, number: int, real=BatchLoader.step):
        if self.rank == 1 and number == 1:
            raise FileNotFoundError("the disk has gone")
        return real(self, number)

    monkeypatch.setattr(BatchLoader, "step", step)
    report = run_ranks(600, (INCOMPLETE, 1), {})
    assert "rank 1 (process " in report["error"]["message"] and "the disk has gone" in report["error"]["message"]


@pytest.mark.long  # waits for train.parallel.timeout
def test_a_rank_that_is_stopped(run_ranks) -> None:
    """Most of it is waiting: 2 s of processor time."""
    report = run_ranks(20, (INCOMPLETE, -signal.SIGKILL), {1: signal.SIGSTOP})
    assert "has not answered for 20 s" in report["error"]["message"] and "rank 1 (" in report["error"]["message"]


@pytest.mark.long
def test_a_rank_that_hangs(run_ranks, monkeypatch) -> None:
    """In a read that never returns; the second rank waits for it."""

    def step(self, number: int, real=BatchLoader.step):
        while self.rank == 1 and number == 3:
            time.sleep(1)
        return real(self, number)

    monkeypatch.setattr(BatchLoader, "step", step)
    report = run_ranks(20, (INCOMPLETE, INCOMPLETE), {})
    message = report["error"]["message"]
    assert "rank 1 (" in message and "rank 0" not in message
    assert "has made no progress for 20 s (train.parallel.timeout) at reading step 4, in trainer/data.py" in message


@pytest.mark.long
def test_a_rank_that_fails_while_the_other_loads(run_ranks, monkeypatch) -> None:
    """The second rank would never finish loading."""

    def load(*args):
        while os.environ["RANK"] == "0":
            time.sleep(1)
        raise FileNotFoundError("the checkpoint is not here")

    monkeypatch.setattr(prepare, "load_transformer", load)
    message = run_ranks(20, (INCOMPLETE, 1), {})["error"]["message"]
    assert message.startswith("rank 1 (") and message.endswith("failed: FileNotFoundError: the checkpoint is not here")


@pytest.mark.long  # waits for train.parallel.timeout
def test_a_rank_that_hangs_in_its_turn_to_load(run_ranks, monkeypatch) -> None:
    """The second rank has loaded and waits: it is not behind."""

    def make_trainable(*args, real=prepare.make_trainable):
        while os.environ["RANK"] == "1":
            time.sleep(1)
        return real(*args)

    monkeypatch.setattr(prepare, "make_trainable", make_trainable)
    message = run_ranks(20, (INCOMPLETE, INCOMPLETE), {}, "fsdp2")["error"]["message"]
    assert message.startswith("rank 1 (") and "rank 0" not in message
    assert "has made no progress for 20 s (train.parallel.timeout) at adding the trained weights" in message


@pytest.mark.long
def test_a_rank_that_can_not_read_its_shards(run_ranks, monkeypatch, tmp_path) -> None:
    """While the run resumes; torch.distributed.checkpoint raises the same error on both ranks."""
    weights = {"weight": torch.ones(2)}
    checkpoint.save(weights, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "0")), no_dist=True)

    def find(files, newest, real=RunFiles.checkpoint):
        checkpoint.load(weights, storage_reader=HuggingFaceStorageReader(str(tmp_path / os.environ["RANK"])))
        return real(files, newest)

    monkeypatch.setattr(RunFiles, "checkpoint", find)
    message = run_ranks(600, (INCOMPLETE, 1), {})["error"]["message"]
    assert message.startswith("rank 1 (") and "failed: " in message and "No such file" in message
