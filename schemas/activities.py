"""What a program does at the moment, and how far it is.

Whatever takes a while says so where it happens, in any module, without knowing the program:

    with activity(f"loading {name}"): ...
    with activity(f"reading {path}", total=size, unit="bytes") as task: task.advance(len(piece))

The console of the program shows it. In a process that has none, such as a worker's, and outside the main thread
nothing is shown.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Protocol

from schemas.interruption import check_stop
from schemas.text_format import format_bytes

DELAY_S = 1.0  # what takes less is not shown
STILL_S = 30.0  # after which it is said how long something has not moved

Clock = Callable[[], float]


class Progress:
    """Counts the units done of `total` (None: unknown). Safe to advance from several threads.

    The rate is measured from the first advance on, so that loading a model does not count; 0 starts it, too.
    """

    def __init__(self, total: float | None, description: str, unit: str = "items", clock: Clock = time.monotonic):
        self.total, self.description, self.unit, self.done = total, description, unit, 0.0
        self.moved: Callable[[], None] = lambda: None  # called after each advance
        self.measure: Callable[[], float] | None = None  # how many units are done, asked whenever that is shown
        self._clock, self._lock, self._begin = clock, threading.Lock(), clock()
        self._first: tuple[float, float] | None = None  # time and count of the first advance
        self._text, self._said = "", clock()

    def say(self, done: float, text: str) -> None:
        """`done` units are done, and `text` is shown in place of the count."""
        self.done, self._text, self._said = done, text, self._clock()

    def advance(self, n: float = 1) -> None:
        """In the main thread Stopped is raised if the program was asked to stop."""
        with self._lock:
            self.done += n
            self._first = self._first or (self._clock(), self.done)
            self.moved()
        if threading.current_thread() is threading.main_thread():
            check_stop()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._begin

    @property
    def says(self) -> bool:
        """Tell whether it has a text of its own, by `say`."""
        return bool(self._text)

    @property
    def counts(self) -> bool:
        """False of an activity, of which only the time is known."""
        return self.total is not None or bool(self.unit)

    def state(self) -> str:
        """Like "12/140 units, 1.5 units/s, 0:01:25 left"; "0/140 units, 0:00:07" as long as there is no rate."""
        if self.measure is not None:
            self.done = max(self.done, self.measure())
            self._first = self._first or (self._clock(), self.done)
        if self._text:
            still = self._clock() - self._said
            return self._text + (f"  ({format_seconds(still)} ago)" if still >= STILL_S else "")
        words = self._measured()
        if len(words) < 2 and self.seconds >= DELAY_S:
            words.append(format_seconds(self.seconds))
        return ", ".join(words)

    def final_state(self) -> str:
        """The same at the end, like "140/140 units, 1.5 units/s, after 0:01:33"."""
        return ", ".join([*(self._measured() or ["done"]), f"after {format_seconds(self.seconds)}"])

    def _measured(self) -> list[str]:
        """Count, rate and time left, as far as they are known."""
        if not self.counts:
            return []
        start, counted = self._first or (self._clock(), self.done)
        elapsed = self._clock() - start
        rate = (self.done - counted) / elapsed if elapsed > 0 else 0.0
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


class Shower(Protocol):
    """A console, as far as this module knows it."""

    def activity(
        self, description: str, *, total: float | None = None, unit: str = "", keep: bool = False, at_once: bool = False
    ) -> AbstractContextManager[Progress]: ...
    def log(self, message: str) -> None: ...


_shower: Shower | None = None
_say: Callable[[str], object] | None = None


def show_activities(shower: Shower | None) -> None:
    """From now on this process' activities are shown there; None: nowhere."""
    global _shower
    _shower = shower


def announce_by(say: Callable[[str], object] | None) -> None:
    """From now on `announce` calls `say`: a worker's process hands its messages to the program that shows them."""
    global _say
    _say = say


def announce(message: str) -> None:
    """A line about what goes on, from any thread."""
    if _say is not None:
        _say(message)
    elif _shower is not None:
        _shower.log(message)


@contextmanager
def activity(
    description: str, *, total: float | None = None, unit: str = "", keep: bool = False, at_once: bool = False
) -> Iterator[Progress]:
    """Show what is being done while the body lasts. total: of the units that the body advances by; unit: "bytes" are
    shown as sizes, and "" has no count. keep: the end is shown, too, with the time that it took. at_once: from the
    first moment on, as of an import, which lets no other thread run while it reads a library from a cold disk. Raises
    Stopped if the program was asked to stop before."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        check_stop()
    if _shower is None or not is_main:
        yield Progress(total, description, unit)
        return
    with _shower.activity(description, total=total, unit=unit, keep=keep, at_once=at_once) as task:
        yield task
