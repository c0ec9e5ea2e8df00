"""Simulates processes that share the units of an encoding stage.

    python -m benchmarks.sharing [--seeds 5] [--slow 0.03]

Ways: `--shard i/n`, a part for each process; the same command for all processes, each of which encodes units without a
shard in a different order; one program that distributes all units (`--engine ray`). The time of each unit varies
(lognormal, 0.3), and a share `--slow` of the processes takes twice as long. Requests and lost machines are not
simulated.

times ideal: the total time divided by the time of perfectly distributed work. twice: share of units that were encoded a
second time.
"""

import heapq
import random
import statistics

from benchmarks.common import make_parser, print_header, print_row

WAYS = {"--shard i/n": "parts", "the same command": "shared", "--engine ray": "queue"}
CASES = [(2, 100), (8, 100), (8, 1000), (50, 2000), (300, 12_000), (1000, 44_000), (1000, 175_000)]


def simulate(way: str, workers: int, units: int, slow: float, seed: int) -> tuple[float, float]:
    """Returns (times ideal, share of units that were encoded twice)."""
    draw = random.Random(seed)
    costs = [draw.lognormvariate(0, 0.3) for _ in range(units)]
    paces = [2 if draw.random() < slow else 1 for _ in range(workers)]
    open_list, indices = list(range(units)), list(range(units))  # units without a shard, and their indices in this list
    parts = [iter(range(worker, units, workers)) for worker in range(workers)]
    queue, events = iter(range(units)), list[tuple[float, int, int]]()
    end, twice, open_units = 0.0, 0, set(open_list)

    def begin(worker: int, at: float) -> None:
        if way == "shared":  # the next unit in a different order is a random unit
            unit = draw.choice(open_list) if open_list else None
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
            last, end = open_list.pop(), at
            if last != unit:
                open_list[indices[unit]], indices[last] = last, indices[unit]
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
            results = [simulate(way, workers, units, options.slow, seed) for seed in range(options.seeds)]
            ideal, twice = (statistics.mean(numbers) for numbers in zip(*results, strict=True))
            print_row(workers, f"{units:,}", name, f"{ideal:.2f}", f"{twice:.1%}")


if __name__ == "__main__":
    main()
