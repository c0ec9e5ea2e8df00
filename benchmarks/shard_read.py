"""Rate of reading rows from a shard: Arrow and tar, with and without verification.

    python -m benchmarks.shard_read [--rows 400] [--shape 16,8,64,96] [--root DIR]

Each row is read and its tensor copied once, like in the trainer. Files are in the page cache. Also measures the
writers: their rate, and the peak memory of the process minus its memory before.
"""

import math
import random
import resource
import tempfile
from collections.abc import Iterable
from multiprocessing import get_context

from benchmarks.common import MIB, make_parser, make_rows, print_header, print_row, time_call, write_shard
from cache.shards import arrow, shard, shard_io, wds  # noqa: F401 (imported here, so that the import is not measured)
from cache.shards.shard import ShardMeta
from cache.store.store import Store


def write(root: str, format: str, rows: int, shape: tuple[int, ...]) -> tuple[str, float, float]:
    """Write a shard. Returns (path, seconds, MiB by which the peak memory of the process grew)."""
    latents, paths = make_rows("latent", shape, rows), list[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    meta = ShardMeta("latents", "bench", "unit", "768x512@29")
    seconds, _ = time_call(lambda: paths.append(write_shard(Store(root), meta, latents, format)))
    return paths[0], seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def read(root: str, path: str, order: Iterable[int], verify: bool) -> None:
    """Read and copy the rows of `order`."""
    with shard_io.open_reader(Store(root), path) as reader:
        for number in order:
            reader.read(number, verify).tensors["latent"].numpy().copy()


def benchmark_formats(root: str, rows: int, shape: tuple[int, ...]) -> None:
    mib = rows * math.prod(shape) * 2 / MIB
    print(f"{rows} rows of {shape} bfloat16, {mib:.1f} MiB")
    print_header("format", "", "rows/s", "MiB/s", "MiB of memory")
    orders = {"sequential": range(rows), "random": random.Random(0).sample(range(rows), rows)}
    for format in shard.SUFFIXES:
        with get_context("fork").Pool(1) as pool:
            path, seconds, memory = pool.apply(write, (root, format, rows, shape))
        print_row(format, "write", f"{rows / seconds:.0f}", f"{mib / seconds:.0f}", f"{memory:.0f}")
        for name, order in orders.items():
            for verify in (True, False):
                best, _ = min(time_call(lambda args=(root, path, order, verify): read(*args)) for _ in range(5))
                way = f"read, {name}, {'verified' if verify else 'unverified'}"
                print_row(format, way, f"{rows / best:.0f}", f"{mib / best:.0f}", "")


def main() -> None:
    parser = make_parser(__doc__, root=True)
    parser.add_argument("--rows", type=int, default=0, help="0: rows of about 128 MiB in total")
    parser.add_argument("--shape", default="16,1,128,128", help="shape of a tensor, separated by commas")
    options = parser.parse_args()
    shape = tuple(int(size) for size in options.shape.split(","))
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        benchmark_formats(root, options.rows or max(1, 128 * MIB // (2 * math.prod(shape))), shape)


if __name__ == "__main__":
    main()
