"""Watchers: they are started, poll, end after SIGTERM, and never harm training."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache.runs.training_run import LOCK_NAME
from schemas.cli.console import Console, Options, Report
from schemas.interruption import StopHandler
from stages import report, run
from stages.follow import watchers
from stages.follow.watchers import Watch, Watcher, Watchers
from tests.background import until
from tests.processes import ForkedProgram
from tests.project import Project
from tests.stages.report_run import FakeRun, eval_line


def follow() -> None:
    """The main function of a watcher."""
    print(*sys.argv[1:], flush=True)
    watch = Watch([Path("absent")], 0.01)
    for number, last in enumerate(watch):
        print("poll", number, "last" * last, "stopped" * watch.is_stopped, flush=True)


def fail() -> None:
    sys.exit("the key of the service is wrong")


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    while True:
        time.sleep(1)


def late() -> None:
    print("begins", flush=True)
    until(lambda: signal.SIGTERM in signal.sigpending())
    follow()


def add_programs(mains: tuple[Callable[[], None], ...]) -> None:
    for main in mains:
        sys.modules[f"stages.{main.__name__}"] = SimpleNamespace(main=main)  # type: ignore[assignment]


@pytest.fixture
def pretend(forked_programs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """pretend(follow, fail) makes watchers of these functions, which end with the test."""
    programs: list[ForkedProgram] = []

    class Program(ForkedProgram):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            programs.append(self)

    def make(*mains: Callable[[], None], **options: Any) -> None:
        Program.prepare = partial(add_programs, mains)
        monkeypatch.setattr(watchers, "WATCHERS", tuple(Watcher(main.__name__, **options) for main in mains))

    monkeypatch.setattr(subprocess, "Popen", Program)
    yield make
    for process in programs:
        process.kill()
        process.wait()


def make_watchers(home: Project, handler: StopHandler | None = None, **options: Any) -> Watchers:
    run_options = Options(home.folder / "pipeline.yaml", ("train.seed=3",), **options)
    return Watchers(home.config(), run_options, Console(), handler or StopHandler(stop=lambda: None))


def log(home: Project, name: str) -> str:
    path = home.folder / f"output/run/logs/{name}.log"
    return path.read_text() if path.exists() else ""


def test_a_watcher_follows_until_its_stage_has_ended(project, pretend) -> None:
    home = project()
    pretend(follow)
    with make_watchers(home, json=True, device="cpu") as started:
        started.start("train")
        until(lambda: "poll 2" in log(home, "follow"))
        started.finish("bucket")
        assert "stopped" not in log(home, "follow")
        started.finish("train")
        lines = log(home, "follow").splitlines()
        assert lines[0] == f"--config {home.folder}/pipeline.yaml --set train.seed=3 --watch"
        assert lines[-1].endswith("last stopped") and sum("last" in line for line in lines) == 1
    assert started.failed == []


def test_one_without_a_stage_follows_until_run_ends(project, pretend) -> None:
    home = project()
    pretend(follow, stage=None)
    with make_watchers(home) as started:
        started.start()
        until(lambda: "poll" in log(home, "follow"))
        length = len(log(home, "follow"))
        started.finish("train")
        until(lambda: len(log(home, "follow")) > length)
    assert "stopped" in log(home, "follow") and started.failed == []


def test_one_that_fails_or_is_killed_is_named_with_its_log(project, pretend, capsys) -> None:
    home = project()
    pretend(fail, follow)
    with make_watchers(home) as started:
        started.start("train")
        until(lambda: "service" in log(home, "fail") and "poll" in log(home, "follow"))
        pid = started._running[watchers.WATCHERS[1]].pid
        lowest = 19  # the lowest priority of Linux
        expected = min(lowest, os.getpriority(os.PRIO_PROCESS, 0) + watchers.NICENESS)
        assert os.getpriority(os.PRIO_PROCESS, pid) == expected
        os.kill(pid, signal.SIGKILL)
        until(lambda: all(process.poll() is not None for process in started._running.values()))
    logs = home.folder / "output/run/logs"
    assert started.failed == [
        {"program": "fail", "exit_code": 1, "log": str(logs / "fail.log")},
        {"program": "follow", "exit_code": -9, "log": str(logs / "follow.log")},
    ]
    messages = capsys.readouterr().err
    assert f"fail --watch ended with exit code 1; log: {logs}/fail.log" in messages
    assert "follow --watch was killed (SIGKILL)" in messages


@pytest.mark.parametrize("interrupted", [False, True])
def test_one_that_does_not_finish_is_ended(project, pretend, monkeypatch, capsys, interrupted) -> None:
    """If `run` is interrupted, this is not a failure, because the next run does the remaining work."""
    home, handler = project(), StopHandler(stop=lambda: None)
    monkeypatch.setattr(watchers, "INTERRUPTED_S" if interrupted else "FINISH_S", 0.2)
    pretend(hang)
    with make_watchers(home, handler) as started:
        started.start("train")
        until(lambda: "deaf" in log(home, "hang"))
        handler.reason = "SIGTERM" if interrupted else ""
    assert [row["exit_code"] for row in started.failed] == ([] if interrupted else [-9])
    assert ("did not finish within 0 s" in capsys.readouterr().err) is not interrupted


def test_nothing_starts_without_its_library_its_use_or_training(project, pretend, monkeypatch, capsys) -> None:
    home = project()
    pretend(follow, library="absent_library")
    make_watchers(home).start("train")
    message = capsys.readouterr().err
    assert "follow" in message and "absent_library: pip install -e ." in message
    pretend(follow, applies=lambda config: config.train.seed == 5)
    make_watchers(home).start("train")
    pretend(follow)
    make_watchers(home, dry_run=True).start("train")
    monkeypatch.setattr(watchers, "read_progress", lambda config: SimpleNamespace(state="finished"))
    make_watchers(home).start("train")
    assert not (home.folder / "output").exists() and capsys.readouterr().err == ""


def test_run_ends_well_and_names_the_watcher_that_failed(project, pretend, monkeypatch) -> None:
    home, running = project(), list[Watchers]()
    pretend(fail)
    start = Watchers.start
    monkeypatch.setattr(Watchers, "start", lambda self, *stage: (running.append(self), start(self, *stage)))

    def train(self: Any, stage: str, options: Options) -> tuple[int, dict]:
        if stage == "train":
            until(lambda: all(process.poll() is not None for process in running[0]._running.values()))
        return 0, Report(stage, done=1, details={"page": "report.html"}).to_dict()

    monkeypatch.setattr(run.StageProcesses, "run", train)
    run_report = home.run(run.run, "stages.order=[index,train]")
    (row,) = run_report.details["watchers_that_failed"]
    assert (run_report.exit_code, run_report.done, row["program"], row["exit_code"]) == (0, 2, "fail", 1)
    assert "fail --watch; log: " in home.said


def hold(folder: Path) -> Any:
    """A trainer's lock."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK_NAME).open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_a_watch_ends_with_the_trainer_after_a_last_poll(tmp_path) -> None:
    lock = hold(tmp_path)
    polls = []
    for last in Watch([tmp_path / "other", tmp_path], 0.01):
        polls.append(last)
        if len(polls) == 3:
            lock.close()
    assert polls == [False, False, False, True]


def test_a_watch_waits_for_a_trainer_to_begin_but_not_for_ever(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(watchers, "START_S", 0.2)
    assert [*Watch([tmp_path], 0.01)][-1] is True


def test_a_watcher_of_run_continues_between_two_trainers_and_ends_after_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(watchers.RUN_PID_VARIABLE, str(os.getppid()))
    polls = []
    for last in Watch([tmp_path], 0.01):
        polls.append(last)
        if len(polls) == 3:
            monkeypatch.setenv(watchers.RUN_PID_VARIABLE, "1" if os.getppid() != 1 else "2")
    assert polls == [False, False, False, True]


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.slow
def test_the_report_is_made_again_when_there_is_something_new(project, monkeypatch, is_stopped) -> None:
    """After SIGTERM, `run` makes the last page."""
    home = project()
    trained = FakeRun(home)
    page, page_times = trained.folder / "report.html", []

    class Polls(Watch):
        def __init__(self, folders: list[Path]) -> None:
            assert folders == [trained.folder]
            super().__init__(folders)

        def __iter__(self) -> Iterator[bool]:
            yield False
            page_times.append(page.exists())
            trained.metrics(eval_line(3, 0.5))
            yield False
            page_times.append(page.stat().st_mtime_ns)
            yield False
            page_times.append(page.stat().st_mtime_ns)
            self.is_stopped = is_stopped
            yield True

    monkeypatch.setattr(report, "Watch", Polls)
    last_report = home.run(report.run, watch=True)
    assert page_times[0] is False and page_times[1] == page_times[2] and last_report.details["page"] == str(page)
    assert (page.stat().st_mtime_ns == page_times[2]) is is_stopped and last_report.done == 1 - is_stopped
    assert "with 1 validations, samples and scores" in home.said
