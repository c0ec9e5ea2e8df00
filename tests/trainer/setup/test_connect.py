"""Ranks that do not connect, and output folders that machines do not share; two processes on one machine."""

import os
import socket

import pytest

from cache.runs.training_run import RunError
from schemas.config.training import Parallel
from tests.processes import free_port
from trainer.run.ranks import RankLostError
from trainer.setup.wrap import connect_ranks


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the first of two ranks."""
    result = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in result.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_a_port_that_is_taken_is_named(launched: None) -> None:
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        busy_socket.listen()
        with pytest.raises(RankLostError) as caught:
            connect_ranks("cpu", Parallel(timeout=30))
    assert f"rank 0 can't listen at port {os.environ['MASTER_PORT']}" in caught.value.message


def test_ranks_that_do_not_come_are_named(launched: None) -> None:
    with pytest.raises(RankLostError) as caught:
        connect_ranks("cpu", Parallel(timeout=2))
    assert f"connected: 0 on {socket.gethostname()}" in caught.value.message


def test_a_machine_that_can_not_be_reached_is_named(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RankLostError) as caught:
        connect_ranks("cpu", Parallel(timeout=0.2))
    assert f"rank 1 can't reach 127.0.0.1:{os.environ['MASTER_PORT']}" in caught.value.message


def test_a_launcher_that_does_not_say_where_rank_0_is(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(RunError, match="WORLD_SIZE is 2, and MASTER_ADDR is not set"):
        connect_ranks("cpu", Parallel())
