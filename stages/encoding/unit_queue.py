"""The units of a stage that follows training, with a limited cache: in the order in which training needs them, for as
long as it runs."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from cache.runs.training_run import read_progress
from cache.sets.planned_set import PlannedSet
from cache.sets.plans import Unit
from cache.sets.set_lookup import open_configured_set
from cache.sets.trainset import SetNotFound
from cache.shards.shard import ARROW_SUFFIX, unit_name
from cache.shards.shard_supply import SupplyError
from cache.store.layout import ENCODE_PROGRAMS
from cache.supply.encoded_folder import EncodedFolder, Position, ReadingOrder, RunNeeds, require_room
from cache.supply.limited_folder import Member, ShardQueue
from schemas.cli.console import Console
from schemas.config.encoding import CACHE_LIMIT
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.engines.jobs import UnitResult

PAUSE_S = 0.2  # between two polls of what training needs


def open_followed_set(config: Config, warn: Callable[[str], None]) -> PlannedSet:
    """The set of a configuration with a limited cache. SupplyError where it is another."""
    data = open_configured_set(config, warn)
    if not isinstance(data, PlannedSet):
        raise SupplyError(
            f"set {data.id} is of shards that are all there, and {CACHE_LIMIT} is for a set made by it",
            f"Run `latentpress index`, which makes one; or remove {CACHE_LIMIT}.",
        )
    return data


def has_followed_set(config: Config) -> bool:
    """Whether there is one that this configuration makes."""
    try:
        return isinstance(open_configured_set(config, lambda message: None), PlannedSet)
    except SetNotFound:
        return False


@contextmanager
def followed_units(kind: str, units: Sequence[Unit], config: Config, console: Console) -> Iterator["FollowedUnits"]:
    """Hand out the units of a kind of shards while no other process does."""
    limit = config.cache.limit
    assert limit is not None
    data = open_followed_set(config, console.warn)
    folder = EncodedFolder(data.store, data, limit.max_gb)
    with folder.working(ENCODE_PROGRAMS[kind]) as member:
        yield FollowedUnits(kind, units, config, data, folder, member)


class FollowedUnits:
    """The units of one stage, and what has become of them. Iteration has None where nothing more fits at the moment, or
    nothing more is needed."""

    def __init__(
        self, kind: str, units: Sequence[Unit], config: Config, data: PlannedSet, folder: EncodedFolder, member: Member
    ) -> None:
        self._config, self._data, self._folder = config, data, folder
        self._queue = ShardQueue(folder, member, folder.paths, folder.sizes)
        self._needs = RunNeeds(data, config.validation.eval_samples)
        self._units = {unit.unit_id: unit for unit in units}
        shards = enumerate(zip(folder.paths, folder.kinds, strict=True))
        self._names = {number: unit_name(path.rpartition("/")[2]) for number, (path, of) in shards if of == kind}
        self._numbers = {name: number for number, name in self._names.items()}
        self._start = Position(set=data.id, run=config.run_name, order=ReadingOrder.of(config.train))
        self._looked = 0.0
        self._seen: set[str] = set()  # units that were encoded once

    @property
    def format(self) -> str:
        """cache.format of the set's shards."""
        return "arrow" if self._folder.paths[0].endswith(ARROW_SUFFIX) else "webdataset"

    def drop(self, units: Collection[str]) -> None:
        """Remove shards that are to be made again."""
        with self._folder.locked():
            for unit in units & self._numbers.keys():
                self._folder.remove(self._folder.paths[self._numbers[unit]])

    @property
    def position(self) -> Position:
        """The trainer's, as it has written it; before it has, the start of the run."""
        position, start = self._folder.read_position(), self._start
        if position is None or (position.set, position.run) != (start.set, start.run):
            return start
        return (
            start.model_copy(update={"step": position.step}) if position.order.steps < start.order.steps else position
        )

    @property
    def is_over(self) -> bool:
        """Whether training has ended. Its position alone does not say so: that may be of a run whose folder is gone."""
        return read_progress(self._config).state == "finished"

    def before(self) -> set[str]:
        """The units of the steps up to the position, which were encoded once."""
        position = self.position
        for numbers in position.order.needs(self._data, last=position.step):
            self._seen.update(self._names[number] for number in numbers.tolist() if number in self._names)
            if len(self._seen) == len(self._names):
                break
        return set(self._seen)

    def __iter__(self) -> Iterator[Unit | None]:
        limit = self._config.cache.limit
        assert limit is not None
        while True:
            now = time.monotonic()
            if now - self._looked < PAUSE_S:
                yield None
                continue
            position = self.position
            needs = self._needs.at(position)
            wanted = [number for number in position.wanted if number < len(self._folder.paths)]
            number = self._queue.next(needs, wanted, self._names.__contains__)
            if number is not None:
                yield self._units[self._names[number]]
                continue
            self._looked = now
            # Of several ranks the position is a step behind, at the end too.
            if limit.alternate or (position.step >= position.order.steps - 1 and self.is_over):
                return
            # It may not fit beyond the steps that were checked before the run, or beside shards of no set.
            require_room(needs.next_bytes(self._folder.sizes, 2), position.step, limit.max_gb, self._queue.other)
            yield None

    def is_first(self, result: UnitResult) -> bool:
        """Whether this unit was not encoded before, as far as is known."""
        first = result.unit_id not in self._seen
        self._seen.add(result.unit_id)
        return first

    def finish(self, result: UnitResult) -> None:
        """LatentpressError for a unit that failed: training would wait for it."""
        self._queue.end(self._numbers[result.unit_id])
        if result.shard_path is None:
            raise LatentpressError(
                f"unit {result.unit_id} failed, and training would wait for it: {result.error}",
                "correct the cause and run the same command again",
            )
