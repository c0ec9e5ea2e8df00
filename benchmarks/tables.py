"""Opening the index of a training set, checked and unchecked.

    python -m benchmarks.tables [--rows 10000000] [--repeat 5] [--root DIR]

The file lies in the page cache. "checksum" compares every byte with the file's xxh3-128; "validated" has Arrow look at
every buffer as well; "read_table" does both and checks every value; "again" is a second call of the same program;
"mapped" is what pyarrow alone does, which looks at no row. Medians of seconds, and of those of the CPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from cache import table_checks, table_files
from cache.store import Store
from schemas.tables import INDEX_SCHEMA

INDEX_PATH = "sets/0123456789abcdef/index.arrow"


def make_index(count: int) -> pa.Table:
    """An index of `count` rows with one caption each, in four buckets."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[
        np.random.default_rng(0).integers(0, 16, 32 * count, np.uint8)
    ]
    ends = pa.py_buffer(np.arange(0, 32 * count + 1, 32, dtype=np.int32))
    numbers = np.arange(count, dtype=np.int32)

    def texts(*values: str) -> pa.Array:
        return pa.array(values).take(pa.array(numbers * len(values) // count))

    columns = {
        "sample_id": pa.Array.from_buffers(pa.string(), count, [None, ends, pa.py_buffer(digits)]),
        "role": texts("train"),
        "dataset": texts("photos"),
        "bucket": texts("1024x1024@1", "1152x896@1", "1280x768@1", "896x1152@1"),
        "repeats": pa.array(np.zeros(count, np.int32)),
        "weight": pa.array(np.ones(count)),
        "regularisation": pa.array(np.zeros(count, bool)),
        "shard": pa.array(numbers // 1000),
        "row": pa.array(numbers % 1000),
        "texts": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), pa.array(numbers)),
        "null_text": pa.nulls(count, pa.int32()),
    }
    return pa.table(columns, schema=INDEX_SCHEMA)


def time_median(repeat: int, work: Callable[[], object]) -> str:
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return f"{statistics.median(walls):.4f} s ({statistics.median(cpus):.4f} s CPU)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--root", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.root) as root:
        store = Store(root)
        store.write_table(INDEX_PATH, make_index(given.rows))
        print(f"{given.rows} rows, {store.size(INDEX_PATH) / 2**20:.0f} MiB")
        with store.open(INDEX_PATH) as file:
            print("mapped    ", time_median(given.repeat, lambda: pa.ipc.open_file(file).read_all()))
            print("checksum  ", time_median(given.repeat, lambda: table_files.verify_checksum(file)))
            print("validated ", time_median(given.repeat, lambda: table_files.read_table(file)))
        print(
            "read_table",
            time_median(given.repeat, lambda: Store(root).read_table(INDEX_PATH, table_checks.check_index)),
        )
        store.read_table(INDEX_PATH, table_checks.check_index)
        print("again     ", time_median(given.repeat, lambda: store.read_table(INDEX_PATH, table_checks.check_index)))


if __name__ == "__main__":
    main()
