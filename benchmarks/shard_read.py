"""How fast rows are read from a shard: Arrow and tar, with and without verification.

    python -m benchmarks.shard_read [--rows 400] [--shape 16,8,64,96] [--root DIR]

Each row is read and its tensor copied once, as the trainer does. Files are in the page cache. Also measures the
writers: their rate, and how much memory each takes at most beyond what the process had before.
"""

import argparse
import math
import random
import resource
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.common import MIB
from cache import arrow, shard, shard_io, wds  # noqa: F401 (so that importing is not measured)
from cache.shard import ShardMeta, ShardRow
from cache.store import Store
from cache.tensors import Array


def write(root: str, format: str, rows: int, shape: tuple[int, ...]) -> tuple[str, float, float]:
    """The shard's path, seconds, and MiB of memory beyond what the process had before."""
    values = np.random.default_rng(0).integers(0, 1 << 16, math.prod(shape), "<u2")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    meta = ShardMeta("latents", "bench", "unit", "768x512@29")
    with shard_io.open_writer(Store(root), "latents/bench/unit", meta, {"latent": "bfloat16"}, format) as out:
        for number in range(rows):
            latent = Array.from_numpy(np.roll(values, number).reshape(shape), "bfloat16")
            out.add(ShardRow(f"{number:032x}", {"latent": latent}))
        path = out.finish()
    seconds = time.perf_counter() - start
    return path, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def read(root: str, path: str, order: Iterable[int], verify: bool) -> float:
    """Seconds to read and copy the rows of `order`."""
    start = time.perf_counter()
    with shard_io.open_reader(Store(root), path) as reader:
        for number in order:
            reader.read(number, verify).tensors["latent"].numpy().copy()
    return time.perf_counter() - start


def benchmark_formats(root: str, rows: int, shape: tuple[int, ...]) -> None:
    mib = rows * math.prod(shape) * 2 / MIB
    print(f"{rows} rows of {shape} bfloat16, {mib:.1f} MiB")
    orders = {"sequential": range(rows), "random": random.Random(0).sample(range(rows), rows)}
    for format in shard.SUFFIXES:
        with get_context("fork").Pool(1) as pool:
            path, seconds, memory = pool.apply(write, (root, format, rows, shape))
        print(f"{format:10} write  {rows / seconds:8.0f} rows/s  {mib / seconds:6.0f} MiB/s  +{memory:.0f} MiB")
        for name, order in orders.items():
            for verify in (True, False):
                best = min(read(root, path, order, verify) for _ in range(5))
                checked = "verified" if verify else "unverified"
                print(f"{format:10} {name:10} {checked:10} {rows / best:8.0f} rows/s  {mib / best:6.0f} MiB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=0, help="0: as many as make about 128 MiB")
    parser.add_argument("--shape", default="16,1,128,128", help="of one tensor, separated by commas")
    parser.add_argument("--root", type=Path, help="a folder on the disk to be measured")
    options = parser.parse_args()
    shape = tuple(int(size) for size in options.shape.split(","))
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        benchmark_formats(root, options.rows or max(1, 128 * MIB // (2 * math.prod(shape))), shape)


if __name__ == "__main__":
    main()
