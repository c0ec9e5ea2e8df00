"""Activities: the current work of a program, and its progress.

Code that takes long, in any module, announces itself by a context and does not depend on the program:

    with activity(f"loading {name}"): ...
    with activity(f"reading {path}", total=size, unit="bytes") as task: task.advance(len(piece))

The console of the program shows the activity. In a process without a console, such as a worker, and outside the main
thread nothing is shown.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Protocol

from schemas.interruption import check_stop
from schemas.text_format import format_bytes

DELAY_S = 1.0  # shorter activities are not shown
STILL_S = 30.0  # without progress, after which the time since the last progress is shown

Clock = Callable[[], float]


class Progress:
    """Counts the units done of `total` (None: unknown). Safe to advance from several threads.

    The rate is measured from the first advance, so that loading a model does not count. `advance(0)` starts it, too.
    """

    def __init__(self, total: float | None, description: str, unit: str = "items", clock: Clock = time.monotonic):
        self.total, self.description, self.unit, self.done = total, description, unit, 0.0
        self.moved: Callable[[], None] = lambda: None  # called after each advance
        self.measure: Callable[[], float] | None = None  # returns the units done; called whenever they are shown
        self._clock, self._lock, self._begin = clock, threading.Lock(), clock()
        self._first: tuple[float, float] | None = None  # time and count of the first advance
        self._text, self._text_time = "", clock()

    def say(self, done: float, text: str) -> None:
        """Set the number of units done, and the text that is shown instead of the count."""
        self.done, self._text, self._text_time = done, text, self._clock()

    def advance(self, n: float = 1) -> None:
        """Add `n` units. In the main thread, raises Stopped if the program was asked to stop."""
        with self._lock:
            self.done += n
            self._first = self._first or (self._clock(), self.done)
            self.moved()
        if threading.current_thread() is threading.main_thread():
            check_stop()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    @property
    def has_text(self) -> bool:
        """Whether a text was set by `say`."""
        return bool(self._text)

    @property
    def is_counted(self) -> bool:
        """Whether units are counted; False if only the time is shown."""
        return self.total is not None or bool(self.unit)

    def state(self) -> str:
        """Like "12/140 units, 1.5 units/s, 0:01:25 left"; "0/140 units, 0:00:07" until a rate is measured."""
        if self.measure is not None:
            self.done = max(self.done, self.measure())
            self._first = self._first or (self._clock(), self.done)
        if self._text:
            age = self._clock() - self._text_time
            return self._text + (f"  ({format_seconds(age)} ago)" if age >= STILL_S else "")
        words = self._measured()
        if len(words) < 2 and self.seconds >= DELAY_S:
            words.append(format_seconds(self.seconds))
        return ", ".join(words)

    def final_state(self) -> str:
        """The state at the end, like "140/140 units, 1.5 units/s, after 0:01:33"."""
        return ", ".join([*(self._measured() or ["done"]), f"after {format_seconds(self.seconds)}"])

    def _measured(self) -> list[str]:
        """Count, rate and time left; unknown values are omitted."""
        if not self.is_counted:
            return []
        start, first_count = self._first or (self._clock(), self.done)
        elapsed = self._clock() - start
        rate = (self.done - first_count) / elapsed if elapsed > 0 else 0.0
        words = [self._amount(self.done, self.total)]
        if rate > 0:
            words.append(f"{self._amount(float(f'{rate:.3g}') if rate < 100 else round(rate))}/s")
        if self.total is not None and rate > 0 and self.done < self.total:
            words.append(f"{format_seconds((self.total - self.done) / rate)} left")
        return words

    def _amount(self, number: float, total: float | None = None) -> str:
        """Like "12/140 units" or "1.2 of 15.4 GiB"."""
        if self.unit == "bytes":
            return format_bytes(number) + ("" if total is None else f" of {format_bytes(total)}")
        return f"{number:.10g}" + ("" if total is None else f"/{total:.10g}") + f" {self.unit}"


def format_seconds(seconds: float) -> str:
    """Like 0:01:25."""
    return str(timedelta(seconds=round(seconds)))


class ActivityConsole(Protocol):
    """The methods of a console that this module calls."""

    def activity(
        self, description: str, *, total: float | None = None, unit: str = "", keep: bool = False, at_once: bool = False
    ) -> AbstractContextManager[Progress]: ...
    def log(self, message: str) -> None: ...


_console: ActivityConsole | None = None
_say: Callable[[str], object] | None = None


def show_activities(console: ActivityConsole | None) -> None:
    """Set the console that shows this process's activities; None: they are not shown."""
    global _console
    _console = console


def announce_by(say: Callable[[str], object] | None) -> None:
    """Make `announce` call `say`, by which a worker process sends its messages to the program that shows them."""
    global _say
    _say = say


def announce(message: str) -> None:
    """Show a line about the current work. Can be called from any thread."""
    if _say is not None:
        _say(message)
    elif _console is not None:
        _console.log(message)


@contextmanager
def activity(
    description: str, *, total: float | None = None, unit: str = "", keep: bool = False, at_once: bool = False
) -> Iterator[Progress]:
    """Show an activity while the body runs. total: number of units that the body advances to. unit: name of the units;
    "bytes" are shown as sizes, and "" is not counted. keep: whether the end is shown, too, with the time taken.
    at_once: whether the activity is shown without delay; an import needs this because no other thread runs while it
    reads a library from a cold disk. Raises Stopped if the program was asked to stop before."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        check_stop()
    if _console is None or not is_main:
        yield Progress(total, description, unit)
        return
    with _console.activity(description, total=total, unit=unit, keep=keep, at_once=at_once) as task:
        yield task
