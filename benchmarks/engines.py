"""encode-latents with each engine: one worker, several processes, and as many actors on a Ray cluster.

    python -m benchmarks.engines [--images 680] [--side 64] [--workers 2] [--channels 128] [--unit-mib 0.016]
    RAY_worker_niceness=0 ray start --head --num-cpus 2 && python -m benchmarks.engines --address HOST:PORT

By default, Ray gives its workers a lower priority, which has an effect while other programs compute. Every worker
computes on one thread, and a single worker is bound to one core, because it would otherwise read pictures on the second
core. By default, the model's layers fit the processor's caches; larger pictures measure the memory that the cores share
(with --channels 32 --side 384, a core takes 1.2 to 1.7 times as long while the second core does the same). "whole" is
the program's time, from its start in this process to its report. "first shard" is the time until the first unit is
finished: start-up, loading, and one unit. "work" is the time from then to the last shard. The shards of all runs are
compared.
"""

import io
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.common import make_parser, print_header, print_row, run_silently, write_config
from benchmarks.latents import make_checkpoint, make_project
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from stages import bucket, discover, encode_latents


def run(path: Path, workers: int, **engine: Any) -> tuple[float, float, float, str]:
    """Run the stage. Returns (seconds, seconds until the first shard, seconds from the first to the last shard, hash of
    all shards)."""
    latents = path.parent / "units" / "latents"
    shutil.rmtree(latents, ignore_errors=True)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:workers])
    begin, clock = time.perf_counter(), time.time()
    try:
        report = encode_latents.run(
            load_config(path), Options(path, workers=workers), Console(stderr=io.StringIO()), **engine
        )
    finally:
        os.sched_setaffinity(0, cores)
    total_s = time.perf_counter() - begin
    assert (report.exit_code, report.remaining) == (0, 0), report
    shards = sorted(latents.rglob("*.arrow"))
    times = [shard.stat().st_mtime for shard in shards]
    content = xxhash.xxh3_128_hexdigest(b"".join(shard.read_bytes() for shard in shards))
    return total_s, min(times) - clock, max(times) - min(times), content


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=680)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--unit-mib", type=float, default=0.016)
    parser.add_argument("--address", help="address of a running Ray cluster")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_checkpoint(Path(name) / "model", options.channels)
        # Files are little larger than the encoded pictures, because reading large pictures takes time from computing.
        sizes = [(options.side * 3 // 2, options.side), (options.side, options.side), (options.side, options.side * 2)]
        path = make_project(Path(name), options.images, options.side, model, sizes=sizes)
        settings = json.loads(path.read_text()) | {"root": "units", "cache": {"unit_mib": options.unit_mib}}
        write_config(path, settings)
        for program in (discover.run, bucket.run):
            run_silently(program, path)
        cases: dict[str, dict[str, Any]] = {"one worker": {}}
        if options.workers > 1:
            cases[f"{options.workers} processes"] = {}
        if options.address:
            cases[f"{options.workers} actors on Ray"] = {"address": options.address}
        print_header(
            "engine", "whole, s", "first shard, s", "work, s", "work, of one worker's", "whole, of the pool's", "shards"
        )
        results = list[tuple[float, float, float, str]]()
        for case, engine in cases.items():
            results.append(run(path, options.workers if results else 1, **engine))
            total_s, first, work, content = results[-1]
            share = f"{work / results[0][2]:.3f}" if results[0][2] else "-"
            pool_share = f"{total_s / results[1][0]:.3f}" if len(results) > 2 else ""
            comparison = "the same" if content == results[0][3] else "DIFFERENT"
            print_row(case, f"{total_s:.1f}", f"{first:.1f}", f"{work:.1f}", share, pool_share, comparison)


if __name__ == "__main__":
    main()
