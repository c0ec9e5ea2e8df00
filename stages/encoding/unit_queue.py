"""The units that an encoding stage gives out: until --max-time is near, and with --steal those of other parts too.

With `--max-time` a worker begins no unit that it is not expected to finish. With `--steal` a process whose own part is
done goes on with units of parts that are not, the last ones first. Nobody hands these out. The parts that are done
divide what remains by a listing of shards alone: a unit goes to the part of the highest random weight (rendezvous
hashing: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates"), so a part that is done later
takes some units over, and all others stay where they are. What others encode at the moment is not seen, so some units
are done twice, with the same bytes. benchmarks/results/scale_sim.md has how many, and other ways to choose.

A stage that follows training, with a limited cache, gives out units in the order in which training needs them, for as
long as it runs (`FollowedUnits`).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint

import numpy as np
from numpy.typing import NDArray

from cache.runs.training_run import read_progress
from cache.sets.planned_set import PlannedSet
from cache.sets.plans import Unit
from cache.sets.set_lookup import open_configured_set
from cache.sets.trainset import SetNotFound
from cache.shards.shard import ARROW_SUFFIX, SUFFIXES, find_done_units, unit_name
from cache.shards.shard_supply import SupplyError
from cache.store.damage import ENCODE_PROGRAMS
from cache.store.store import Store
from cache.supply.encoded_folder import EncodedFolder, Position, ReadingOrder, RunNeeds, require_room
from cache.supply.limited_folder import Member, ShardQueue
from schemas.cli.console import Console
from schemas.cli.options import Partition
from schemas.config.encoding import CACHE_LIMIT
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.randomness import mix_bits
from stages.engines.jobs import UnitResult

PAUSE_S = 0.2  # between two polls of what training needs


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


LISTING_FACTOR = 20  # times what a listing of the shards takes, until the next one: of a million shards, a minute
MAX_STOLEN_UNITS = 3  # that a worker has at a time: one is written, one encoded, one read


class Claims:
    """The part that takes each unit, by number in the plan's order. `remaining`: (n,) sorted numbers of units without a
    shard, all that may ever be chosen. leave: units at the head of each part that stay with their owner, which is at
    them."""

    def __init__(self, remaining: NDArray[np.int64], total: int, leave: int = 1) -> None:
        self._units, self._total, self._leave = remaining, total, leave
        self._owners = np.full(len(remaining), -1)
        self._weights = np.zeros(len(remaining), np.uint64)
        self._finished: set[int] = set()

    def add_finished(self, parts: Collection[int]) -> None:
        """Parts that are done, from now on."""
        for part in set(parts) - self._finished:
            weights = mix_bits((self._units * self._total + part + 1).astype(np.uint64))
            higher = weights > self._weights
            self._weights[higher], self._owners[higher] = weights[higher], part
            self._finished.add(part)

    def choose(self, remaining: NDArray[np.int64], part: int) -> NDArray[np.int64]:
        """Choose what `part` takes of these units, sorted numbers: first those that their owners would come to last."""
        order = np.argsort(remaining % self._total, kind="stable")
        units = remaining[order]
        starts = np.flatnonzero(np.diff(units % self._total, prepend=-1))
        ahead = np.arange(len(units)) - np.repeat(starts, np.diff(starts, append=len(units)))
        taken = (ahead >= self._leave) & (self._owners[np.searchsorted(self._units, units)] == part)
        return units[taken][np.argsort(-ahead[taken], kind="stable")]


@dataclass(frozen=True)
class Shards:
    """The shards of a stage in its store. again: units that have one and are encoded again, by their owners."""

    store: Store
    folder: str
    format: str
    again: Collection[str] = ()

    def has(self, unit: Unit) -> bool:
        """One request."""
        name = f"{self.folder}/{unit.unit_id}{SUFFIXES[self.format]}"
        return unit.unit_id not in self.again and self.store.exists(name)


def take_units(
    owned: Sequence[Unit],
    units: Sequence[Unit],
    partition: Partition,
    leave: int,
    shards: Shards,
    queue: TimedUnits,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Unit | None]:
    """The units of this part, `own`, but for those that another process did meanwhile; then, once they are done, one by
    one, units of other parts, as long as this part has a share in what remains. None while there is enough in work:
    what is taken long before it is encoded was chosen by a listing that has grown old. units: all of the plan. leave:
    see Claims; there are as many workers. queue: gives these units out, and knows how many are in work. A unit that
    failed here is not tried again here."""
    begun = {unit.unit_id for unit in owned}
    for unit in owned:
        if shards.has(unit):
            queue.pass_over(unit)
        else:
            yield unit
    while queue.in_work:
        yield None
    claims, chosen, next_listing = None, deque[int](), -np.inf
    while True:
        while queue.in_work >= MAX_STOLEN_UNITS * leave:
            yield None
        if not chosen or clock() >= next_listing:
            begin = clock()
            done = find_done_units(shards.store, shards.folder, [unit.unit_id for unit in units])
            remaining = np.array([n for n, unit in enumerate(units) if unit.unit_id not in done], np.int64)
            claims = claims or Claims(remaining, partition.total, leave)
            unfinished = set((remaining % partition.total).tolist()) - {partition.number}
            claims.add_finished(set(range(partition.total)) - unfinished)
            numbers = claims.choose(remaining, partition.number).tolist()
            chosen = deque(n for n in numbers if units[n].unit_id not in begun)
            if not chosen:
                return
            next_listing = begin + LISTING_FACTOR * (clock() - begin)
        unit = units[chosen.popleft()]
        if not shards.has(unit):
            begun.add(unit.unit_id)
            yield unit


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
