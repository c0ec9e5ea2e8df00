"""A simulation of an encoding stage on many workers, of which some are lost and some are slow.

    python -m benchmarks.scale_sim [--unit-mib 32 128 512 2048] [--hours 8] [--workers 1000] [--seed 0] [--json]
    python -m benchmarks.scale_sim --seconds-per-mib 0.05 --start-s 60 --order largest --requeue back

Ways: `--shard i/n`, one part for each worker; the same with `--steal`; parts for nodes of eight workers (`--shard i/n
--workers 8`), where a process holds up to three units; one queue for all (`--engine ray`). How units are divided, what
is stolen and how many units a process holds come from the stages' own code.

The work is what all workers would do in `--hours` if none were lost or slow. A worker takes `--seconds-per-mib` of
shard on average, by default as encode-latents on one core (benchmarks/results/latents.md: 43.5 s for 60 latents of
144 KiB, after 14 s of start); buckets differ in it, and each unit by a lognormal factor (`--spread`). A share `--slow`
of nodes takes `--slow-factor` times as long. `--loss` of the nodes are lost in an hour, at random moments, with all
units that their workers had begun; each is replaced after `--replace-s`, and begins with a listing. The last unit of
each bucket is smaller. Not simulated: the time of requests, other than listings; a store that throttles.

wasted: work that was lost with a node, or was done a second time, of all work. idle: worker time without work, of all
worker time until the end: waiting, starting, replaced. tail: from the moment at which the first worker found nothing to
do until the end. times ideal: the end, divided by that of the same work shared out perfectly among the same nodes
without loss. requests: to the store in a second, on average and in the busiest minute, as counted on S3
(benchmarks/results/scale_sim.md): listings in pages of 1,000 names, the start of a program, and for each unit three
questions and the upload, in parts where a shard is large; by `--steal` one question more before each unit.
"""

import heapq
import json
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.common import make_parser, print_header, print_row
from cache.object_store import PART_BYTES
from schemas.cli.options import Partition
from stages.encoding.stealing import LISTING_FACTOR, LISTING_S, Claims
from stages.engines.local import MAX_UNITS_PER_PROCESS

START_REQUESTS = 18  # of a program, beside its listings
UNIT_REQUESTS = 3  # beside the upload
PAGE = 1000  # names in a page of a listing
PAGE_S = 0.06  # to read one: benchmarks/results/object_store.md, 6.1 s for 103
MAX_UNIT_TRIES = 3  # as on Ray, after which a unit is left to the next run
NODE_WORKERS = 8
DEFAULTS = {"hours": 8.0, "seconds-per-mib": 43.5 / (60 * 144 / 1024), "start-s": 14.0, "loss": 0.05}
DEFAULTS |= {"replace-s": 300.0, "slow": 0.03, "slow-factor": 2.0, "spread": 0.3}


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
        """As stages.encoding.stealing.take_units."""
        part, delay = self._parts[number], 0.0
        while True:
            if not part.chosen or at > part.next_listing:
                pages = 1 + self._shards // PAGE
                self.result.ask(at, pages)
                delay = pages * PAGE_S
                part.next_listing = at + max(LISTING_S, LISTING_FACTOR * delay)
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


def make_units(
    mib: float, unit_mib: float, seconds_per_mib: float, buckets: int, spread: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and MiB of the units of a plan. Buckets have shares like 1, 1/2, 1/3 ... of the bytes, and differ in
    their seconds for each MiB; all units of a bucket but the last are of `unit_mib`."""
    random = np.random.default_rng([seed, 1])
    shares = 1 / np.arange(1, buckets + 1)
    sizes, pace = [], []
    for share in random.permutation(shares / shares.sum()):
        whole, rest = divmod(mib * share, unit_mib)
        sizes += [np.append(np.full(int(whole), unit_mib), [rest] if rest > 0 else [])]
        pace += [np.full(len(sizes[-1]), math.exp(random.normal(0, spread)))]
    size, factor = np.concatenate(sizes), np.concatenate(pace) * random.lognormal(0, spread, sum(map(len, sizes)))
    seconds = size * factor
    return seconds * (mib * seconds_per_mib / seconds.sum()), size


def summarise(settings: Settings, result: Result) -> dict[str, Any]:
    """What the table has, as numbers."""
    work = result.useful + result.lost + result.twice
    speed = 1 - settings.slow + settings.slow / settings.slow_factor  # of a node, on average
    ideal = settings.costs.sum() / (settings.workers * speed)
    return {
        "units": len(settings.costs),
        "unit_s": float(settings.costs.mean()),
        "end_h": result.end / 3600,
        "times_ideal": result.end / ideal,
        "wasted": (result.lost + result.twice) / work,
        "twice": result.twice / work,
        "idle": 1 - work / (settings.workers * result.end),
        "tail_min": max(0.0, result.end - result.first_idle) / 60,
        "left": result.left,
        "losses": result.losses,
        "stolen": result.stolen,
        "requests_s": result.minutes.total() / result.end,
        "peak_requests_s": max(result.minutes.values()) / 60,
    }


def make_ways(workers: int) -> Iterator[Way]:
    yield Way("--shard")
    yield Way("--shard --steal", steal=True)
    nodes = max(1, workers // NODE_WORKERS)
    if nodes > 1:
        pool = Way("--shard --workers 8", nodes, NODE_WORKERS, MAX_UNITS_PER_PROCESS)
        yield pool
        yield replace(pool, name="--shard --workers 8 --steal", steal=True)
    yield Way("--engine ray", 1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--unit-mib", type=float, nargs="+", default=[32.0, 128.0, 512.0, 2048.0])
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, choices in (("order", ("plan", "largest")), ("requeue", ("front", "back"))):
        parser.add_argument(f"--{name}", choices=choices, default=choices[0])
    for name, number in (("workers", 1000), ("buckets", 40), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    columns = "MiB", "units", "s", "way", "end, h", "times ideal", "wasted", "of it twice", "idle", "tail, min", "left"
    if not options.json:
        print_header(*columns, "requests/s", "peak")
    mib = options.hours * 3600 * options.workers / options.seconds_per_mib
    keys = ("workers", "slow", "slow_factor", "loss", "replace_s", "start_s", "requeue", "order", "seed")
    for unit_mib in options.unit_mib:
        costs, sizes = make_units(mib, unit_mib, options.seconds_per_mib, options.buckets, options.spread, options.seed)
        for way in make_ways(options.workers):
            given = {key: getattr(options, key) for key in keys}
            settings = Settings(costs, sizes, **given, leave=way.node_workers)
            found = summarise(settings, Simulation(settings, way).run())
            if options.json:
                print(json.dumps({"unit_mib": unit_mib, **asdict(way), **found}))
                continue
            shares = [f"{found[name]:.2%}" for name in ("wasted", "twice", "idle")]
            print_row(f"{unit_mib:g}", f"{found['units']:,}", f"{found['unit_s']:.3g}", way.name,
                      f"{found['end_h']:.2f}", f"{found['times_ideal']:.3f}", *shares, f"{found['tail_min']:.1f}",
                      found["left"], f"{found['requests_s']:.1f}", f"{found['peak_requests_s']:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
