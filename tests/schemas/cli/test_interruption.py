"""--max-time is read, and signals interrupt waiting. What they do: test_interruption.py in tests/stages/encoding and in
tests/trainer."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from schemas.cli.interruption import (
    PARENT_VARIABLE,
    StopHandler,
    child_environment,
    end_with_parent,
    interrupted_by_sigterm,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("45", 45), ("45s", 45), ("90m", 5400), ("3h", 10800), ("1h30m", 5400), ("02:30:05", 9005)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "soon", "-3h", "3 h", "1:2", "1:99:00"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="1h30m"):
        parse_duration(text)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_ctrl_c_that_comes_with_another_signal_does_not_wait() -> None:
    """Of a process with several threads: the kernel then gives one of the two signals to another thread."""

    def wait_for_second() -> None:
        received = []

        def stop() -> None:
            received.append(time.monotonic())
            if len(received) == 2:
                os._exit(0)
            os.write(writing, b"1")

        with StopHandler(stop=stop).stop_on_signals():
            for _ in range(3):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            os.write(writing, b"0")
            time.sleep(60)

    for _ in range(10):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            wait_for_second()
        os.read(reading, 1)
        os.kill(child, signal.SIGTERM)
        os.read(reading, 1)
        began = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, number)
        assert os.waitpid(child, 0)[1] == 0 and time.monotonic() - began < 30
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("handled", [True, False])
def test_a_program_whose_parent_is_gone_ends_as_by_sigterm(tmp_path: Path, handled: bool) -> None:
    """A parent that starts a program and is killed while that works."""
    reading, writing = os.pipe()

    def program(environment: dict[str, str]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(environment)
        end_with_parent()
        assert PARENT_VARIABLE not in os.environ, "what it starts has another parent"
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


def test_a_signal_before_the_body_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.set_wakeup_fd

    def interrupted(*args: Any, **options: Any) -> int:
        found = install(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    before = signal.getsignal(signal.SIGTERM)
    handler, done = StopHandler(), False
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(signal, "set_wakeup_fd", interrupted)
        with handler.stop_on_signals():
            done = True
    signal.set_wakeup_fd(-1)
    assert not done and handler.reason == "SIGTERM" and signal.getsignal(signal.SIGTERM) == before


class InterruptedOnEnter(threading.Condition):
    def __enter__(self) -> bool:
        taken = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)
        return taken


class InterruptedOnExit(threading.Condition):
    def __exit__(self, *error: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)
        super().__exit__(*error)


@pytest.mark.parametrize("condition", [InterruptedOnEnter, InterruptedOnExit])
@pytest.mark.parametrize("body", [interrupted_by_sigterm, lambda: StopHandler().stop_on_signals()])
def test_an_interrupt_leaves_no_lock_taken(condition: type[threading.Condition], body: Any) -> None:
    """Otherwise a thread that has a result would wait for ever, and the program for that thread."""
    future: Future = Future()
    future._condition = condition()
    began = time.monotonic()
    with suppress(KeyboardInterrupt), body():
        with suppress(TimeoutError):
            future.result(timeout=0.001)
        while True:
            assert time.monotonic() - began < 60, "it was not interrupted"
    setting = threading.Thread(target=future.set_result, args=(None,), daemon=True)
    setting.start()
    setting.join(60)
    assert not setting.is_alive()
