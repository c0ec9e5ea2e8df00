"""Where `decode --watch` decodes, and what it leaves to the trainer there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages import decode
from stages.follow import watchers
from tests.processes import processes
from tests.project import Project
from tests.stages.follow.test_watchers import hold
from tests.stages.report_run import FakeRun, step_line
from tests.stages.test_decode_watch import add, picture, script  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [
        ("auto", None, "cpu"),
        ("cpu", None, "cpu"),
        ("cuda:1", None, "cuda:1"),
        ("auto", "cuda:2", "cuda:2"),
        ("cuda:1", "cpu", "cpu"),
    ],
)
def test_the_device_beside_training(
    request: pytest.FixtureRequest, project: Callable[..., Project], monkeypatch, configured, given, expected
) -> None:
    home, devices = project(stages={"decode": {"device": configured}}), []

    def note_device(self: Any, stage: str, options: Any) -> tuple[int, dict[str, int]]:
        devices.append(options.device)
        return 0, {"done": 1}

    monkeypatch.setattr(decode.StageProcesses, "run", note_device)
    trained = FakeRun(home)
    trained.metrics(step_line(4))
    add(home, "cat")
    request.getfixturevalue("script")(lambda: None, told=True)
    assert home.run(decode.run, watch=True, device=given).done == 1
    assert devices == [expected]


def test_on_the_trainers_card_nothing_is_decoded_while_it_validates(
    request: pytest.FixtureRequest, project: Callable[..., Project], monkeypatch
) -> None:
    """Between validations it is, a step after them."""
    home, rounds = project(stages={"decode": {"device": "cuda"}}), []
    monkeypatch.setattr(decode.StageProcesses, "run", lambda *given: (rounds.append(1), (0, {"done": 1}))[1])
    trained, seen = FakeRun(home), []
    trained.metrics(step_line(3))
    add(home, "cat", 3)

    def train_a_step() -> None:
        seen.append(len(rounds))
        trained.metrics(step_line(4))

    request.getfixturevalue("script")(train_a_step, lambda: seen.append(len(rounds)), told=True)
    home.run(decode.run, watch=True)
    assert seen == [0, 1]


def children() -> set[int]:
    return {number for number, parent, _ in processes() if parent == os.getpid()}


@pytest.mark.slow
def test_between_two_validations_no_process_holds_memory(
    request: pytest.FixtureRequest, forked_programs: None, project: Callable[..., Project]
) -> None:
    """Of this process' own children: a pool of decoders that an earlier test left has a server between."""
    home, running = project(), []
    add(home, "cat")
    before = children()
    look = lambda: running.append((picture(home, "cat").exists(), children() - before))  # noqa: E731
    request.getfixturevalue("script")(look, told=True)
    home.run(decode.run, watch=True)
    assert running == [(True, set())]


def test_memory_is_limited_where_others_may_use_the_card(tmp_path: Path, monkeypatch) -> None:
    assert not decode._may_be_shared(tmp_path), "after training it has the card"
    with hold(tmp_path):
        assert decode._may_be_shared(tmp_path)
    monkeypatch.setattr(decode, "is_running", lambda folder: None)
    assert decode._may_be_shared(tmp_path), "nobody knows"
    monkeypatch.setattr(decode, "is_running", lambda folder: False)
    monkeypatch.setenv(watchers.BESIDE, "7")
    assert decode._may_be_shared(tmp_path), "the encoding stages may be at work"
