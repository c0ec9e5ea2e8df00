"""Opening the index of a training set, checked and unchecked.

    python -m benchmarks.tables [--rows 10000000] [--repeat 5] [--root DIR]

The file is in the page cache. "mapped" is pyarrow alone, which reads no row; "checksum" compares every byte with the
file's xxh3-128; "validated" also has Arrow check every buffer; "read_table" also checks every value; "again" is a
second call in the same process. Medians of seconds, and of processor seconds.
"""

import tempfile
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from benchmarks.common import MIB, make_parser, medians, time_call
from cache.sets import table_checks
from cache.store import arrow_ipc
from cache.store.store import Store
from schemas.tables import INDEX_SCHEMA

INDEX_PATH = "sets/0123456789abcdef/index.arrow"


def make_index(count: int) -> pa.Table:
    """An index of `count` rows with one caption each, in four buckets."""
    digits = np.random.default_rng(0).integers(0, 16, 32 * count, np.uint8)
    numbers = np.arange(count, dtype=np.int32)
    ids = [
        None,
        pa.py_buffer(np.arange(0, 32 * count + 1, 32, dtype=np.int32)),
        pa.py_buffer(np.frombuffer(b"0123456789abcdef", np.uint8)[digits]),
    ]

    def texts(*values: str) -> pa.Array:
        return pa.array(values).take(pa.array(numbers * len(values) // count))

    columns = {
        "sample_id": pa.Array.from_buffers(pa.string(), count, ids),
        "role": texts("train"),
        "dataset": texts("photos"),
        "bucket": texts("1024x1024@1", "1152x896@1", "1280x768@1", "896x1152@1"),
        "repeats": np.zeros(count, np.int32),
        "weight": np.ones(count),
        "regularization": np.zeros(count, bool),
        "shard": numbers // 1000,
        "row": numbers % 1000,
        "texts": pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), pa.array(numbers)),
        "null_text": pa.nulls(count, pa.int32()),
    }
    return pa.table(columns, schema=INDEX_SCHEMA)


def main() -> None:
    parser = make_parser(__doc__, repeat=5, root=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    options = parser.parse_args()

    def measure(name: str, work: Callable[[], object]) -> None:
        seconds, cpu = medians(time_call(work) for _ in range(options.repeat))
        print(f"{name:10} {seconds:.4f} s ({cpu:.4f} s CPU)")

    with tempfile.TemporaryDirectory(dir=options.root) as root:
        store = Store(root)
        store.write_table(INDEX_PATH, make_index(options.rows))
        print(f"{options.rows} rows, {store.size(INDEX_PATH) / MIB:.0f} MiB")
        with store.open(INDEX_PATH) as file:
            measure("mapped", lambda: pa.ipc.open_file(file).read_all())
            measure("checksum", lambda: arrow_ipc.verify_checksum(file))
            measure("validated", lambda: arrow_ipc.read_table(file))
        measure("read_table", lambda: Store(root).read_table(INDEX_PATH, table_checks.check_index))
        store.read_table(INDEX_PATH, table_checks.check_index)
        measure("again", lambda: store.read_table(INDEX_PATH, table_checks.check_index))


if __name__ == "__main__":
    main()
