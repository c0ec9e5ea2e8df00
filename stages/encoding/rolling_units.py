"""The units of an encoding stage that follows training: cache.rolling.

In place of a list there are units in the order in which training needs them, for as long as it runs; None where nothing
more fits at the moment, or nothing more is needed.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cache.runs.training_run import read_progress
from cache.sets.plans import Unit
from cache.sets.rolling_set import RollingSet
from cache.sets.set_lookup import open_configured_set
from cache.sets.trainset import SetNotFound
from cache.shards.shard import ARROW_SUFFIX, unit_name
from cache.store.damage import ENCODE_PROGRAMS
from cache.supply.rolling import RollingCache, RollingNeeds, UnitQueue, require_room
from cache.supply.rolling_files import Position, RollingError
from cache.supply.step_shards import ReadingOrder
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.engines.jobs import UnitResult

PAUSE_S = 0.2  # between two polls of what training needs


def open_rolling_set(config: Config, warn: Callable[[str], None]) -> RollingSet:
    """The set of a configuration with cache.rolling. RollingError where it is another."""
    data = open_configured_set(config, warn)
    if not isinstance(data, RollingSet):
        raise RollingError(
            f"set {data.id} is of shards that are all there, and cache.rolling is for a set made by it",
            "Run `latentpress index`, which makes one; or remove cache.rolling.",
        )
    return data


def has_rolling_set(config: Config) -> bool:
    """Whether there is one that this configuration makes."""
    try:
        return isinstance(open_configured_set(config, lambda message: None), RollingSet)
    except SetNotFound:
        return False


@contextmanager
def rolling_units(kind: str, units: Sequence[Unit], config: Config, console: Console) -> Iterator["RollingUnits"]:
    """Hand out the units of a kind of shards while no other process does."""
    rolling = config.cache.rolling
    assert rolling is not None
    data = open_rolling_set(config, console.warn)
    cache, needs = RollingCache(data, rolling.max_gb), RollingNeeds(data, config.validation.eval_samples)
    with cache.files.working(ENCODE_PROGRAMS[kind]) as held:
        queue = UnitQueue(cache, kind, held, needs)
        yield RollingUnits(queue, {unit.unit_id: unit for unit in units}, config, data.id)


class RollingUnits:
    """The units of one stage, and what has become of them."""

    def __init__(self, queue: UnitQueue, units: Mapping[str, Unit], config: Config, set_id: str) -> None:
        rolling = config.cache.rolling
        assert rolling is not None
        self._queue, self._units, self._rolling, self._config = queue, units, rolling, config
        paths, kinds = queue.cache.paths, queue.cache.kinds
        self._names = [unit_name(path.rpartition("/")[2]) for path in paths]
        self._numbers = {name: i for i, name in enumerate(self._names) if kinds[i] == queue.kind}
        self._start = Position(set_id, config.train.run, ReadingOrder.of(config.train))
        self._looked = 0.0
        self._seen: set[str] = set()  # units that were encoded once

    @property
    def format(self) -> str:
        """cache.format of the set's shards."""
        return "arrow" if self._queue.cache.paths[0].endswith(ARROW_SUFFIX) else "webdataset"

    def drop(self, units: Collection[str]) -> None:
        """Remove shards that are to be made again."""
        with self._queue.cache.files.locked():
            for unit in units & self._numbers.keys():
                self._queue.cache.remove(self._numbers[unit])

    @property
    def position(self) -> Position:
        """As the trainer has written it; before it has, the start of the run."""
        found = self._queue.cache.files.read_position()
        start = self._start
        if found is None or (found.set, found.run) != (start.set, start.run) or found.order.steps < start.order.steps:
            known = found is not None and (found.set, found.run) == (start.set, start.run)
            return replace(start, step=found.step if known and found is not None else 0)
        return found

    @property
    def is_over(self) -> bool:
        """Whether training has ended. Its position alone does not say so: that may be of a run whose folder is gone."""
        return read_progress(self._config).state == "finished"

    def before(self) -> set[str]:
        """The units of the steps up to the position, which were encoded once."""
        position = self.position
        steps, found = self._queue.needs.of(position.order).steps, set[int]()
        for step in range(position.step):
            found.update(steps.step(step).tolist())
            if len(found) == len(self._names):
                break
        kinds = self._queue.cache.kinds
        self._seen |= {self._names[number] for number in found if kinds[number] == self._queue.kind}
        return set(self._seen)

    def __iter__(self) -> Iterator[Unit | None]:
        while True:
            now = time.monotonic()
            if now - self._looked < PAUSE_S:
                yield None
                continue
            position = self.position
            if (number := self._queue.next(position)) is not None:
                yield self._units[self._names[number]]
                continue
            self._looked = now
            # Of several ranks the position is a step behind, at the end too.
            if self._rolling.alternate or (position.step >= position.order.steps - 1 and self.is_over):
                return
            self._require_room(position)
            yield None

    def _require_room(self, position: Position) -> None:
        """RollingError where what the run needs now can't fit: beyond the steps that were checked before it started,
        or beside shards that are not of the set."""
        needs, queue = self._queue.needs.of(position.order), self._queue
        now = needs.most_bytes(queue.cache.sizes, position.step, position.step + 2)
        require_room(now, self._rolling.max_gb, queue.other)

    def is_first(self, result: UnitResult) -> bool:
        """Whether this unit was not encoded before, as far as is known."""
        first = result.unit_id not in self._seen
        self._seen.add(result.unit_id)
        return first

    def finish(self, result: UnitResult) -> None:
        """LatentpressError for a unit that failed: training would wait for it."""
        self._queue.release(self._numbers[result.unit_id])
        if result.shard_path is None:
            raise LatentpressError(
                f"unit {result.unit_id} failed, and training would wait for it: {result.error}",
                "correct the cause and run the same command again",
            )
