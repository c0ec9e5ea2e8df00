"""`verify` compared with only reading and hashing the same files, and programs that find nothing to do.

    python -m benchmarks.verify [--mib 1024] [--items 100000] [--unit-mib 128 8] [--repeat 5] [--root DIR]

The first table: shards of bfloat16 latents (16, 1, 128, 128) and texts (100, 3584), 128 MiB each, read by `verify` and
by a loop that reads a file by blocks and hashes them with xxh3-128; "cold" after the kernel dropped the files from its
cache. The second: whole programs, each in a new process, over a plan of that many images whose texts and latents are
all encoded (rows of one number), by size of unit. Medians of seconds and of processor seconds. The command that makes
each table alone is printed before it.
"""

import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from benchmarks import common
from benchmarks.common import MIB, medians, print_header, print_row, run_silently, time_call
from benchmarks.planning import make_project
from cache.sets.set_lookup import current_plan
from cache.shards import shard
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.config.loading import load_config
from stages import bucket, verify
from stages.encoding import stage_registry
from stages.maintenance import checks

SHAPES = {"latents": ("latent", (16, 1, 128, 128)), "text": ("embeds", (100, 3584))}
PROGRAMS = ("encode-text", "encode-latents", "status", "gc")


def write_shards(store: Store, mib: int, format: str) -> None:
    """Shards of 128 MiB or less, half of `mib` of each kind."""
    for kind, (name, shape) in SHAPES.items():
        row_bytes = 2 * math.prod(shape)
        rows = common.make_rows(name, shape, max(1, mib * MIB // 2 // row_bytes))
        for start in range(0, len(rows), 128 * MIB // row_bytes):
            meta = ShardMeta(kind, "0" * 24, f"unit-{start}", "" if kind == "text" else "1024x1024@1")
            common.write_shard(store, meta, rows[start : start + 128 * MIB // row_bytes], format)


def read_plain(path: Path) -> None:
    """Read a file by blocks and hash it."""
    state, block = xxhash.xxh3_128(), bytearray(MIB)
    with open(path, "rb", buffering=0) as file:
        while read := file.readinto(block):
            state.update(memoryview(block)[:read])


def drop_page_cache(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def benchmark_reading(folder: Path, mib: int, repeat: int) -> None:
    silent = open(os.devnull, "w")  # noqa: SIM115 (for as long as the program runs)
    print_header("format", "threads", "files", "verify, MiB/s", "read + xxh3, MiB/s", "verify's share")
    for format in shard.SUFFIXES:
        store = checks.UnmappedStore(folder / format)
        write_shards(store, mib, format)
        present = checks.list_shards(store, stage_registry.SHARD_KINDS)
        paths = [folder / format / rel for rel in present]
        size = sum(present.values()) / MIB
        for threads in (1, 2):

            def check(store=store, present=present, threads=threads) -> None:
                assert not verify.check_shards(store, present, threads, Console(stderr=silent))[0]

            def plain(paths=paths, threads=threads) -> None:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read_plain, paths))

            def timed(work, cold, paths=paths) -> tuple[float, float]:
                drop_page_cache(paths if cold else [])
                return time_call(work)

            for state in ("in memory", "cold"):
                ways = {work.__name__: partial(timed, work, state == "cold") for work in (check, plain)}
                ours, least = map(medians, common.measure_by_turns(ways, repeat).values())
                cells = [f"{size / seconds:,.0f} ({cpu:.2f} s CPU)" for seconds, cpu in (ours, least)]
                print_row(format, threads, state, *cells, f"{least[0] / ours[0]:.0%}")
        for path in paths:
            path.unlink()


def make_encoded_project(folder: Path, items: int, unit_mib: float) -> Path:
    """A project whose every text and sample is encoded, with rows of one number; its configuration."""
    path = make_project(folder, items, "image", 0.0, cache={"unit_mib": unit_mib})
    config, store = load_config(path), Store(folder / f"work{items}")
    run_silently(bucket.run, path)
    plan = current_plan(store, config)
    one = Array.from_numpy(np.ones((1, 1, 1, 1), np.uint16), "bfloat16")
    libraries = {"libraries": {"torch": "2.13.0", "diffusers": "0.42.1"}}
    for stage in stage_registry.required_stages(config):
        work = stage.state(store, config, plan)
        folder_name = f"{stage.kind}/{work.fingerprint}"
        store.publish_json(f"{folder_name}/provenance.json", stage.fingerprint_inputs(config))
        for unit in work.units:
            ids = list(unit.members)
            meta = ShardMeta(stage.kind, work.fingerprint, unit.unit_id, unit.bucket, ids, provenance=libraries)
            common.write_shard(store, meta, [ShardRow(name, {"x": one}) for name in ids])
    return path


def benchmark_idle_programs(folder: Path, items: int, unit_mib: float, repeat: int) -> None:
    path = make_encoded_project(folder, items, unit_mib)
    shards = len(checks.list_shards(Store(folder / f"work{items}"), stage_registry.SHARD_KINDS))
    for program in PROGRAMS:
        command = [sys.executable, "-m", "stages.cli", program, "--config", str(path)]

        def start(command=command) -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        seconds, cpu = medians(time_call(start) for _ in range(repeat))
        print_row(f"{items:,}", f"{shards:,}", program, f"{seconds:.2f}", f"{cpu:.2f}")


def main() -> None:
    parser = common.make_parser(__doc__, repeat=5, root=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--unit-mib", type=float, nargs="+", default=[128, 8])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        if options.mib:
            print(f"python -m benchmarks.verify --mib {options.mib} --items 0 --repeat {options.repeat}\n")
            benchmark_reading(Path(folder) / "reading", options.mib, options.repeat)
        if options.items:
            units = " ".join(f"{unit:g}" for unit in options.unit_mib)
            shown = f"--mib 0 --items {options.items} --unit-mib {units} --repeat {options.repeat}"
            print(f"\npython -m benchmarks.verify {shown}\n")
            print_header("items", "shards", "program", "seconds", "of the CPU")
            for number, unit_mib in enumerate(options.unit_mib):
                (inside := Path(folder) / str(number)).mkdir()
                benchmark_idle_programs(inside, options.items, unit_mib, options.repeat)


if __name__ == "__main__":
    main()
