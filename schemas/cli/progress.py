"""How activities are shown: lines at the bottom of a terminal, elsewhere lines of a log."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from schemas.activities import DELAY_S, STILL_S, Clock, Progress
from schemas.text_format import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.text import Text

PROGRESS_INTERVAL_S = 5.0  # between lines of progress that are not on a terminal
TICK_S = 0.25  # between two checks of the clock
BAR_WIDTH = 12
MARGIN = 4  # columns that stay free next to a full line, for the terminal's "^C"; a further line would not be erased


class Display:
    """Shows what goes on at the moment: several at a time, one inside the other, each from its DELAY_S on.

    On a terminal each is a line at the bottom, with a bar if the end is known. Elsewhere, and in a kept log, it is a
    line at most every `interval` seconds in which it moves, else after STILL_S, and without a count less and less
    often. keep, of begin: it is shown from the beginning, and so is its end.
    """

    def __init__(self, log: Callable[[str], None], clock: Clock, interval: float) -> None:
        self._log, self._clock, self._interval = log, clock, interval
        self._lock = threading.RLock()
        self._tasks = dict[Progress, tuple[float, float | None]]()  # -> when its last line was, and what was done then
        self._at_once: set[Progress] = set()
        self._terminal: RichConsole | None = None
        self._live: Live | None = None
        self._ticks = False

    def use_terminal(self, terminal: "RichConsole") -> None:
        self._terminal = terminal

    def begin(self, task: Progress, *, at_once: bool, keep: bool) -> None:
        with self._lock:
            self._tasks[task] = self._clock(), None
            if at_once or keep:
                self._at_once.add(task)
            if self._terminal is not None:
                self._show_live(at_once)
                return
            task.moved = lambda: self._write(task)
            if at_once:
                self._write(task, now=True)
            if not self._ticks:
                self._ticks = True
                threading.Thread(target=self._tick, name="progress", daemon=True).start()

    def end(self, task: Progress, *, keep: bool) -> None:
        with self._lock:
            if self._live is not None:
                self._live.refresh()  # its end is seen, however short it was
                if [*self._tasks] == [task]:
                    self._live.transient = not keep
                    self._live.stop()
                    self._live = None
            elif keep:
                self._log(f"{task.description}: {task.final_state()}")
            del self._tasks[task]
            self._at_once.discard(task)

    # --- lines of a log ---

    def _write(self, task: Progress, now: bool = False) -> None:
        """Write a line about a task if it is time for one; not at its end, which has a line of its own."""
        with self._lock:
            if task not in self._tasks or task.done == task.total:
                return
            last, done = self._tasks[task]
            since, first = self._clock() - last, done is None
            if task.done != (done or 0):
                pause = self._interval
            elif first:
                pause = DELAY_S
            else:
                pause = STILL_S if task.counts else max(STILL_S, task.seconds - since)
            if now or since >= pause:
                self._tasks[task] = self._clock(), task.done
                is_plain = first and not task.counts and not task.says
                self._log(task.description if is_plain else f"{task.description}: {task.state()}")

    def _tick(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._ticks = False
                    return
                for task in list(self._tasks):
                    self._write(task)
            time.sleep(TICK_S)

    # --- the bottom of a terminal ---

    def _show_live(self, at_once: bool) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._terminal, refresh_per_second=round(1 / TICK_S))
            self._live.start()
        if at_once:
            self._live.refresh()

    def _render(self) -> "Text":
        from rich.text import Text

        assert self._terminal is not None
        lines = Text(overflow="fold")
        for task in list(self._tasks):
            if task.seconds < DELAY_S and task not in self._at_once:
                continue
            line, state = Text(escape_unprintable(task.description)), task.state()
            if task.total is not None:
                done = round(BAR_WIDTH * min(1.0, task.done / max(task.total, 1e-9)))
                line.append(" ").append("━" * done, "green").append("━" * (BAR_WIDTH - done), "bright_black")
                line.append(f" {state}")
            elif state:
                line.append(f", {state}")
            for part in line.wrap(self._terminal, max(1, self._terminal.width - MARGIN)):
                lines.append(part).append("\n")
        lines.right_crop(1 if lines else 0)
        return lines
