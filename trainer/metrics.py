"""The training log: metrics.jsonl, TensorBoard, and a line on the console."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from schemas.text_format import to_json_values

if TYPE_CHECKING:  # imports torch, which reading does not need
    from accelerate import Accelerator

METRICS_FILE = "metrics.jsonl"


class RecordMetrics(Protocol):
    """Records the metrics of a step, with "step" among them; `shown`: on the console too."""

    def __call__(self, numbers: dict[str, Any], shown: bool = True) -> None: ...


class StepTimer:
    """Speed over the steps of this process, and the time left."""

    def __init__(self, first: int, last: int, global_batch: int):
        self._first, self._last, self._batch, self._began = first, last, global_batch, time.monotonic()

    def rates(self, done: int) -> dict[str, float]:
        seconds = (time.monotonic() - self._began) / max(1, done - self._first)
        return {"samples_per_s": self._batch / seconds, "seconds_left": seconds * (self._last - done)}


@contextmanager
def open_metrics_log(
    accelerator: "Accelerator", folder: Path, first: int, last: int, log: Callable[[str], None]
) -> Iterator[RecordMetrics]:
    """Record to `folder`/metrics.jsonl, to TensorBoard and with `log`, on the main process only.

    first: steps done. The file is append-only: where it has lines already, one with "resumed" marks that the next ones
    continue from `first`. The accelerator's trackers and processes end with the context.
    """
    path = folder / METRICS_FILE
    if accelerator.is_main_process and path.exists() and path.stat().st_size:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            cut_off = file.read(1) != b"\n"  # the last line, by a kill
            file.write((b"\n" if cut_off else b"") + json.dumps({"step": first, "resumed": True}).encode() + b"\n")
    purge = first + 1 if first else 0  # a run that begins again validates at step 0 again
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": purge}})

    def record(numbers: dict[str, Any], shown: bool = True) -> None:
        if not accelerator.is_main_process:
            return
        line = to_json_values(numbers)  # JSON has no NaN
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        scalars = {key: value for key, value in line.items() if isinstance(value, float)}
        accelerator.log(scalars, step=numbers["step"])
        if shown:
            log(format_metrics(numbers, last))

    try:
        yield record
    finally:
        accelerator.end_training()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without those that a resumed run repeated or a kill cut off."""
    found: list[dict[str, Any]] = []
    for raw in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            continue
        if line.get("resumed"):
            found = [earlier for earlier in found if earlier["step"] <= line["step"]] if line["step"] else []
        else:
            found.append(line)
    return found


def format_metrics(numbers: dict[str, Any], last: int) -> str:
    """One console line: "step 12/1000  loss 0.8123  ...  0:12:03 left"."""
    words = [f"step {numbers['step']}/{last}"]
    words += [f"{key} {numbers[key]:.4g}" for key in ("loss", "eval_loss", "grad_norm", "lr") if key in numbers]
    if "seconds_left" in numbers:
        left = timedelta(seconds=round(numbers["seconds_left"]))
        words += [f"{numbers['samples_per_s']:.3g} samples/s", f"{left} left"]
    return "  ".join([*words, *(["skipped: not finite"] if numbers.get("skipped") else [])])
