"""Workers in several processes, on this machine or on a cluster: distributing units to processes, and retrying the
units of a process that dies.

A process is started for each waiting unit, up to the number of workers, and gets its first unit after it has loaded its
model. A process that dies while it loads is started again, but not after MAX_LOAD_TRIES consecutive deaths. The units
of a process that dies later are retried, each in a process without other units. A unit whose process dies
MAX_UNIT_TRIES times is reported as failed.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cache.sets.plans import Unit
from schemas.activities import activity, announce
from schemas.errors import LatentpressError
from schemas.interruption import check_stop
from stages.engines.jobs import Job, UnitResult

MAX_UNIT_TRIES = 3  # deaths of processes with only this unit; a lost node counts as a death
MAX_LOAD_TRIES = 3  # consecutive deaths of a process before it is ready

#: A message from a worker's process: the number of members finished since the last number (the first number, 0, means
#: that the process is ready); an announcement; a unit's result; an error for the user.
Message = int | str | UnitResult | LatentpressError


@dataclass(frozen=True)
class Death:
    """Takes the place of a message if the process has died or hangs."""

    reason: str


@dataclass(eq=False)
class WorkerProcess:
    """One process of a pool. number: index of the worker, from 0. units: unfinished units of the process.
    counted_members: number of their members that were counted as finished. is_ready: whether the process has loaded its
    model."""

    number: int
    units: list[Unit] = field(default_factory=list, init=False)
    counted_members: int = field(default=0, init=False)
    is_ready: bool = field(default=False, init=False)

    def __str__(self) -> str:
        return f"worker {self.number}"


P = TypeVar("P", bound=WorkerProcess)


class WorkerPool(ABC, Generic[P]):
    """Distributes units to processes. max_units: number of units that a process may have at once. advice: next step in
    the error if no process gets ready."""

    max_units = 1
    advice: str

    def __init__(
        self, job: Job, units: Iterator[Unit], advance: Callable[[int], None], warn: Callable[[str], object]
    ) -> None:
        self._job, self._units, self._advance, self._warn = job, units, advance, warn
        self._has_more = True
        self._waiting = deque[Unit]()  # units that wait for a process; units of dead processes come first
        self._processes = list[P]()
        self._numbers = set(range(job.resources.worker_count))  # numbers of processes that may be started
        self._load_failures = Counter[int]()  # number of a process -> consecutive failures
        self._deaths = Counter[str]()  # unit id -> deaths of its process
        self._suspects = set[str]()  # ids of units whose process died

    @abstractmethod
    def _start(self, number: int) -> P:
        """Start a process, which sends 0 after it has loaded its model."""

    @abstractmethod
    def _send(self, process: P, unit: Unit) -> bool:
        """Send a unit to a process that is ready. Returns False if the process is found to be dead."""

    @abstractmethod
    def _receive(self) -> Iterable[tuple[P, Message | Death]]:
        """The messages of the processes. Waits a short time if no message has arrived."""

    @abstractmethod
    def _drop(self, process: P) -> None:
        """End a process that has no unit, has died, or hangs, without waiting for its end."""

    @abstractmethod
    def _end_all(self) -> None:
        """End all processes. They have a limited time to drop their units."""

    def _describe_loading(self) -> str:
        return f"{len(self._processes)} worker processes load their models"

    def run(self) -> Iterator[UnitResult]:
        loading = ExitStack()
        task = loading.enter_context(activity(self._describe_loading()))
        try:
            while True:
                self._hand_out()
                task.description = self._describe_loading()
                if any(process.is_ready for process in self._processes):
                    loading.close()
                if not self._processes:
                    return
                check_stop()
                for process, message in self._receive():
                    yield from self._handle(process, message)
        finally:
            loading.close()
            self._end_all()

    def _hand_out(self) -> None:
        """Send units to processes that are ready, start processes for waiting units, and end processes without units if
        no unit waits."""
        if self._is_late:
            self._has_more = False
            self._waiting.clear()
        while (unit := self._waiting_unit(0)) and (process := self._pick(unit)) and self._send(process, unit):
            process.units.append(self._waiting.popleft())
        for number in sorted(self._numbers - {process.number for process in self._processes}):
            if self._waiting_unit(self._unready) is None:
                break
            self._processes.append(self._start(number))
        if not self._waiting:
            for process in [process for process in self._processes if not process.units]:
                self._processes.remove(process)
                self._drop(process)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._job.until

    @property
    def _unready(self) -> int:
        return sum(not process.is_ready for process in self._processes)

    def _waiting_unit(self, place: int) -> Unit | None:
        """The waiting unit at the index `place`, or None if there are fewer units. Takes further units as needed."""
        while self._has_more and len(self._waiting) <= place:
            unit = next(self._units, None)
            self._has_more = unit is not None
            self._waiting += [unit] if unit is not None else []
        return self._waiting[place] if len(self._waiting) > place else None

    def _pick(self, unit: Unit) -> P | None:
        """The ready process that gets the unit: the process with the fewest units. A unit whose process died gets a
        process without other units. None: the unit has to wait."""
        roomy = [
            process
            for process in self._processes
            if process.is_ready
            and len(process.units) < self.max_units
            and not any(process_unit.unit_id in self._suspects for process_unit in process.units)
        ]
        best = min(roomy, key=lambda process: len(process.units), default=None)
        if best is None or not best.units:
            return best
        is_needed_elsewhere = unit.unit_id in self._suspects or self._waiting_unit(self._unready) is None
        return None if is_needed_elsewhere else best

    def _handle(self, process: P, message: Message | Death) -> Iterator[UnitResult]:
        if isinstance(message, Death):
            yield from self._lose(process, message.reason)
        elif isinstance(message, str):  # an announcement, possibly before the process is ready
            announce(f"{process}: {message}")
        elif isinstance(message, LatentpressError):
            message.message = f"{process}: {message.message}"
            raise message
        elif isinstance(message, int):
            process.is_ready = True
            self._load_failures.pop(process.number, None)
            process.counted_members += message
            self._advance(message)
        else:
            [unit] = [unit for unit in process.units if unit.unit_id == message.unit_id]
            process.units.remove(unit)
            process.counted_members -= 0 if message.elsewhere else len(unit.members)
            yield message

    def _lose(self, process: P, reason: str) -> Iterator[UnitResult]:
        """Remove a process that has died, and queue its units to be retried separately."""
        self._processes.remove(process)
        self._drop(process)
        self._advance(-process.counted_members)
        if self._is_late:  # its units remain for the next job
            return
        if not process.is_ready:
            self._lose_unready(process, reason)
            return
        names = ", ".join(unit.unit_id for unit in process.units) or "none"
        self._warn(f"{process} was lost: {reason}. Its units are retried separately: {names}")
        for unit in reversed(process.units):
            self._suspects.add(unit.unit_id)
            self._deaths[unit.unit_id] += len(process.units) == 1  # any of several units may be the cause
            if self._deaths[unit.unit_id] < MAX_UNIT_TRIES:
                self._waiting.appendleft(unit)  # the next unit, because all processes would wait for a unit at the end
            else:
                problem = f"{MAX_UNIT_TRIES} workers were lost while they encoded it; the last: {reason}"
                yield UnitResult(unit.unit_id, None, error=problem)

    def _lose_unready(self, process: P, reason: str) -> None:
        self._load_failures[process.number] += 1
        problem = f"{process} was lost before it was ready: {reason}"
        if self._load_failures[process.number] < MAX_LOAD_TRIES:
            self._warn(f"{problem}. Another worker is started")
            return
        problem = f"{problem}, {MAX_LOAD_TRIES} consecutive times"
        self._numbers.discard(process.number)
        if not self._numbers:
            raise LatentpressError(f"{problem}; all other workers were lost too", self.advice)
        self._warn(f"{problem}, and is not started again. {len(self._numbers)} workers continue")
