"""Units on this machine: in this process for one worker, in spawned processes for several.

Each process loads the model once and is given a few units, so that it can read ahead. A process that dies (the
out-of-memory killer) takes its units with it: each is tried again by a fresh process that has no other, and the one
that it happens to twice is reported. One that dies while it loads has touched no unit: it is started again, and where
it keeps dying, the stage ends.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any

from cache.plans import Unit
from schemas.errors import LatentpressError
from stages.engines.jobs import Job, Load, UnitResult

MAX_UNIT_TRIES = 2  # of a unit whose process died while it had no other
MAX_LOAD_TRIES = 3  # of a process that dies while it loads
MAX_UNITS_PER_PROCESS = 3  # units of a process: one is written, one encoded, one read
TERMINATE_TIMEOUT_S = 30.0  # until a process that was told to end is killed


def run_units(
    load: Load,
    job: Job,
    units: Iterator[Unit],
    advance: Callable[[int], None],
    warn: Callable[[str], object] = lambda message: None,
) -> Iterator[UnitResult]:
    """Run the units, which may end early, and yield what became of each, in the order in which they end. warn: told
    of a process that died."""
    if job.resources.workers > 1:
        yield from _WorkerPool(load, job, advance, warn).run(units)
        return
    yield from load(job).run_units(lambda wait: next(units, None), advance)


class _WorkerPool:
    """Processes, each at the other end of a pipe: units down, counts and outcomes up."""

    def __init__(self, load: Load, job: Job, advance: Callable[[int], None], warn: Callable[[str], object]) -> None:
        self._load, self._job, self._advance, self._warn = load, job, advance, warn
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        self._numbers: dict[Connection, int] = {}
        self._given: dict[Connection, list[Unit]] = {}
        self._ready: set[Connection] = set()  # loaded their models
        self._next: Unit | None = None  # for which there is no place yet
        self._suspects: deque[Unit] = deque()  # whose process died
        self._deaths: Counter[str] = Counter()
        self._loads: Counter[int] = Counter()  # by number: processes that died while they loaded, one after the other

    def run(self, units: Iterator[Unit]) -> Iterator[UnitResult]:
        try:
            while True:
                yield from self._dispatch_units(units)
                if not any(self._given.values()):
                    return
                for pipe in wait(list(self._given)):  # those that have nothing to do may die as well
                    assert isinstance(pipe, Connection)
                    yield from self._receive(pipe)
        finally:
            self._stop()

    def _dispatch_units(self, units: Iterator[Unit]) -> Iterator[UnitResult]:
        """Hand out units while there is a place for one; what is heard of processes that turn out to be dead."""
        while True:
            unit = self._next or (self._suspects.popleft() if self._suspects else next(units, None))
            pipe = self._pick_process(unit) if unit is not None else None
            if unit is None or pipe is None:
                self._next = unit
                return
            self._next = unit
            try:
                pipe.send(unit)
            except (BrokenPipeError, ConnectionResetError):  # it has died, by no fault of this unit, which it never had
                yield from self._receive(pipe)  # its last words first, its death at the end
                continue
            self._given[pipe].append(unit)
            self._next = None

    def _pick_process(self, unit: Unit) -> Connection | None:
        """The process that has least to do; a suspect goes to one that has nothing, and is not joined by others."""
        idle = next((pipe for pipe, given in self._given.items() if not given), None)
        if idle is not None:
            return idle
        if len(self._processes) < self._job.resources.workers:
            return self._start()
        alone = {pipe for pipe, given in self._given.items() if any(other.unit_id in self._deaths for other in given)}
        roomy = [
            pipe for pipe, given in self._given.items() if len(given) < MAX_UNITS_PER_PROCESS and pipe not in alone
        ]
        if unit.unit_id in self._deaths or not roomy:
            return None
        return min(roomy, key=lambda pipe: len(self._given[pipe]))

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        number = min({*range(self._job.resources.workers)} - {*self._numbers.values()})
        job = replace(self._job, process_index=number)
        process = self._context.Process(target=_worker_main, args=(self._load, job, theirs))
        process.start()
        theirs.close()
        self._processes[ours], self._given[ours], self._numbers[ours] = process, [], number
        return ours

    def _receive(self, pipe: Connection) -> Iterator[UnitResult]:
        """One message: progress, the outcome of a unit, an error meant for the user; or the process' death."""
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            yield from self._handle_exit(pipe)
            return
        self._ready.add(pipe)
        self._loads.pop(self._numbers[pipe], None)
        if isinstance(message, int):
            self._advance(message)
        elif isinstance(message, LatentpressError):
            raise message
        else:
            self._given[pipe] = [unit for unit in self._given[pipe] if unit.unit_id != message.unit]
            yield message

    def _handle_exit(self, pipe: Connection) -> Iterator[UnitResult]:
        process, given, number = self._processes.pop(pipe), self._given.pop(pipe), self._numbers.pop(pipe)
        process.join()
        pipe.close()
        if pipe not in self._ready:
            self._handle_load_failure(process.exitcode, number)
            self._suspects.extend(given)  # which it has not touched
            return
        names = ", ".join(unit.unit_id for unit in given) or "none"
        self._warn(
            f"a worker process died (exit code {process.exitcode}); units it had, which are tried alone: {names}"
        )
        for unit in given:
            self._deaths[unit.unit_id] += len(given) == 1  # of several, nobody knows whose fault it was
            if self._deaths[unit.unit_id] < MAX_UNIT_TRIES:
                self._suspects.append(unit)
            else:
                problem = f"its process died {MAX_UNIT_TRIES} times; what it said stands in the log"
                yield UnitResult(unit.unit_id, None, error=problem)

    def _handle_load_failure(self, code: int | None, number: int) -> None:
        self._loads[number] += 1
        if self._loads[number] < MAX_LOAD_TRIES:
            self._warn(f"a worker process died while it loaded its model (exit code {code}); it is started again")
            return
        raise LatentpressError(
            f"a worker process died while it loaded its model (exit code {code}), {MAX_LOAD_TRIES} times in a "
            f"row; what it said "
            "stands in the log",
            "exit code -9 is a kill from outside, by the system where memory ran out (then use fewer --workers) or by "
            "somebody; any other is a crash",
        )

    def _stop(self) -> None:
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.join(TERMINATE_TIMEOUT_S)
            process.kill()  # of no effect on one that has ended
            process.join()


def _worker_main(load: Load, job: Job, pipe: Connection) -> None:
    """The other end: load the model, then run units until the pipe closes. A unit that is not finished is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the program at the other end decides
    signal.signal(signal.SIGTERM, _exit_once)
    units: SimpleQueue[Unit] = SimpleQueue()
    threading.Thread(target=_receive_units, args=(pipe, units), daemon=True).start()

    def take(wait: bool) -> Unit | None:
        try:
            return units.get(block=wait)
        except Empty:
            return None

    def send(message: Any) -> None:
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):  # the program is gone
            _exit_once()

    try:
        worker = load(job)
        send(0)
        outcomes: Any = worker.run_units(take, send)
        # Also where the end comes between two units: this process can't exit before its readers have.
        with closing(outcomes):
            for outcome in outcomes:
                send(outcome)
    except LatentpressError as error:
        send(error)


def _exit_once(*_: object) -> None:
    """Once: schedulers send SIGTERM to each process, and it must not disturb the cleaning up when it comes again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def _receive_units(pipe: Connection, units: "SimpleQueue[Unit]") -> None:
    """At once, so that neither end waits for the other to take what it sends."""
    try:
        while True:
            units.put(pipe.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(TERMINATE_TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)  # it hangs, and who would do this may be gone
