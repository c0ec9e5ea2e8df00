"""Run units on this machine: in this process for one worker, in spawned processes for several workers
(`stages/engines/pool.py`).

Each process loads the model once and has a few units at a time, so that it can read in advance.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any, cast

from cache.sets.plans import Unit
from schemas.activities import announce_by
from schemas.errors import LatentpressError
from schemas.interruption import WAIT_S, StopHandler, Stopped, check_stop, signals_blocked
from stages.engines.jobs import Job, Load, UnitResult
from stages.engines.pool import Death, Message, WorkerPool, WorkerProcess

TERMINATE_TIMEOUT_S = 30.0  # a process that should end is killed after this time


def run_units(
    load: Load,
    job: Job,
    units: Iterator[Unit],
    advance: Callable[[int], None],
    warn: Callable[[str], object] = lambda message: None,
) -> Generator[UnitResult, None, None]:
    """Run units on this machine, see `stages.engines.jobs.Engine`."""
    if job.resources.worker_count > 1:
        yield from _LocalPool(load, job, units, advance, warn).run()
    else:
        worker = load(job)
        advance(0)
        yield from worker.run_units(lambda wait: next(units, None), advance)


@dataclass(eq=False)
class _Process(WorkerProcess):
    """One process of the pool. pipe: connection to the process, which receives units and sends messages."""

    process: Any
    pipe: Connection


class _LocalPool(WorkerPool[_Process]):
    max_units = 3  # one unit is being written, one encoded, one read
    advice = (
        "see the output of the processes in the log. Exit code -9 means that the system (when memory is full: use "
        "fewer --workers) or a person killed the process; any other exit code means a crash"
    )

    def __init__(self, load: Load, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._load, self._ending = load, list[_Process]()
        self._context = multiprocessing.get_context("spawn")

    def _start(self, number: int) -> _Process:
        ours, theirs = self._context.Pipe()
        arguments = (self._load, replace(self._job, process_index=number), theirs)
        process: Any = self._context.Process(target=_worker_main, args=arguments)
        resource_tracker.ensure_running()  # starting it in process.start() would unblock signals
        with signals_blocked(signal.SIGINT):  # Ctrl-C reaches every process, but only the program handles it
            process.start()
        theirs.close()
        return _Process(number, process, ours)

    def _send(self, process: _Process, unit: Unit) -> bool:
        try:
            process.pipe.send(unit)
        except (BrokenPipeError, ConnectionResetError):  # `_receive` notices its death
            return False
        return True

    def _receive(self) -> Iterator[tuple[_Process, Message | Death]]:
        by_pipe = {process.pipe: process for process in self._processes}
        for pipe in wait(list(by_pipe), WAIT_S):
            process = by_pipe[cast(Connection, pipe)]
            try:
                yield process, process.pipe.recv()
            except (EOFError, ConnectionResetError):
                process.process.join()
                yield process, Death(f"exit code {process.process.exitcode}")

    def _drop(self, process: _Process) -> None:
        process.pipe.close()
        self._ending.append(process)

    def _end_all(self) -> None:
        for process in self._processes:
            self._drop(process)
        for process in self._ending:
            process.process.join(TERMINATE_TIMEOUT_S)
            process.process.kill()  # has no effect if the process has ended
            process.process.join()


def _worker_main(load: Load, job: Job, pipe: Connection) -> None:
    """Main function of a worker process: load the model, then run units until the pipe closes. Unfinished units are
    dropped."""
    with StopHandler().stop_on_signals():  # schedulers send SIGTERM to each process
        _run_worker(load, job, pipe)


def _run_worker(load: Load, job: Job, pipe: Connection) -> None:
    units: SimpleQueue[Unit] = SimpleQueue()
    sending = threading.Lock()  # other threads also send announcements

    def receive() -> None:
        """Read units from the pipe as soon as they arrive, so that neither end of the pipe blocks in `send`."""
        try:
            while True:
                units.put(pipe.recv())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(TERMINATE_TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGKILL)  # this process hangs, and the program may no longer be running

    def take(wait: bool) -> Unit | None:
        while True:
            check_stop()
            try:
                return units.get(block=wait, timeout=WAIT_S)
            except Empty:
                if not wait:
                    return None

    def send(message: Message) -> None:
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
        with closing(results):  # ends the readers, for which this process would wait, even between two units
            for result in results:
                send(result)
    except LatentpressError as error:
        send(error)
