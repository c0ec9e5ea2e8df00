"""Units on this machine: in this process for one worker, in spawned processes for several.

Each process loads the model once and is given one unit at a time. A process that dies (a decoder's crash, the
out-of-memory killer) takes only its unit with it: the unit is tried once more by a fresh process, then reported.
"""

import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from cache.generations import Unit
from schemas.errors import LatentpressError
from stages.stage import Job, Outcome, Worker

Load = Callable[[Job], Worker]
TRIES = 2  # of a unit whose process died


def run_units(load: Load, job: Job, units: Sequence[Unit], advance: Callable[[int], None]) -> Iterator[Outcome]:
    """Run all units and yield what became of each, in the order in which they end."""
    workers = min(job.resources.workers, len(units))
    if workers > 1:
        yield from _Pool(load, job, workers, advance).run(units)
        return
    worker = load(job)
    for unit in units:
        yield worker.run_unit(unit, advance)


class _Pool:
    """`workers` processes, each at the other end of a pipe: a unit down, counts and one outcome up."""

    def __init__(self, load: Load, job: Job, workers: int, advance: Callable[[int], None]) -> None:
        self._load, self._job, self._workers, self._advance = load, job, workers, advance
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        self._busy: dict[Connection, Unit] = {}
        self._ready: set[Connection] = set()  # loaded their models

    def run(self, units: Sequence[Unit]) -> Iterator[Outcome]:
        waiting, deaths = deque(units), Counter[str]()
        try:
            while waiting or self._busy:
                while waiting and len(self._busy) < self._workers:
                    self._give(waiting.popleft())
                for pipe in wait(list(self._busy)):
                    assert isinstance(pipe, Connection)
                    outcome = self._receive(pipe)
                    if isinstance(outcome, Unit):
                        deaths[outcome.unit_id] += 1
                        if deaths[outcome.unit_id] < TRIES:
                            waiting.append(outcome)
                        else:
                            problem = f"its process died {TRIES} times; what it said stands in the log"
                            yield Outcome(outcome.unit_id, None, error=problem)
                    elif outcome is not None:
                        yield outcome
        finally:
            self._stop()

    def _give(self, unit: Unit) -> None:
        idle = next((pipe for pipe in self._processes if pipe not in self._busy), None)
        if idle is None:
            idle, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(self._load, self._job, theirs))
            process.start()
            theirs.close()
            self._processes[idle] = process
        self._busy[idle] = unit
        idle.send(unit)

    def _receive(self, pipe: Connection) -> Outcome | Unit | None:
        """One message: None for progress, the outcome of a unit, or the unit itself when its process died."""
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes.pop(pipe)
            process.join()
            pipe.close()
            if pipe not in self._ready:
                raise LatentpressError(
                    f"a worker process died while it loaded its model (exit code {process.exitcode}); what it said "
                    "stands in the log",
                    "exit code -9 means that memory ran out: use fewer --workers",
                ) from None
            return self._busy.pop(pipe)
        self._ready.add(pipe)
        if isinstance(message, int):
            self._advance(message)
            return None
        del self._busy[pipe]
        if isinstance(message, LatentpressError):
            raise message
        return message

    def _stop(self) -> None:
        for pipe, process in self._processes.items():
            if pipe in self._busy:
                process.terminate()
            pipe.close()
            process.join()


def _serve(load: Load, job: Job, pipe: Connection) -> None:
    """The other end: load the model, then a unit at a time until the pipe closes."""
    try:
        worker = load(job)
        pipe.send(0)
        while True:
            pipe.send(worker.run_unit(pipe.recv(), pipe.send))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except LatentpressError as error:
        pipe.send(error)
