"""A simulation of processes that share the units of an encoding stage.

    python -m benchmarks.sharing [--seeds 5] [--slow 0.03]

Ways: `--shard i/n`, a part for each process; the same command for all processes, each of which takes the units without
a shard in an order of its own; one program that hands out all units (`--engine ray`). The time of each unit varies
(lognormal, 0.3), and a share `--slow` of the processes takes twice as long. Not simulated: requests, lost machines.

times ideal: the end, divided by the time of the same work shared out perfectly. twice: units that were encoded a second
time, of all units.
"""

import heapq
import random
import statistics

from benchmarks.common import make_parser, print_header, print_row

WAYS = {"--shard i/n": "parts", "the same command": "shared", "--engine ray": "queue"}
CASES = [(2, 100), (8, 100), (8, 1000), (50, 2000), (300, 12_000), (1000, 44_000), (1000, 175_000)]


def simulate(way: str, workers: int, units: int, slow: float, seed: int) -> tuple[float, float]:
    """Times ideal, and the share of units that were done twice."""
    draw = random.Random(seed)
    costs = [draw.lognormvariate(0, 0.3) for _ in range(units)]
    paces = [2 if draw.random() < slow else 1 for _ in range(workers)]
    left, places = list(range(units)), list(range(units))  # units without a shard; where each is in that list
    parts = [iter(range(worker, units, workers)) for worker in range(workers)]
    queue, events = iter(range(units)), list[tuple[float, int, int]]()
    end, twice, open_units = 0.0, 0, set(left)

    def begin(worker: int, at: float) -> None:
        if way == "shared":  # the next one in an order of its own is any of them
            unit = draw.choice(left) if left else None
        else:
            unit = next(parts[worker] if way == "parts" else queue, None)
        if unit is not None:
            heapq.heappush(events, (at + costs[unit] * paces[worker], worker, unit))

    for worker in range(workers):
        begin(worker, draw.random() / 2)
    while events:
        at, worker, unit = heapq.heappop(events)
        if unit in open_units:
            open_units.remove(unit)
            last, end = left.pop(), at
            if last != unit:
                left[places[unit]], places[last] = last, places[unit]
        else:
            twice += 1
        begin(worker, at)
    return end / (sum(costs) / sum(1 / pace for pace in paces)), twice / units


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=0.03)
    options = parser.parse_args()
    print_header("processes", "units", "way", "times ideal", "twice")
    for workers, units in CASES:
        for name, way in WAYS.items():
            found = [simulate(way, workers, units, options.slow, seed) for seed in range(options.seeds)]
            ideal, twice = (statistics.mean(numbers) for numbers in zip(*found, strict=True))
            print_row(workers, f"{units:,}", name, f"{ideal:.2f}", f"{twice:.1%}")


if __name__ == "__main__":
    main()
