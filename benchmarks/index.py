"""Time and memory of `latentpress index` for a large set.

    python -m benchmarks.index [--items 100000 1000000]

The plan comes from benchmarks.planning (one caption per item); the shards have the units' ids and tiny tensors. Each
run is a separate process; "again" is a second run without changes. "most memory" also counts the pages of tables and
shards, which are page cache.
"""

import resource
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import make_parser, print_header, print_row, run_silently, time_call, write_shard
from benchmarks.planning import make_project, run_bucket
from cache.sets.set_lookup import current_plan
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.config.loading import load_config
from stages import index
from stages.encoding.stage_registry import required_stages


def write_shards(path: Path) -> None:
    """Write a shard for each unit of the plan."""
    config = load_config(path)
    store = Store(config.root)
    plan = current_plan(store, config)
    for stage in required_stages(config):
        state = stage.state(store, config, plan)
        tensor = {"embeds" if stage.kind == "text" else "latent": Array.from_numpy(np.zeros(1, np.float32))}
        for unit in state.units:
            meta = ShardMeta(stage.kind, state.fingerprint, unit.unit_id, unit.bucket)
            write_shard(store, meta, [ShardRow(name, tensor) for name in unit.members])


def run_index(path: Path) -> tuple[float, float]:
    """Run index once. Returns (seconds, peak MiB)."""
    pa.set_cpu_count(1)
    seconds, _ = time_call(lambda: run_silently(index.run, path))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 1_000_000])
    options = parser.parse_args()
    print_header("items", "shards", "index, s", "again, s", "most memory, MiB")
    with tempfile.TemporaryDirectory() as folder:
        for items in options.items:
            path = make_project(Path(folder), items, "image", 0.0)
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                pool.apply(run_bucket, (path,))
                pool.apply(write_shards, (path,))
                (first, first_mib), (second, second_mib) = (pool.apply(run_index, (path,)) for _ in range(2))
            shards = sum(1 for _ in Path(load_config(path).root).glob("*/*/*.arrow"))
            print_row(f"{items:,}", shards, f"{first:.2f}", f"{second:.2f}", f"{max(first_mib, second_mib):,.0f}")


if __name__ == "__main__":
    main()
