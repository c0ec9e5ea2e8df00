"""Progress of a program, and what it waits for: lines at the bottom of a terminal, elsewhere lines of a log.

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
from typing import TYPE_CHECKING, Protocol

from schemas.cli.interruption import check_stop
from schemas.text_format import escape_unprintable, format_bytes

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live

PROGRESS_INTERVAL_S = 5.0  # between lines of progress where there is no terminal
DELAY_S = 1.0  # what takes less is not shown
STILL_S = 30.0  # without a terminal: between lines of something that does not move
MOST_STILL_S = 960.0  # without a terminal: the same of what has no count, of which each pause is twice as long
TICK_S = 0.25  # between two checks of the clock
BAR_WIDTH, NARROWEST_BAR = 20, 8  # what has no room beside the narrower one is shown below it
MARGIN = 4  # columns that stay free beside a full line, for the terminal's "^C"; a further line would not be erased

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


class Display(Protocol):
    """Shows what goes on at the moment: several at a time, one inside the other."""

    def begin(self, task: Progress, at_once: bool, keep: bool) -> None: ...
    def end(self, task: Progress, keep: bool) -> None: ...


class NoDisplay:
    """Shows nothing."""

    def begin(self, task: Progress, at_once: bool, keep: bool) -> None:
        pass

    def end(self, task: Progress, keep: bool) -> None:
        pass


class TerminalDisplay:
    """At the bottom of a terminal a line for each that has gone on for DELAY_S, with a bar where the end is known.
    keep: it is shown from the beginning, and the line of what was not inside anything else stays at its end."""

    def __init__(self, terminal: "RichConsole") -> None:
        self._terminal, self._tasks, self._lock = terminal, list[Progress](), threading.RLock()
        self._live: Live | None = None
        self._at_once: set[Progress] = set()

    def begin(self, task: Progress, at_once: bool, keep: bool) -> None:
        from rich.live import Live

        with self._lock:
            self._tasks.append(task)
            if self._live is None:
                self._live = Live(
                    get_renderable=self._render, console=self._terminal, refresh_per_second=round(1 / TICK_S)
                )
                self._live.start()
            if at_once or keep:
                self._at_once.add(task)
            if at_once:
                self._live.refresh()

    def end(self, task: Progress, keep: bool) -> None:
        with self._lock:
            assert self._live is not None
            self._live.refresh()  # its end is seen, however short it was
            if self._tasks == [task]:
                self._live.transient = not keep
                self._live.stop()
                self._live = None
            self._tasks.remove(task)
            self._at_once.discard(task)

    def _render(self) -> "RenderableType":
        from rich.cells import cell_len
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        def add(*cells: "RenderableType") -> None:
            row = Table.grid(*(Column(overflow="fold") for _ in cells), padding=(0, 1))
            row.add_row(*cells)
            rows.append(row)

        rows, width = list[Table](), max(1, self._terminal.width - MARGIN)
        for task in list(self._tasks):
            if task.seconds < DELAY_S and task not in self._at_once:
                continue
            description, state = escape_unprintable(task.description), task.state()
            if task.total is None:
                add(Text(f"{description}, {state}" if state else description))
                continue
            room, below = width - cell_len(description) - 2, list[str]()
            while state and room - cell_len(state) < NARROWEST_BAR:  # its last words have a line of their own
                state, _, last = state.rpartition("  ")
                below.insert(0, last)
            size = min(BAR_WIDTH, room - cell_len(state)) if state else BAR_WIDTH
            bar = ProgressBar(total=max(task.total, 1e-9), completed=min(task.done, task.total), width=size)
            add(Text(description), bar, *([Text(state)] if state else []))
            if below:
                add(Text("  ".join(below)))
        return Constrain(Group(*rows), width)


class LineDisplay:
    """A line when something has gone on for DELAY_S, then one at most every `interval` seconds in which it moves, else
    every STILL_S, and of what has no count less and less often; keep: and one at its end."""

    def __init__(self, log: Callable[[str], None], clock: Clock, interval: float) -> None:
        self._log, self._clock, self._interval = log, clock, interval
        self._lock = threading.RLock()
        self._last: dict[Progress, float] = {}  # when each was shown, or begun
        self._shown: set[Progress] = set()
        self._ticker: threading.Thread | None = None

    def begin(self, task: Progress, at_once: bool, keep: bool) -> None:
        with self._lock:
            self._last[task] = self._clock()
            task.moved = lambda: self._show(task, self._interval) if task.done else None
            if at_once:
                self._show(task, 0)
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
                self._ticker.start()

    def end(self, task: Progress, keep: bool) -> None:
        with self._lock:
            del self._last[task]
            self._shown.discard(task)
            if keep:
                self._log(f"{task.description}: {task.final_state()}")

    def _show(self, task: Progress, after: float) -> None:
        """Unless it is at its end, of which there is a line of its own."""
        with self._lock:
            now = self._clock()
            if task not in self._last or now - self._last[task] < after or task.done == task.total:
                return
            self._last[task] = now
            first = task not in self._shown and not task.counts and not task.says
            self._shown.add(task)
            self._log(task.description if first else f"{task.description}: {task.state()}")

    def _tick(self) -> None:
        while True:
            with self._lock:
                if not self._last:
                    self._ticker = None
                    return
                for task in list(self._last):
                    self._show(task, self._pause(task))
            time.sleep(TICK_S)

    def _pause(self, task: Progress) -> float:
        """Until the next line of what does not move."""
        if task not in self._shown and not task.done:
            return DELAY_S
        gone = task.seconds - (self._clock() - self._last[task])  # at the last line
        return STILL_S if task.counts else min(MOST_STILL_S, max(STILL_S, gone))


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
