"""Workers, nodes and units as events in the order of time. benchmarks.scale_sim runs it, and says what is simulated."""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from cache.store.object_store import PART_BYTES
from schemas.cli.options import Partition
from stages.encoding.unit_queue import LISTING_FACTOR, Claims

START_REQUESTS = 18  # of a program, beside its listings
UNIT_REQUESTS = 3  # beside the upload
PAGE = 1000  # names in a page of a listing
PAGE_S = 0.06  # to read one: benchmarks/results/object_store.md, 6.1 s for 103
MAX_UNIT_TRIES = 3  # as on Ray, after which a unit is left to the next run


@dataclass(frozen=True)
class Way:
    """How units reach workers. parts: of `--shard`, None for one for each worker. held: units that a worker has at a
    time."""

    name: str
    parts: int | None = None
    node_workers: int = 1
    held: int = 1
    steal: bool = False


@dataclass(frozen=True)
class Settings:
    """costs, sizes: seconds of each unit on a worker that is not slow, and its MiB, in the plan's order."""

    costs: np.ndarray
    sizes: np.ndarray
    workers: int
    slow: float = 0.0
    slow_factor: float = 1.0
    loss: float = 0.0
    replace_s: float = 300.0
    start_s: float = 0.0
    requeue: str = "front"
    order: str = "plan"
    leave: int = 1
    seed: int = 0


@dataclass
class Result:
    """Worker seconds: useful, lost, twice. end, first_idle: seconds from the start. minutes: requests in each."""

    useful: float = 0.0
    lost: float = 0.0
    twice: float = 0.0
    end: float = 0.0
    first_idle: float = math.inf
    left: int = 0
    losses: int = 0
    stolen: int = 0
    minutes: Counter[int] = field(default_factory=Counter)

    def ask(self, at: float, requests: int) -> None:
        self.minutes[int(at // 60)] += requests


@dataclass
class _Worker:
    """unit, since: what it does now. epoch: how often its node was lost. held: units that it does next."""

    part: int
    factor: float = 1.0
    unit: int | None = None
    since: float = 0.0
    epoch: int = 0
    held: deque[int] = field(default_factory=deque)


@dataclass
class _Part:
    """A program. waiting: its own units. chosen: what it takes of others."""

    waiting: deque[int]
    open: int  # units without a shard
    chosen: deque[int] = field(default_factory=deque)
    begun: set[int] = field(default_factory=set)
    next_listing: float = -math.inf


class Simulation:
    """Events in the order of time: a worker is ready, ends a unit, or its node is lost."""

    def __init__(self, settings: Settings, way: Way) -> None:
        self._of, self._way, self._random = settings, way, np.random.default_rng(settings.seed)
        units, total = range(len(settings.costs)), way.parts or settings.workers
        own = [Partition(number, total).select(units) for number in range(total)]
        if settings.order == "largest":
            own = [sorted(part, key=lambda unit: -settings.sizes[unit]) for part in own]
        self._parts = [_Part(deque(part), len(part)) for part in own]
        self._done = np.zeros(len(units), bool)
        self._deaths: Counter[int] = Counter()
        self._claims = Claims(np.arange(len(units)), total, settings.leave)
        self._workers = [_Worker(n // way.node_workers % total) for n in range(settings.workers)]
        starts = range(0, settings.workers, way.node_workers)
        self._nodes = [range(n, min(n + way.node_workers, settings.workers)) for n in starts]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._count = self._shards = 0
        self.result = Result()

    def _push(self, at: float, kind: str, number: int, epoch: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, kind, number, epoch))

    def run(self) -> Result:
        for number in range(len(self._nodes)):
            self._start_node(number, 0.0)
        while self._events and self._shards + self.result.left < len(self._done):
            at, _, kind, number, epoch = heapq.heappop(self._events)
            if kind == "loss":
                self._lose(number, at)
            elif epoch == self._workers[number].epoch:
                if kind == "end":
                    self._finish(number, at)
                self._begin(number, at)
        # What runs on is the same unit a second time: by --steal, beside its owner.
        self.result.twice += sum(self.result.end - w.since for w in self._workers if w.unit is not None)
        return self.result

    def _start_node(self, number: int, at: float) -> None:
        """Workers load their model; each part, or the one queue at its start, lists the shards."""
        factor = self._of.slow_factor if self._random.random() < self._of.slow else 1.0
        for worker in self._nodes[number]:
            self._workers[worker].factor = factor
            self._push(at + self._of.start_s + self._list(at, worker), "ready", worker, self._workers[worker].epoch)
        if self._of.loss:
            rate = -math.log(1 - self._of.loss) / 3600
            self._push(at + self._random.exponential(1 / rate), "loss", number)

    def _list(self, at: float, worker: int) -> float:
        """Seconds of a listing, where this worker makes one."""
        leads = worker == 0 and at == 0 if len(self._parts) == 1 else worker % self._way.node_workers == 0
        pages = 1 + self._shards // PAGE
        if leads:
            self.result.ask(at, START_REQUESTS + pages)
        return pages * PAGE_S if len(self._parts) > 1 else 0.0

    def _begin(self, number: int, at: float) -> None:
        worker, (unit, delay) = self._workers[number], self._next(number, at)
        worker.unit, worker.since = unit, at + delay
        if unit is None:
            self.result.first_idle = min(self.result.first_idle, at)
            if len(self._parts) > 1 and number % self._way.node_workers == 0:  # the program reports
                self.result.ask(at, 1 + self._shards // PAGE)
        else:
            self._push(at + delay + self._of.costs[unit] * worker.factor, "end", number, worker.epoch)

    def _next(self, number: int, at: float) -> tuple[int | None, float]:
        """The unit that a worker begins now, and the seconds of a listing before."""
        worker = self._workers[number]
        waiting = self._parts[worker.part].waiting
        while waiting or worker.held:
            while waiting and len(worker.held) < self._way.held:
                unit = waiting.popleft()
                self.result.ask(at, int(self._way.steal))
                if not (self._way.steal and self._done[unit]):
                    worker.held.append(unit)
            if worker.held:
                return worker.held.popleft(), 0.0
        return self._steal(worker.part, at) if self._way.steal else (None, 0.0)

    def _steal(self, number: int, at: float) -> tuple[int | None, float]:
        """As stages.encoding.unit_queue.take_units."""
        part, delay = self._parts[number], 0.0
        while True:
            if not part.chosen or at > part.next_listing:
                pages = 1 + self._shards // PAGE
                self.result.ask(at, pages)
                delay = pages * PAGE_S
                part.next_listing = at + LISTING_FACTOR * delay
                self._claims.add_finished([number])
                found = self._claims.choose(np.flatnonzero(~self._done), number).tolist()
                part.chosen = deque(unit for unit in found if unit not in part.begun)
                if not part.chosen:
                    return None, delay
            unit = part.chosen.popleft()
            self.result.ask(at, 1)
            if not self._done[unit]:
                part.begun.add(unit)
                self.result.stolen += 1
                return unit, delay

    def _finish(self, number: int, at: float) -> None:
        worker = self._workers[number]
        unit, seconds = worker.unit, at - worker.since
        assert unit is not None
        self.result.ask(at, UNIT_REQUESTS + count_uploads(self._of.sizes[unit]))
        if self._done[unit]:
            self.result.twice += seconds
            return
        self._done[unit] = True
        self._shards += 1
        self.result.useful += seconds
        self.result.end = at
        owner = unit % len(self._parts)
        self._parts[owner].open -= 1
        if not self._parts[owner].open:
            self._claims.add_finished([owner])

    def _lose(self, number: int, at: float) -> None:
        """A node: what its workers had begun is done again."""
        self.result.losses += 1
        for each in self._nodes[number]:
            worker = self._workers[each]
            part, lost = self._parts[worker.part], [*worker.held]
            if worker.unit is not None:
                self.result.lost += max(0.0, at - worker.since)
                self._deaths[worker.unit] += len(self._parts) == 1
                if self._deaths[worker.unit] < MAX_UNIT_TRIES:
                    lost.insert(0, worker.unit)
                else:
                    self.result.left += 1
            last = self._of.requeue == "back" and len(self._parts) == 1
            for unit in reversed(lost):
                if unit % len(self._parts) == worker.part:
                    (part.waiting.append if last else part.waiting.appendleft)(unit)
            worker.epoch, worker.unit, worker.held = worker.epoch + 1, None, deque()
            part.chosen, part.begun = deque(), set()
        self._start_node(number, at + self._of.replace_s)


def count_uploads(mib: float) -> int:
    """Requests that upload a shard: one put, or where it has more than two parts these, a beginning and an end."""
    parts = math.ceil(mib * 2**20 / PART_BYTES)
    return 1 if parts <= 2 else parts + 2
