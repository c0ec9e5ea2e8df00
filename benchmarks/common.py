"""Functions that the benchmarks share: options, configurations, shards, clocks, rows of a table. Not a program."""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cache.shards import shard_io
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report
from schemas.config.loading import load_config

T = TypeVar("T")

MIB = 1 << 20


def make_parser(description: str | None, repeat: int | None = None, root: bool = False) -> argparse.ArgumentParser:
    """Make a parser with unformatted help and the options that several benchmarks have. repeat: default of --repeat,
    None for no such option. root: whether it has the option --root."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeat is not None:
        parser.add_argument("--repeat", type=int, default=repeat)
    if root:
        parser.add_argument("--root", type=Path, help="folder on the disk that is measured")
    return parser


def write_config(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(json.dumps(settings))
    return path


def run_silently(run: Callable[..., Report], path: Path) -> Report:
    """Call a stage's `run` in this process, with the configuration at `path`."""
    with open(os.devnull, "w") as silent:
        return run(load_config(path), Options(path), Console(stderr=silent))


def cpu_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def time_call(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of a call."""
    start, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - start, cpu_seconds() - cpu


def measure_by_turns(ways: Mapping[str, Callable[[], T]], repeat: int, uncounted: int = 0) -> dict[str, list[T]]:
    """Call each way once in each of `repeat` turns, after `uncounted` turns that do not count. Returns name -> results.
    Every second turn calls the ways in reverse order."""
    results: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(-uncounted, repeat):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            result = ways[name]()
            results[name] += [result] if turn >= 0 else []
    return results


def medians(times: Iterable[Iterable[float]]) -> list[float]:
    """Median of each column."""
    return [statistics.median(column) for column in zip(*times, strict=True)]


def random_bfloat16(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    return Array.from_numpy((rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16), "bfloat16")


def make_rows(name: str, shape: tuple[int, ...], count: int) -> list[ShardRow]:
    """Make rows of one bfloat16 tensor, with at most 64 different values."""
    rng = np.random.default_rng(0)
    values = [random_bfloat16(shape, rng) for _ in range(min(count, 64))]
    return [ShardRow(f"{number:032x}", {name: values[number % 64]}) for number in range(count)]


def write_shard(store: Store, meta: ShardMeta, rows: Sequence[ShardRow], format: str = "arrow") -> str:
    """Write rows with the same tensors like an encoding stage. Returns the path of the shard."""
    columns = {name: array.dtype for name, array in rows[0].tensors.items()}
    stem = f"{meta.kind}/{meta.fingerprint}/{meta.unit}"
    with shard_io.open_writer(store, stem, meta, columns, format) as out:
        for row in rows:
            out.add(row)
        return out.finish()


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(*cells: str) -> None:
    print_row(*cells)
    print("|---" * len(cells) + "|", flush=True)
