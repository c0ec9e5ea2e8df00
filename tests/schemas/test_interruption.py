"""--max-time, and signals, which set a flag. For the programs, see test_interruption.py in tests/stages/encoding and in
tests/trainer/run."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import typer

from schemas.activities import activity
from schemas.errors import INTERRUPTED
from schemas.interruption import (
    PARENT_VARIABLE,
    StopHandler,
    check_stop,
    child_environment,
    end_with_parent,
    parse_duration,
    pause,
    wait_for,
)
from tests.background import LIMIT_S, until
from tests.processes import processes


@pytest.mark.parametrize(
    ("text", "seconds"), [("45", 45), ("45s", 45), ("90m", 5400), ("3h", 10800), ("1h30m", 5400), ("02:30:05", 9005)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "-3h", "3 h", "1:2", "1:99:00"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="1h30m"):
        parse_duration(text)


@contextmanager
def signaled(number: signal.Signals, after_s: float = 0.1) -> Iterator[None]:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("wait", [lambda: pause(LIMIT_S), lambda: wait_for(Future())])
def test_a_signal_ends_what_waits(number: signal.Signals, wait) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    handler, began = StopHandler(), time.monotonic()
    with handler.stop_on_signals(), signaled(number):
        wait()
    assert handler.reason == number.name and time.monotonic() - began < LIMIT_S / 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_no_exception_is_raised_but_by_a_check() -> None:
    handler, reached = StopHandler(), []
    with handler.stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append(handler.reason)
        with suppress(ValueError):
            try:
                check_stop()
            finally:  # the clean-up is not stopped
                check_stop()
                reached.append("cleaned up")
        reached.append("not here")
    assert reached == ["SIGTERM", "cleaned up"]


@pytest.mark.parametrize("step", [lambda: activity("loading").__enter__(), lambda: pause(0)])
def test_a_program_that_ends_in_its_own_way_is_not_stopped_by_checks(step) -> None:
    stopped = threading.Event()
    handler = StopHandler(stop=stopped.set)
    with handler.stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(LIMIT_S)
        step()
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler repeats it
        step()
    assert handler.reason == "SIGTERM"


def test_the_innermost_handler_is_asked_and_only_that() -> None:
    outer, inner = StopHandler(), StopHandler(max_time=0.05)
    with outer.stop_on_signals():
        with inner.stop_on_signals():
            pause(LIMIT_S)
        check_stop()
        os.kill(os.getpid(), signal.SIGTERM)  # the same request, from a launcher
        check_stop()
    assert (outer.reason, inner.reason) == ("", "--max-time")


def test_a_signal_before_the_body_ends_the_body() -> None:
    outer, inner = StopHandler(), StopHandler()
    with outer.stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with inner.stop_on_signals():
            check_stop()
            pytest.fail("it was not stopped")
        check_stop()
    assert (outer.reason, inner.reason) == ("", "SIGTERM")


PROGRAM = """
import multiprocessing, os, subprocess, sys, time
from schemas.interruption import StopHandler, end_with_this

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    end_with_this(program)
    with StopHandler(stop=lambda: print("stopping", flush=True)).stop_on_signals():
        print(child.pid, program.pid, flush=True)
        time.sleep(600)
"""


def test_ctrl_c_again_ends_it_and_its_children_at_once_and_sigterm_again_does_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert program.stdout
    children = [int(word) for word in program.stdout.readline().split()]
    program.send_signal(signal.SIGTERM)
    assert program.stdout.readline() == "stopping\n"
    time.sleep(1.1)
    program.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.5)
    program.send_signal(signal.SIGINT)
    assert program.wait(LIMIT_S) == INTERRUPTED
    assert len(children) == 2
    until(lambda: not {*children} & {number for number, _, _ in processes()}, "the end of its children")


@pytest.mark.parametrize("handled", [True, False])
def test_a_program_whose_parent_is_gone_ends_as_by_sigterm(tmp_path: Path, handled: bool) -> None:
    """A parent that starts a program and is killed while that works."""
    reading, writing = os.pipe()

    def program(environment: dict[str, str]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(environment)
        end_with_parent()
        assert PARENT_VARIABLE not in os.environ, "its child has a different parent"
        os.write(writing, b"1")
        if handled:
            with StopHandler(stop=lambda: (os.write(writing, b"S"), os._exit(0))).stop_on_signals():
                time.sleep(60)
        time.sleep(60)

    parent = os.fork()
    if parent == 0:
        environment = child_environment()
        if os.fork() == 0:
            os.close(reading)
            try:
                program(environment)
            finally:
                os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"1"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(reading, 1) == (b"S" if handled else b""), "the pipe is closed when it has ended"
    os.close(reading)


def test_a_program_that_was_not_started_by_another_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before


PROGRAMS = ("run", "train", "queue", "ui", "discover", "status", "encode-text", "bucket")
START_S = 3.0  # in which a program has begun to work
ENDS_S = 60.0  # in which each program ends, after the second signal


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 4), pytest.param(2, 200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_programs_end_at_ctrl_c_at_any_moment_of_their_start(project, seed: int, count: int) -> None:
    """Imports included: nothing is raised in them, and no lock stays held."""
    home = project()
    for number in range(20):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.config()
    moments = random.Random(seed)
    for number in range(count):
        program = PROGRAMS[number % len(PROGRAMS)]
        options = ["--port", "0"] if program == "ui" else ["run"] if program == "queue" else []
        command = [
            sys.executable,
            "-m",
            "stages.cli",
            program,
            *options,
            "--config",
            str(home.folder / "pipeline.yaml"),
        ]
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        moment = moments.uniform(0, START_S)
        with suppress(subprocess.TimeoutExpired):
            started.wait(moment)
        for _ in range(2):
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    started.wait(1.1)
        try:
            output, _ = started.communicate(timeout=ENDS_S)  # also of the processes that it started
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            pytest.fail(f"{program}, interrupted after {moment:.2f} s, does not end: {started.communicate()[0]!r}")
        before_first_line = started.returncode == 1 and output.rstrip().endswith(b"KeyboardInterrupt")  # Python's own
        assert before_first_line or started.returncode in (0, 2, 3, INTERRUPTED, -signal.SIGINT), (program, output)
        until(lambda started=started: all(session != started.pid for _, _, session in processes()), "the end of all")
