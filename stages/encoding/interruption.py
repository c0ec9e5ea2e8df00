"""Told to stop (Ctrl-C, SIGTERM, the end of --max-time), a stage drops the unit it is at and says what remains."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

_TIME_PATTERN = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,7})m)?(?:(\d{1,8})s?)?|(\d{1,6}):([0-5]\d):([0-5]\d)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds of "90m", "3h", "1h30m", "02:30:00" or "45"; anything else is wrong usage."""
    match = _TIME_PATTERN.fullmatch(str(text))
    hours, minutes, seconds = (int(first or second or 0) for first, second in zip(*_time_groups(match), strict=True))
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise typer.BadParameter(f"{text!r} is no time; valid are 3h, 90m, 1h30m, 02:30:00 and 45 (seconds)")
    return float(total)


def _time_groups(match: re.Match[str] | None) -> tuple[tuple, tuple]:
    return (match.groups()[:3], match.groups()[3:]) if match else ((0,) * 3, (0,) * 3)


MaxTimeOption = Annotated[
    float | None,
    typer.Option(
        "--max-time",
        parser=parse_duration,
        metavar="TIME",
        help="Stop after 3h, 90m or 02:30:00; what is left remains for the next run.  [default: none]",
    ),
]


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


class StopHandler:
    """At the first SIGINT or SIGTERM, or when `max_time` seconds from now have passed, `stop` is called: as it is, the
    body of `by_signals` ends after its context managers have cleaned up, and a second Ctrl-C ends the program.

    reason: why the work was stopped, "" where it was not.
    """

    def __init__(self, max_time: float | None = None, stop: Callable[[], object] = _raise_interrupt) -> None:
        self.reason = ""
        self._stop, self._is_stopping = stop, False
        self._end = None if max_time is None else time.monotonic() + max_time

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        left = 0 if self._end is None else max(0.0, self._end - time.monotonic())
        timer = threading.Timer(left, self._on_timeout)
        timer.daemon = True
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self._end is not None:
                timer.start()
            yield
        except KeyboardInterrupt:
            if not self.reason:
                raise
        finally:
            timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        # A second SIGTERM, as schedulers send to each process of a group, must not disturb the cleaning up.
        if not self._is_stopping or number == signal.SIGINT:
            self._is_stopping = True
            self._stop()

    def _on_timeout(self) -> None:
        if not self.reason:
            self.reason = "--max-time"
            os.kill(os.getpid(), signal.SIGTERM)
