"""What the benchmarks share: configurations, silent runs of a program, clocks, rows of a table. No program."""

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cache.tensors import Array
from schemas.cli.console import Console, Options, Report
from schemas.config.loading import load_config

MIB = 1 << 20


def write_config(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(json.dumps(settings))
    return path


def run_silently(run: Callable[..., Report], path: Path) -> Report:
    """A stage's `run` in this process, with the configuration at `path`."""
    with open(os.devnull, "w") as silent:
        return run(load_config(path), Options(path), Console(stderr=silent))


def cpu_seconds() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def time_call(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of a call."""
    start, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - start, cpu_seconds() - cpu


def medians(times: Iterable[Iterable[float]]) -> list[float]:
    """Median of each column."""
    return [statistics.median(column) for column in zip(*times, strict=True)]


def random_bfloat16(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    return Array.from_numpy((rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16), "bfloat16")


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(*cells: str) -> None:
    print_row(*cells)
    print("|---" * len(cells) + "|", flush=True)
