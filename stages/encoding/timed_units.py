"""--max-time for encoding stages: a worker begins no unit that it is not expected to finish."""

import math
import time
from collections.abc import Callable, Iterator
from operator import length_hint

from cache.sets.plans import Unit


class TimedUnits(Iterator[Unit | None]):
    """A job's units in order. It ends where the next unit would take longer than `seconds_left()`, by the rate at which
    members were done so far; so workers end between units, and what they began is done. Until a rate is known units are
    given out. `operator.length_hint` is that of `units`, until it ends. check: called at each unit and advance.

    ended_early: whether it ended for want of time; reason: why, "" where it did not.
    """

    def __init__(
        self,
        units: Iterator[Unit | None],
        workers: int,
        seconds_left: Callable[[], float],
        check: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._units, self._workers = units, workers
        self._seconds_left, self._clock, self._check = seconds_left, clock, check
        self._given = self._in_work = 0  # members; units
        self._done = 0
        self._first: tuple[float, int] | None = None  # time and count when the first members were done
        self.ended_early = False

    @property
    def reason(self) -> str:
        return "--max-time" if self.ended_early else ""

    def __length_hint__(self) -> int:
        return 0 if self.ended_early else length_hint(self._units)

    def __next__(self) -> Unit | None:
        self._check()
        if self.ended_early:
            raise StopIteration
        unit = next(self._units)
        if unit is None:  # there is none at the moment
            return None
        if self.expected_seconds(unit) > self._seconds_left():
            self.ended_early = True
            raise StopIteration
        self._given += len(unit.members)
        self._in_work += 1
        return unit

    def advance(self, members: int) -> None:
        """Members were done; or, where a unit is done again, are to be done once more."""
        self._check()
        self._done += members
        self._first = self._first or (self._clock(), self._done)

    def finish_unit(self) -> None:
        self._in_work -= 1

    def expected_seconds(self, unit: Unit) -> float:
        """Until `unit` is done if it is begun now, after the units that the workers have already; 0 where no rate is
        known."""
        start, counted = self._first or (math.inf, 0)
        if self._done <= counted or self._clock() <= start:
            return 0.0
        rate = (self._done - counted) / (self._clock() - start)
        at_once = min(self._workers, self._in_work + 1)  # units that share this rate
        return (max(0, self._given - self._done) + at_once * len(unit.members)) / rate
