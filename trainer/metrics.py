"""What is told while training: metrics.jsonl, TensorBoard, and a line on the console."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # it imports torch, and reading needs none
    from accelerate import Accelerator

METRICS_FILE = "metrics.jsonl"


class RecordMetrics(Protocol):
    """Takes the numbers of a step, "step" among them; `shown` ones appear on the console too."""

    def __call__(self, numbers: dict[str, Any], shown: bool = True) -> None: ...


class StepTimer:
    """Speed over the steps of this process, and from it the time left."""

    def __init__(self, first: int, last: int, global_batch: int):
        self._first, self._last, self._batch, self._began = first, last, global_batch, time.monotonic()

    def rates(self, done: int) -> dict[str, float]:
        seconds = (time.monotonic() - self._began) / max(1, done - self._first)
        return {"samples_per_s": self._batch / seconds, "seconds_left": seconds * (self._last - done)}


@contextmanager
def open_metrics_log(
    accelerator: "Accelerator", folder: Path, first: int, last: int, say: Callable[[str], None]
) -> Iterator[RecordMetrics]:
    """Record to `folder`/metrics.jsonl, to TensorBoard and with `say`, on the main process alone.

    first: steps done. The file is only appended to: where it has lines already, one with "resumed" says that those
    after it go on from `first`. The accelerator's trackers and processes end with the context.
    """
    path = folder / METRICS_FILE
    if accelerator.is_main_process:
        _append_resume_line(path, first)
    purge = first + 1 if first else 0  # a run that begins again looks at step 0 again
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": purge}})

    def record(numbers: dict[str, Any], shown: bool = True) -> None:
        if not accelerator.is_main_process:
            return
        line = {key: _nan_to_null(value) for key, value in numbers.items()}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        scalars = {key: value for key, value in line.items() if isinstance(value, float)}
        accelerator.log(scalars, step=numbers["step"])
        if shown:
            say(format_metrics(numbers, last))

    try:
        yield record
    finally:
        accelerator.end_training()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that are of the run as it stands: each step once.

    Lines that a resumed run went back behind are left out, so are lines that are not whole (a kill cuts one off).
    """
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


def _append_resume_line(path: Path, first: int) -> None:
    """Say in the file that what follows goes on from step `first`, unless nothing stands there yet."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        cut = file.read(1) != b"\n"  # the last line, by a kill
        file.write((b"\n" if cut else b"") + json.dumps({"step": first, "resumed": True}).encode() + b"\n")


def _nan_to_null(value: Any) -> Any:
    """JSON has no NaN: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_metrics(numbers: dict[str, Any], last: int) -> str:
    """One console line: "step 12/1000  loss 0.8123  ...  0:12:03 left"."""
    words = [f"step {numbers['step']}/{last}"]
    words += [f"{key} {numbers[key]:.4g}" for key in ("loss", "eval_loss", "grad_norm", "lr") if key in numbers]
    if "seconds_left" in numbers:
        left = timedelta(seconds=round(numbers["seconds_left"]))
        words += [f"{numbers['samples_per_s']:.3g} samples/s", f"{left} left"]
    return "  ".join([*words, *(["skipped: not finite"] if numbers.get("skipped") else [])])
