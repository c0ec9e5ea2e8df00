"""verify beside the least that reading and hashing the same files takes, and programs that find nothing to do.

    python -m benchmarks.verify [--mib 1024] [--items 100000] [--unit-mib 128 8] [--repeat 5] [--root DIR]

The first table: shards of bfloat16 latents (16, 1, 128, 128) and texts (100, 3584), 128 MiB each, read by `verify` and
by a loop that reads a file by blocks and hashes them with xxh3-128; "cold" after the kernel was told to forget the
files. The second: whole programs, started anew, over a plan of so many images whose texts and latents are all encoded
(rows of one number), by size of unit. Times are medians of all repeats, and so, apart, are those of the CPU. Before
each table stands the command that makes it alone.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.planning import make_project
from cache import shard, shard_io
from cache.shard import ShardMeta, ShardRow
from cache.store import Store
from cache.tensors import Array
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from stages import bucket, verify
from stages.encoding import stage_registry
from stages.maintenance import shard_checks
from stages.planning.plan_lookup import current_plan

MIB = 1 << 20
SHAPES = {"latents": ("latent", (16, 1, 128, 128)), "text": ("embeds", (100, 3584))}
PROGRAMS = ("encode-text", "encode-latents", "status", "gc")


def write_shards(store: Store, mib: int, format: str) -> None:
    """Shards of 128 MiB, or as many as there are, half of each kind."""
    rng = np.random.default_rng(0)
    for kind, (name, shape) in SHAPES.items():
        noise = rng.normal(size=(64, *shape)).astype(np.float32).view(np.uint32)
        values = [Array.from_numpy((row >> 16).astype(np.uint16), "bfloat16") for row in noise]
        rows = max(1, mib * MIB // 2 // values[0].nbytes)
        at_once = min(rows, 128 * MIB // values[0].nbytes)
        for start in range(0, rows, at_once):
            meta = ShardMeta(kind, "0" * 24, f"unit-{start}", "" if kind == "text" else "1024x1024@1")
            stem = f"{kind}/{meta.fingerprint}/{meta.unit}"
            with shard_io.open_writer(store, stem, meta, {name: "bfloat16"}, format) as out:
                for row in range(start, min(rows, start + at_once)):
                    out.add(ShardRow(f"{row:032x}", {name: values[row % len(values)]}))
                out.finish()


def read_plain(path: Path) -> None:
    """Read a file as `cat` does, and hash it."""
    state, block = xxhash.xxh3_128(), bytearray(MIB)
    with open(path, "rb", buffering=0) as file:
        while read := file.readinto(block):
            state.update(memoryview(block)[:read])


def drop_page_cache(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_call(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and of the CPU, children's included."""
    before = _cpu()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start, _cpu() - before


def medians(turns: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the seconds, and of the CPU's."""
    return statistics.median(wall for wall, _ in turns), statistics.median(cpu for _, cpu in turns)


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def benchmark_reading(folder: Path, mib: int, repeat: int) -> None:
    silent = open(os.devnull, "w")  # noqa: SIM115 (for as long as the program runs)
    print(
        "| format | threads | files | verify, MiB/s | read + xxh3, MiB/s | verify's share |\n|---|---|---|---|---|---|"
    )
    for format in shard.SUFFIXES:
        store = shard_checks.UnmappedStore(folder / format)
        write_shards(store, mib, format)
        present = shard_checks.list_shards(store, stage_registry.SHARD_KINDS)
        paths = [folder / format / rel for rel in present]
        size = sum(present.values()) / MIB
        for threads in (1, 2):

            def check(store=store, present=present, threads=threads) -> None:
                assert not verify.check_shards(store, present, threads, Console(stderr=silent)).damage

            def plain(paths=paths, threads=threads) -> None:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read_plain, paths))

            for cold in (False, True):
                turns: dict[Callable[[], object], list[tuple[float, float]]] = {check: [], plain: []}
                for _ in range(repeat):
                    for work in turns:
                        if cold:
                            drop_page_cache(paths)
                        turns[work].append(time_call(work))
                ours, least = medians(turns[check]), medians(turns[plain])
                cells = [f"{size / seconds:,.0f} ({cpu:.2f} s CPU)" for seconds, cpu in (ours, least)]
                where = "cold" if cold else "in memory"
                print(
                    f"| {format} | {threads} | {where} | {' | '.join(cells)} | {least[0] / ours[0]:.0%} |", flush=True
                )
        for path in paths:
            path.unlink()


def make_encoded_project(folder: Path, items: int, unit_mib: float) -> Path:
    """A project whose every text and sample is encoded, with rows of one number; its configuration."""
    path = make_project(folder, items, "image", 0.0)
    settings = json.loads(path.read_text()) | {"cache": {"unit_mib": unit_mib}}
    path.write_text(json.dumps(settings))
    config, store = load_config(path), Store(folder / f"work{items}")
    with open(os.devnull, "w") as silent:
        bucket.run(config, Options(path), Console(stderr=silent))
    plan = current_plan(store, config)
    one = Array.from_numpy(np.ones((1, 1, 1, 1), np.uint16), "bfloat16")
    for stage in stage_registry.required_stages(config):
        work = stage.state(store, config, plan)
        libraries = {"libraries": {"torch": "2.13.0", "diffusers": "0.42.1"}}
        store.publish_bytes(
            f"{stage.kind}/{work.fingerprint}/provenance.json", json.dumps(stage.fingerprint_inputs(config)).encode()
        )
        for unit in work.units:
            ids = list(unit.members)
            meta = ShardMeta(stage.kind, work.fingerprint, unit.unit_id, unit.bucket, ids, provenance=libraries)
            stem = f"{stage.kind}/{work.fingerprint}/{unit.unit_id}"
            with shard_io.open_writer(store, stem, meta, {"x": "bfloat16"}) as out:
                for name in unit.members:
                    out.add(ShardRow(name, {"x": one}))
                out.finish()
    return path


def benchmark_idle_programs(folder: Path, items: int, unit_mib: float, repeat: int) -> None:
    path = make_encoded_project(folder, items, unit_mib)
    shards = len(shard_checks.list_shards(Store(folder / f"work{items}"), stage_registry.SHARD_KINDS))
    for program in PROGRAMS:
        name, *rest = program.split()
        command = [sys.executable, "-m", "stages.cli", name, *rest, "--config", str(path)]

        def start(command=command) -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        seconds, cpu = medians([time_call(start) for _ in range(repeat)])
        print(f"| {items:,} | {shards:,} | {program} | {seconds:.2f} | {cpu:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--unit-mib", type=float, nargs="+", default=[128, 8])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--root", type=Path, help="a folder on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        if options.mib:
            print(f"python -m benchmarks.verify --mib {options.mib} --items 0 --repeat {options.repeat}\n")
            benchmark_reading(Path(folder) / "reading", options.mib, options.repeat)
        if options.items:
            units = " ".join(f"{unit:g}" for unit in options.unit_mib)
            shown = f"--mib 0 --items {options.items} --unit-mib {units} --repeat {options.repeat}"
            print(f"\npython -m benchmarks.verify {shown}\n")
            print("| items | shards | program | seconds | of the CPU |\n|---|---|---|---|---|")
            for number, unit_mib in enumerate(options.unit_mib):
                (inside := Path(folder) / str(number)).mkdir()
                benchmark_idle_programs(inside, options.items, unit_mib, options.repeat)


if __name__ == "__main__":
    main()
