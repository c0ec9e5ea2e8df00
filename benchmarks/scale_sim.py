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

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.common import make_parser, print_header, print_row
from benchmarks.worker_simulation import Result, Settings, Simulation, Way
from stages.engines.local import MAX_UNITS_PER_PROCESS

NODE_WORKERS = 8
DEFAULTS = {"hours": 8.0, "seconds-per-mib": 43.5 / (60 * 144 / 1024), "start-s": 14.0, "loss": 0.05}
DEFAULTS |= {"replace-s": 300.0, "slow": 0.03, "slow-factor": 2.0, "spread": 0.3}


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


def summarize(settings: Settings, result: Result) -> dict[str, Any]:
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
            found = summarize(settings, Simulation(settings, way).run())
            if options.json:
                print(json.dumps({"unit_mib": unit_mib, **asdict(way), **found}))
                continue
            shares = [f"{found[name]:.2%}" for name in ("wasted", "twice", "idle")]
            print_row(f"{unit_mib:g}", f"{found['units']:,}", f"{found['unit_s']:.3g}", way.name,
                      f"{found['end_h']:.2f}", f"{found['times_ideal']:.3f}", *shares, f"{found['tail_min']:.1f}",
                      found["left"], f"{found['requests_s']:.1f}", f"{found['peak_requests_s']:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
