"""--max-time for encoding stages: a worker begins no unit that it is not expected to finish."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint

from cache.sets.plans import Unit
from stages.engines.jobs import UnitResult


class TimedUnits(Iterator[Unit | None]):
    """A job's units in order. It ends where the next unit would take longer than `seconds_left()`, by the rate at which
    members were done so far; so workers end between units, and what they began is done. Until a rate is known units are
    given out. `operator.length_hint` is that of `units`, until it ends. check: called at each unit and advance.

    in_work: units that were given and are not done. ended_early: whether it ended for want of time; reason: why, ""
    where it did not.
    """

    def __init__(
        self,
        units: Iterator[Unit | None],
        workers: int,
        seconds_left: Callable[[], float],
        check: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.units, self._workers = units, workers
        self._seconds_left, self._clock, self._check = seconds_left, clock, check
        self._given = self.in_work = 0  # members; units
        self._passed = deque[Unit]()
        self._done = 0
        self._first: tuple[float, int] | None = None  # time and count when the first members were done
        self.ended_early = False

    @property
    def reason(self) -> str:
        return "--max-time" if self.ended_early else ""

    def __length_hint__(self) -> int:
        return 0 if self.ended_early else length_hint(self.units)

    def __next__(self) -> Unit | None:
        self._check()
        if self.ended_early:
            raise StopIteration
        unit = next(self.units)
        if unit is None:  # there is none at the moment
            return None
        if self.expected_seconds(unit) > self._seconds_left():
            self.ended_early = True
            raise StopIteration
        self._given += len(unit.members)
        self.in_work += 1
        return unit

    def advance(self, members: int) -> None:
        """Members were done; or, where a unit is done again, are to be done once more."""
        self._check()
        self._done += members
        self._first = self._first or (self._clock(), self._done)

    def pass_over(self, unit: Unit) -> None:
        """Count a unit that is not given, as somebody else did it."""
        self._given += len(unit.members)
        self._passed.append(unit)

    def finish(self, results: Iterable[UnitResult]) -> Iterator[UnitResult]:
        """The results of the units that were given, which are no longer in work, and of those passed over."""
        for result in results:
            self.in_work -= 1
            yield result
            yield from self._finish_passed()
        yield from self._finish_passed()

    def _finish_passed(self) -> Iterator[UnitResult]:
        while self._passed:
            yield UnitResult(self._passed.popleft().unit_id, "", elsewhere=True)

    def expected_seconds(self, unit: Unit) -> float:
        """Until `unit` is done if it is begun now, after the units that the workers have already; 0 where no rate is
        known."""
        start, counted = self._first or (math.inf, 0)
        if self._done <= counted or self._clock() <= start:
            return 0.0
        rate = (self._done - counted) / (self._clock() - start)
        at_once = min(self._workers, self.in_work + 1)  # units that share this rate
        return (max(0, self._given - self._done) + at_once * len(unit.members)) / rate
