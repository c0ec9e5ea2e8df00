"""Units on this machine: in this process for one worker, in spawned processes for several.

Each process loads the model once and holds a few units, so that it can read ahead. Where a process dies (by the
out-of-memory killer), each of its units is tried again by a new process that has no other, and a unit whose process
dies again is reported as failed. A process that dies while it loads has touched no unit: it is started again, and where
it keeps dying, the stage ends.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any

from cache.sets.plans import Unit
from schemas.cli.interruption import signals_blocked
from schemas.cli.progress import activity, announce, announce_by
from schemas.errors import LatentpressError
from stages.engines.jobs import Job, Load, UnitResult

MAX_UNIT_TRIES = 2  # of a unit that was its process' only one when that died
MAX_LOAD_TRIES = 3  # of a process that dies while it loads
MAX_UNITS_PER_PROCESS = 3  # one is written, one encoded, one read
PAUSE_S = 0.1  # until units are asked for again, of which there is none yet
TERMINATE_TIMEOUT_S = 30.0  # until a process that should end is killed


def run_units(
    load: Load,
    job: Job,
    units: Iterator[Unit | None],
    advance: Callable[[int], None],
    warn: Callable[[str], object] = lambda message: None,
) -> Generator[UnitResult, None, None]:
    """See stages.engines.jobs.Engine."""
    if job.resources.worker_count > 1:
        yield from _WorkerPool(load, job, advance, warn).run(units)
    else:
        worker = load(job)
        advance(0)
        yield from worker.run_units(partial(_take, units), advance)


def _take(units: Iterator[Unit | None], wait: bool) -> Unit | None:
    """See stages.engines.jobs.Worker."""
    while True:
        try:
            unit = next(units)
        except StopIteration:
            return None
        if unit is not None or not wait:
            return unit
        time.sleep(PAUSE_S)


class _WorkerPool:
    """Processes, each connected by a pipe: units go in, progress and results come out."""

    def __init__(self, load: Load, job: Job, advance: Callable[[int], None], warn: Callable[[str], object]) -> None:
        self._load, self._job, self._advance, self._warn = load, job, advance, warn
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        self._numbers: dict[Connection, int] = {}
        self._given: dict[Connection, list[Unit]] = {}
        self._ready: set[Connection] = set()  # have loaded their models
        self._next: Unit | None = None  # waits for a process with room
        self._given_all = False  # the units have come to their end
        self._suspects: deque[Unit] = deque()  # units of processes that died
        self._deaths: Counter[str] = Counter()  # by unit
        self._load_failures: Counter[int] = Counter()  # by number: processes that died in a row while they loaded

    def run(self, units: Iterator[Unit | None]) -> Iterator[UnitResult]:
        loading = ExitStack()
        loading.enter_context(activity(f"{self._job.resources.worker_count} worker processes load their models"))
        try:
            while True:
                if self._ready:
                    loading.close()
                yield from self._dispatch_units(units)
                if self._given_all and not any(self._given.values()):
                    return
                pause = None if self._given_all or self._next is not None else PAUSE_S
                for pipe in wait(list(self._given), pause):  # idle processes, too: they may die
                    assert isinstance(pipe, Connection)
                    yield from self._receive(pipe)
        finally:
            loading.close()
            for pipe in self._processes:
                pipe.close()
            for process in self._processes.values():
                process.join(TERMINATE_TIMEOUT_S)
                process.kill()  # no effect on one that has ended
                process.join()

    def _dispatch_units(self, units: Iterator[Unit | None]) -> Iterator[UnitResult]:
        """Hand out units while a process has room; yields the last results of processes that turn out to be dead."""
        while True:
            if time.monotonic() >= self._job.until:
                self._given_all, self._next = True, None
                return
            unit = self._next or (self._suspects.popleft() if self._suspects else self._draw(units))
            pipe = self._pick_process(unit) if unit is not None else None
            self._next = unit
            if unit is None or pipe is None:
                return
            try:
                pipe.send(unit)
            except (BrokenPipeError, ConnectionResetError):  # it died without having had this unit
                yield from self._receive(pipe)
                continue
            self._given[pipe].append(unit)
            self._next = None

    def _draw(self, units: Iterator[Unit | None]) -> Unit | None:
        try:
            return next(units)
        except StopIteration:
            self._given_all = True
            return None

    def _pick_process(self, unit: Unit) -> Connection | None:
        """The process with the fewest units. A suspect goes to an idle one, which then gets no other unit."""
        idle = next((pipe for pipe, given in self._given.items() if not given), None)
        if idle is not None:
            return idle
        if len(self._processes) < self._job.resources.worker_count:
            return self._start()
        roomy = [
            pipe
            for pipe, given in self._given.items()
            if len(given) < MAX_UNITS_PER_PROCESS and not any(other.unit_id in self._deaths for other in given)
        ]
        if unit.unit_id in self._deaths or not roomy:
            return None
        return min(roomy, key=lambda pipe: len(self._given[pipe]))

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        number = min({*range(self._job.resources.worker_count)} - {*self._numbers.values()})
        job = replace(self._job, process_index=number)
        process = self._context.Process(target=_worker_main, args=(self._load, job, theirs))
        resource_tracker.ensure_running()  # it would unblock signals
        with signals_blocked(signal.SIGINT):  # Ctrl-C reaches every process; the program decides
            process.start()
        theirs.close()
        self._processes[ours], self._given[ours], self._numbers[ours] = process, [], number
        return ours

    def _receive(self, pipe: Connection) -> Iterator[UnitResult]:
        """Handle one message (progress, an announcement, a unit's result, an error meant for the user) or the process'
        death."""
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            yield from self._handle_exit(pipe)
            return
        if isinstance(message, str):  # perhaps while it loads
            announce(f"worker {self._numbers[pipe]}: {message}")
            return
        self._ready.add(pipe)
        self._load_failures.pop(self._numbers[pipe], None)
        if isinstance(message, int):
            self._advance(message)
        elif isinstance(message, LatentpressError):
            raise message
        else:
            self._given[pipe] = [unit for unit in self._given[pipe] if unit.unit_id != message.unit_id]
            yield message

    def _handle_exit(self, pipe: Connection) -> Iterator[UnitResult]:
        process, given, number = self._processes.pop(pipe), self._given.pop(pipe), self._numbers.pop(pipe)
        process.join()
        pipe.close()
        if time.monotonic() >= self._job.until:  # it has finished its unit, and the units behind it remain
            return
        exit_code = f"exit code {process.exitcode}"
        if pipe not in self._ready:
            self._load_failures[number] += 1
            problem = f"a worker process died while it loaded its model ({exit_code})"
            if self._load_failures[number] >= MAX_LOAD_TRIES:
                raise LatentpressError(
                    f"{problem}, {MAX_LOAD_TRIES} times in a row; its output is in the log",
                    "exit code -9 is a kill from outside, by the system where memory ran out (use fewer --workers) or "
                    "by somebody; any other is a crash",
                )
            self._warn(f"{problem}; it is started again")
            self._suspects.extend(given)
            return
        names = ", ".join(unit.unit_id for unit in given) or "none"
        self._warn(f"a worker process died ({exit_code}); units it had, which are tried alone: {names}")
        for unit in given:
            self._deaths[unit.unit_id] += len(given) == 1  # of several, any may be the cause
            if self._deaths[unit.unit_id] < MAX_UNIT_TRIES:
                self._suspects.append(unit)
            else:
                problem = f"its process died {MAX_UNIT_TRIES} times; its output is in the log"
                yield UnitResult(unit.unit_id, None, error=problem)


def _worker_main(load: Load, job: Job, pipe: Connection) -> None:
    """In a worker process: load the model, then run units until the pipe closes. Unfinished units are dropped."""
    signal.signal(signal.SIGTERM, _exit_once)
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
        try:
            return units.get(block=wait)
        except Empty:
            return None

    def send(message: Any) -> None:
        try:
            with sending:
                pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):  # the program has ended
            _exit_once()

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


def _exit_once(*_: object) -> None:
    """Schedulers send SIGTERM to each process, and a second one must not disturb the clean-up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()
