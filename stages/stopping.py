"""Told to stop (Ctrl-C, SIGTERM, the end of --max-time), a stage drops the unit it is at and says what remains."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

_TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?|(\d+):([0-5]\d):([0-5]\d)")


def parse_time(text: str) -> float:
    """Seconds of "90m", "3h", "1h30m", "02:30:00" or "45"; anything else is wrong usage."""
    match = _TIME.fullmatch(str(text))
    hours, minutes, seconds = (int(first or second or 0) for first, second in zip(*_halves(match), strict=True))
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise typer.BadParameter(f"{text!r} is no time; valid are 3h, 90m, 1h30m, 02:30:00 and 45 (seconds)")
    return float(total)


def _halves(match: re.Match[str] | None) -> tuple[tuple, tuple]:
    return (match.groups()[:3], match.groups()[3:]) if match else ((0,) * 3, (0,) * 3)


MaxTime = Annotated[
    float | None,
    typer.Option(
        "--max-time",
        parser=parse_time,
        metavar="TIME",
        help="Stop after 3h, 90m or 02:30:00; what is left remains for the next run.  [default: none]",
    ),
]


class Stopping:
    """reason: why the work was stopped, "" where it was not."""

    reason = ""
    _ending = False

    @contextmanager
    def by_signals(self, max_time: float | None) -> Iterator[None]:
        """The body ends at the first SIGINT or SIGTERM, or `max_time` seconds from now, after its context managers
        have cleaned up. A second Ctrl-C ends the program."""
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        timer = threading.Timer(max_time or 0, self._time_is_up)
        timer.daemon = True
        before = {number: signal.signal(number, self._told) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if max_time is not None:
                timer.start()
            yield
        except KeyboardInterrupt:
            if not self.reason:
                raise
        finally:
            timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        # A second SIGTERM, as schedulers send to each process of a group, must not disturb the cleaning up.
        if not self._ending or number == signal.SIGINT:
            self._ending = True
            raise KeyboardInterrupt

    def _time_is_up(self) -> None:
        if not self.reason:
            self.reason = "--max-time"
            os.kill(os.getpid(), signal.SIGTERM)
