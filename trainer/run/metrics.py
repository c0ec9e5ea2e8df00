"""The training log: metrics.jsonl, the trackers (TensorBoard, Weights & Biases), and the progress on the console: a bar
on a terminal, otherwise a line every `train.log_every` steps."""

import json
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cache.runs.training_run import (
    METRICS_FILE,
    SMOOTHED_STEPS,
    TENSORBOARD,
    format_eval,
    read_last_metrics,
    read_metrics,
    smoothed_loss,
    wandb_options,
)
from cache.runs.validations import NOTHING_HELD_OUT, best_steps, measured_on
from schemas.cli.console import Console
from schemas.config.training import Train
from schemas.text_format import to_json_values

if TYPE_CHECKING:  # these modules import torch, which reading metrics does not need
    import torch
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

__all__ = ["METRICS_FILE", "RecordMetrics", "StepTimer", "open_metrics_log", "read_metrics"]

T = TypeVar("T")

#: Function that records the metrics of a step. The metrics include "step".
RecordMetrics = Callable[[dict[str, Any]], None]


class StepTimer:
    """Measures the speed of this process over the last steps, the time that the steps waited for data, and the
    remaining time."""

    def __init__(self, first: int, last: int, global_batch: int, clock: Callable[[], float] = time.monotonic):
        self._first, self._last, self._batch, self._clock = first, last, global_batch, clock
        self._began, self._step_seconds = clock(), 0.0  # _step_seconds: total of all steps
        self._request_time, self._waited = self._began, 0.0  # of the step's batch
        self._recent: deque[tuple[float, float]] = deque(maxlen=SMOOTHED_STEPS)  # seconds of a step, and of its wait

    def time_waits(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches. A step lasts from the request for a batch to the call of `rates`."""
        iterator = iter(batches)
        while True:
            self._request_time = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited = self._clock() - self._request_time
            yield batch

    def rates(self, steps_done: int) -> dict[str, float]:
        """The metrics of a step's speed. steps_done: number of steps done.

        samples_per_s, data_wait_share (0 to 1): averages over the last steps, without validation and checkpoints.
        step_s, data_wait_s: seconds of this step. seconds_left: estimate that assumes as much time per step for
            validation and saving as so far.
        """
        current_time = self._clock()
        self._recent.append((current_time - self._request_time, self._waited))
        self._step_seconds += current_time - self._request_time
        step, waited = (sum(seconds) / len(self._recent) for seconds in zip(*self._recent, strict=True))
        between = (current_time - self._began - self._step_seconds) / max(1, steps_done - self._first)
        rates = {"samples_per_s": self._batch / max(step, 1e-9), "step_s": current_time - self._request_time}
        rates |= {"data_wait_s": self._waited, "data_wait_share": waited / max(step, 1e-9)}
        return rates | {"seconds_left": (step + between) * (self._last - steps_done)}


def memory_use(device: "torch.device") -> dict[str, float]:
    """Memory metrics since the process began: "host_memory_gib", the peak memory of this process, and with an
    accelerator "device_memory_gib", the peak memory allocated by torch on the device; 0 if torch does not count it
    (mps)."""
    import torch

    memory = {"host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # in KiB on Linux
    if device.type != "cpu":
        memory["device_memory_gib"] = torch.accelerator.max_memory_allocated(device) / 2**30
    return memory


@contextmanager
def open_metrics_log(
    accelerator: "Accelerator",
    folder: Path,
    first: int,
    settings: Train,
    show: RecordMetrics,
    new_set: str | None = None,
) -> Iterator[RecordMetrics]:
    """Context with a function that records metrics to `folder`/metrics.jsonl, to the trackers and with `show`, on the
    main process only. The accelerator's trackers and processes end with the context.

    The file is append-only. If it already has lines, a line with "resumed" marks that the next lines continue from step
    `first`.

    first: number of steps done. new_set: id of the training set if the run resumes on a new set.
    """
    path = folder / METRICS_FILE
    if accelerator.is_main_process:
        from accelerate import tracking

        if path.exists() and path.stat().st_size:
            line = {"step": first, "resumed": True} | ({"set": new_set} if new_set else {})
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                cut_off = file.read(1) != b"\n"  # the process was killed while it wrote a line
                file.write((b"\n" if cut_off else b"") + json.dumps(line).encode() + b"\n")
        trackers: list[GeneralTracker] = []  # a resumed run continues their logs
        if "tensorboard" in settings.trackers:
            purge = first + 1 if first else 0  # a run that starts over validates at step 0 again
            trackers.append(tracking.TensorBoardTracker(TENSORBOARD, str(folder), purge_step=purge))
        if "wandb" in settings.trackers:
            trackers.append(tracking.WandBTracker(**wandb_options(folder, "train")))
        accelerator.log_with = trackers
        accelerator.init_trackers("latentpress")

    def record(numbers: dict[str, Any]) -> None:
        if not accelerator.is_main_process:
            return
        line = to_json_values(numbers)  # JSON has no NaN
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        scalars = {key: value for key, value in line.items() if isinstance(value, float)}
        for key, parts in line.items():  # metrics by bucket or sigma become "loss_by_sigma/0.5-0.75"
            if isinstance(parts, dict):
                scalars |= {f"{key}/{name}": part for name, part in parts.items() if isinstance(part, float)}
        accelerator.log(scalars, step=numbers["step"])
        show(numbers)

    try:
        yield record
    finally:
        accelerator.end_training()


@contextmanager
def show_metrics(console: Console, first: int, steps: int, log_every: int) -> Iterator[RecordMetrics]:
    """Context with a function that shows the metrics of a step or of an eval.

    If the console has no bar, the function logs a line for the first step, every `log_every`-th step and the last step.
    It always logs a line for skipped steps and evals.

    first: number of steps done.
    """
    losses: deque[float] = deque(maxlen=SMOOTHED_STEPS)
    with console.bar(steps, "train") as bar:
        if bar is not None:
            bar(first, f"step {first}/{steps}")

        def show(numbers: dict[str, Any]) -> None:
            step = numbers["step"]
            if "loss" not in numbers:
                console.log(f"step {step}/{steps}  eval loss {format_eval(numbers)}")
                return
            losses.append(numbers["loss"])
            text = format_step(numbers, list(losses), steps)
            if bar is not None:
                bar(step, text)
            if numbers.get("skipped"):
                console.log(f"step {step}/{steps} was skipped: its loss or gradient is not finite")
            elif bar is None and (step in (first + 1, steps) or step % log_every == 0):
                console.log(text)

        yield show


def format_step(numbers: dict[str, Any], losses: list[float], steps: int) -> str:
    """A line like "step 20/1000  loss 0.8123  lr 0.0001  2.1 samples/s  waiting for data 0 %  0:12:03 left".

    losses: losses of the last steps.
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
    """The paths of a run's results, its best steps, and the share of time that the last steps waited for data, for the
    report."""
    lines, best = read_last_metrics(folder / METRICS_FILE), best_steps(folder)
    results: dict[str, Any] = {"best_steps": best} if best else {}
    if best and measured_on(lines) == "training samples":
        results["nothing_held_out"] = NOTHING_HELD_OUT
    if waits := [line["data_wait_share"] for line in lines if "data_wait_share" in line]:
        results["waiting_for_data"] = f"{100 * waits[-1]:.0f} %"
    if (folder / "validation").is_dir():
        results["validation_latents"] = str(folder / "validation")
    results["numbers"] = str(folder / METRICS_FILE)
    if "tensorboard" in trackers:
        results["tensorboard"] = str(folder / TENSORBOARD)
    if "wandb" in trackers:
        results["wandb"] = str(folder / "wandb")
    return results
