"""What a person sees of the steps: a bar on a terminal, elsewhere a line every `train.log_every` steps."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from cache.runs.best_step import describe_best
from cache.runs.training_run import (
    METRICS_FILE,
    SMOOTHED_STEPS,
    TENSORBOARD,
    format_eval,
    read_last_metrics,
    smoothed_loss,
)
from schemas.cli.console import Console
from trainer.run.metrics import RecordMetrics


@contextmanager
def show_metrics(console: Console, first: int, steps: int, log_every: int) -> Iterator[RecordMetrics]:
    """Give the function that shows a step's metrics, or those of an eval. first: steps done.

    A line for the first step, for every `log_every`-th, for the last and for skipped ones, where there is no bar.
    """
    losses: deque[float] = deque(maxlen=SMOOTHED_STEPS)
    with console.bar(steps, "train") as bar:
        if bar is not None:
            bar(first, f"step {first}/{steps}")

        def show(numbers: dict[str, Any]) -> None:
            done = numbers["step"]
            if "loss" not in numbers:
                console.log(f"step {done}/{steps}  eval loss {format_eval(numbers)}")
                return
            losses.append(numbers["loss"])
            text = format_step(numbers, list(losses), steps)
            if bar is not None:
                bar(done, text)
            if numbers.get("skipped"):
                console.log(f"step {done}/{steps} was skipped: its loss or gradient is not finite")
            elif bar is None and (done in (first + 1, steps) or done % log_every == 0):
                console.log(text)

        yield show


def format_step(numbers: dict[str, Any], losses: list[float], steps: int) -> str:
    """Like "step 20/1000  loss 0.8123  lr 0.0001  2.1 samples/s  waiting for data 0 %  0:12:03 left".

    losses: of the last steps.
    """
    smoothed = smoothed_loss([loss if isfinite(loss) else None for loss in losses])
    words = [f"step {numbers['step']}/{steps}"]
    words += [] if smoothed is None else [f"loss {smoothed:.4g}"]
    words += [f"lr {numbers['lr']:.3g}", f"{numbers['samples_per_s']:.3g} samples/s"]
    words += [
        f"waiting for data {100 * numbers['data_wait_share']:.0f} %",
        f"{timedelta(seconds=round(numbers['seconds_left']))} left",
    ]
    return "  ".join(words)


def describe_results(folder: Path, trackers: Sequence[str]) -> dict[str, Any]:
    """Where a run's results are, its best step and the share that the last steps waited for data, for the report."""
    found: dict[str, Any] = describe_best(folder)
    lines = read_last_metrics(folder / METRICS_FILE)
    if waits := [line["data_wait_share"] for line in lines if "data_wait_share" in line]:
        found["waiting_for_data"] = f"{100 * waits[-1]:.0f} %"
    if (folder / "validation").is_dir():
        found["validation_latents"] = str(folder / "validation")
    found["numbers"] = str(folder / METRICS_FILE)
    if "tensorboard" in trackers:
        found["tensorboard"] = str(folder / TENSORBOARD)
    if "wandb" in trackers:
        found["wandb"] = str(folder / "wandb")
    return found
