"""Units on this machine: in this process for one worker, in spawned processes for several.

Each process loads the model once and holds a few units, so that it can read ahead. If a process dies (by the
out-of-memory killer), each of its units is tried again by a process that has no other unit, and a unit whose process
dies again is reported as failed. A process that dies while it loads has touched no unit: it is started again, and if
it keeps dying, the stage ends.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any, cast

from cache.sets.plans import Unit
from schemas.activities import activity, announce, announce_by
from schemas.errors import LatentpressError
from schemas.interruption import WAIT_S, StopHandler, Stopped, check_stop, signals_blocked
from stages.engines.jobs import Job, Load, UnitResult

MAX_UNIT_TRIES = 2  # of a unit that was its process' only one when that died
MAX_LOAD_TRIES = 3  # of a process that dies while it loads
MAX_UNITS_PER_PROCESS = 3  # one is written, one encoded, one read
TERMINATE_TIMEOUT_S = 30.0  # until a process that should end is killed


def run_units(
    load: Load,
    job: Job,
    units: Iterator[Unit],
    advance: Callable[[int], None],
    warn: Callable[[str], object] = lambda message: None,
) -> Generator[UnitResult, None, None]:
    """See stages.engines.jobs.Engine."""
    if job.resources.worker_count > 1:
        yield from _WorkerPool(load, job, advance, warn).run(units)
    else:
        worker = load(job)
        advance(0)
        yield from worker.run_units(lambda wait: next(units, None), advance)


@dataclass(eq=False)
class _Process:
    """One worker process. number: its place among the workers, from 0. pipe: units go in; progress, announcements and
    results come out. units: given to it and not finished. is_ready: whether it has loaded its model."""

    number: int
    process: Any
    pipe: Connection
    units: list[Unit] = field(default_factory=list)
    is_ready: bool = False


class _WorkerPool:
    def __init__(self, load: Load, job: Job, advance: Callable[[int], None], warn: Callable[[str], object]) -> None:
        self._load, self._job, self._advance, self._warn = load, job, advance, warn
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[_Process] = []
        self._next: Unit | None = None  # waits for a process with room
        self._has_more = True
        self._suspects: deque[Unit] = deque()  # units of processes that died
        self._deaths: Counter[str] = Counter()  # by unit
        self._load_failures: Counter[int] = Counter()  # by number: processes that died in a row while they loaded

    def run(self, units: Iterator[Unit]) -> Iterator[UnitResult]:
        loading = ExitStack()
        loading.enter_context(activity(f"{self._job.resources.worker_count} worker processes load their models"))
        try:
            while True:
                if any(process.is_ready for process in self._processes):
                    loading.close()
                yield from self._hand_out(units)
                if not self._has_more and not any(process.units for process in self._processes):
                    return
                check_stop()
                by_pipe = {process.pipe: process for process in self._processes}  # idle ones too: they may die
                for pipe in wait(list(by_pipe), WAIT_S):
                    yield from self._receive(by_pipe[cast(Connection, pipe)])
        finally:
            loading.close()
            for process in self._processes:
                process.pipe.close()
            for process in self._processes:
                process.process.join(TERMINATE_TIMEOUT_S)
                process.process.kill()  # no effect on one that has ended
                process.process.join()

    def _hand_out(self, units: Iterator[Unit]) -> Iterator[UnitResult]:
        """Hand out units while a process has room; yields the last results of processes that turn out to be dead."""
        while True:
            if time.monotonic() >= self._job.until:
                self._has_more, self._next = False, None
                return
            unit = self._next or (self._suspects.popleft() if self._suspects else self._draw(units))
            process = self._pick_process(unit) if unit is not None else None
            self._next = unit
            if unit is None or process is None:
                return
            try:
                process.pipe.send(unit)
            except (BrokenPipeError, ConnectionResetError):  # it died without having had this unit
                yield from self._receive(process)
                continue
            process.units.append(unit)
            self._next = None

    def _draw(self, units: Iterator[Unit]) -> Unit | None:
        unit = next(units, None)
        self._has_more = unit is not None
        return unit

    def _pick_process(self, unit: Unit) -> _Process | None:
        """The process with the fewest units. A suspect goes to an idle one, which then gets no other unit."""
        best = min(self._processes, key=lambda process: len(process.units), default=None)
        if best is not None and not best.units:
            return best
        if len(self._processes) < self._job.resources.worker_count:
            return self._start()
        roomy = [
            process
            for process in self._processes
            if len(process.units) < MAX_UNITS_PER_PROCESS
            and not any(other.unit_id in self._deaths for other in process.units)
        ]
        if unit.unit_id in self._deaths or not roomy:
            return None
        return min(roomy, key=lambda process: len(process.units))

    def _start(self) -> _Process:
        ours, theirs = self._context.Pipe()
        number = min({*range(self._job.resources.worker_count)} - {process.number for process in self._processes})
        job = replace(self._job, process_index=number)
        process = self._context.Process(target=_worker_main, args=(self._load, job, theirs))
        resource_tracker.ensure_running()  # it would unblock signals
        with signals_blocked(signal.SIGINT):  # Ctrl-C reaches every process; the program decides
            process.start()
        theirs.close()
        self._processes.append(_Process(number, process, ours))
        return self._processes[-1]

    def _receive(self, process: _Process) -> Iterator[UnitResult]:
        """Handle one message (progress, an announcement, a unit's result, an error meant for the user) or the process'
        death."""
        try:
            message = process.pipe.recv()
        except (EOFError, ConnectionResetError):
            yield from self._lose(process)
            return
        if isinstance(message, str):  # perhaps while it loads
            announce(f"worker {process.number}: {message}")
            return
        process.is_ready = True
        self._load_failures.pop(process.number, None)
        if isinstance(message, int):
            self._advance(message)
        elif isinstance(message, LatentpressError):
            raise message
        else:
            process.units = [unit for unit in process.units if unit.unit_id != message.unit_id]
            yield message

    def _lose(self, process: _Process) -> Iterator[UnitResult]:
        """A process that died: its units are tried again, each alone."""
        self._processes.remove(process)
        process.process.join()
        process.pipe.close()
        if time.monotonic() >= self._job.until:  # it has finished its unit, and the units behind it remain
            return
        exit_code = f"exit code {process.process.exitcode}"
        if not process.is_ready:
            self._load_failures[process.number] += 1
            problem = f"a worker process died while it loaded its model ({exit_code})"
            if self._load_failures[process.number] >= MAX_LOAD_TRIES:
                raise LatentpressError(
                    f"{problem}, {MAX_LOAD_TRIES} times in a row; its output is in the log",
                    "exit code -9 is a kill from outside, by the system when memory ran out (use fewer --workers) or "
                    "by a person; any other is a crash",
                )
            self._warn(f"{problem}; it is started again")
            self._suspects.extend(process.units)
            return
        names = ", ".join(unit.unit_id for unit in process.units) or "none"
        self._warn(f"a worker process died ({exit_code}); units it had, which are tried alone: {names}")
        for unit in process.units:
            self._deaths[unit.unit_id] += len(process.units) == 1  # of several, any may be the cause
            if self._deaths[unit.unit_id] < MAX_UNIT_TRIES:
                self._suspects.append(unit)
            else:
                problem = f"its process died {MAX_UNIT_TRIES} times; its output is in the log"
                yield UnitResult(unit.unit_id, None, error=problem)


def _worker_main(load: Load, job: Job, pipe: Connection) -> None:
    """In a worker process: load the model, then run units until the pipe closes. Unfinished units are dropped."""
    with StopHandler().stop_on_signals():  # schedulers send SIGTERM to each process
        _run_worker(load, job, pipe)


def _run_worker(load: Load, job: Job, pipe: Connection) -> None:
    units: SimpleQueue[Unit] = SimpleQueue()
    sending = threading.Lock()  # announcements come from other threads, too

    def receive() -> None:
        """Take units from the pipe at once, so that neither end blocks in `send`."""
        try:
            while True:
                units.put(pipe.recv())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(TERMINATE_TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGKILL)  # it hangs, and the program, which would kill it, may have ended

    def take(wait: bool) -> Unit | None:
        while True:
            check_stop()
            try:
                return units.get(block=wait, timeout=WAIT_S)
            except Empty:
                if not wait:
                    return None

    def send(message: Any) -> None:
        check_stop()
        try:
            with sending:
                pipe.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:  # the program has ended
            raise Stopped from error

    announce_by(send)
    threading.Thread(target=receive, daemon=True).start()
    try:
        worker = load(job)
        send(0)
        results: Any = worker.run_units(take, send)
        with closing(results):  # ends the readers, which this process waits for, also between two units
            for result in results:
                send(result)
    except LatentpressError as error:
        send(error)
