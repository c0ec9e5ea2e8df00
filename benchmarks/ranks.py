"""Training in two processes on this machine: DDP and FSDP2 compared with two independent runs.

    python -m benchmarks.ranks

The Sana transformer of benchmarks/training.py (`--width`, `--layers`), float32, a CPU thread per process, gloo. alone:
two single runs at the same time, which share the processor like two ranks; their samples per second are added. ddp,
fsdp2: one run of two ranks. The ways run in turns; the rate of a run is computed from the median time of its steps,
without the first two. With accumulation, which reduces communication per sample, a run has half as many steps.
"""

import argparse
import os
import socket
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from operator import truediv
from pathlib import Path

from benchmarks.common import make_parser, measure_by_turns, print_header, print_row
from benchmarks.training import UNCOUNTED, make_project
from cache.runs.training_run import METRICS_FILE, read_metrics

FULL = ["train.adapter.type=full", "train.optimizer.lr=1e-5"]
STRATEGIES = (None, "ddp", "fsdp2")  # None: two runs of one process
#: Name -> (options, accumulate, strategies).
ROWS: dict[str, tuple[list[str], int, Sequence[str | None]]] = {
    "LoRA of rank 16": ([], 1, STRATEGIES),
    "full rank": (FULL, 1, STRATEGIES),
    "full rank, accumulate 4": (FULL, 4, STRATEGIES[:2]),
}
PAIRS = (("ddp", "None"), ("fsdp2", "None"), ("fsdp2", "ddp"))
RANKS = 2


def train(path: Path, overrides: Sequence[str], environment: dict[str, str]) -> None:
    """Train one rank in a separate process."""
    from schemas.cli.console import Console, Options
    from schemas.config.loading import load_config
    from trainer.__main__ import run

    os.environ |= {"OMP_NUM_THREADS": "1", **environment}
    with open(os.devnull, "w") as silent:
        run(load_config(path, overrides), Options(path), Console(stdout=silent, stderr=silent))


def start_together(path: Path, arguments: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    context = get_context("fork")
    processes = [context.Process(target=train, args=(path, *each)) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes), [process.exitcode for process in processes]


def launch_variables() -> list[dict[str, str]]:
    """The variables that torchrun sets, for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **place} for rank in range(RANKS)]


def measure(folder: Path, overrides: Sequence[str], accumulate: int, strategy: str | None, count: list[int]) -> float:
    """Samples per second of two runs, or of a run of two ranks."""
    count[0] += 1
    names = [f"run{count[0]}-{number}" for number in range(1 if strategy else RANKS)]
    overrides_by_run = [[f"train.run={name}", f"train.accumulate={accumulate}", *overrides] for name in names]
    if strategy:
        run_overrides = [*overrides_by_run[0], f"train.parallel.strategy={strategy}"]
        start_together(folder / "pipeline.yaml", [(run_overrides, variables) for variables in launch_variables()])
    else:
        start_together(folder / "pipeline.yaml", [(each, {}) for each in overrides_by_run])
    batch = accumulate * (RANKS if strategy else 1)
    return sum(samples_per_second(folder / "output" / name, batch) for name in names)


def samples_per_second(run: Path, batch: int) -> float:
    steps = [line["step_s"] for line in read_metrics(run / METRICS_FILE) if "step_s" in line]
    return batch / statistics.median(steps[UNCOUNTED:])


def main() -> None:
    parser = make_parser(__doc__, repeat=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int, default=256, help="side of the pictures in pixels")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(namespace=argparse.Namespace(threads=1))
    print_header("", "alone, samples/s", "ddp", "of alone", "fsdp2", "of alone", "of ddp")
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), [0]
        make_project(folder, options)
        from trainer import train as _  # noqa: F401 (the processes are forks of this process, with torch imported)

        for row, (overrides, accumulate, strategies) in ROWS.items():
            steps = f"train.steps={options.steps if accumulate == 1 else max(options.steps // 2, UNCOUNTED + 1)}"
            ways = {
                str(strategy): partial(measure, folder, [*overrides, steps], accumulate, strategy, count)
                for strategy in strategies
            }
            rates_by_way = measure_by_turns(ways, options.repeat)
            median_rates = {way: f"{statistics.median(values):.3g}" for way, values in rates_by_way.items()}
            shares = [
                f"{statistics.median(map(truediv, rates_by_way[a], rates_by_way[b])):.3f}" if a in rates_by_way else ""
                for a, b in PAIRS
            ]
            print_row(
                row, median_rates["None"], median_rates["ddp"], shares[0], median_rates.get("fsdp2", ""), *shares[1:]
            )


if __name__ == "__main__":
    main()
