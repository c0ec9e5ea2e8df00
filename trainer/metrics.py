"""What is told while training: metrics.jsonl, TensorBoard, and a line on the console."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

NAME = "metrics.jsonl"


class Record(Protocol):
    """Takes the numbers of a step, "step" among them; `shown` ones appear on the console too."""

    def __call__(self, numbers: dict[str, Any], shown: bool = True) -> None: ...


class Clock:
    """Speed over the steps of this process, and from it the time left."""

    def __init__(self, first: int, last: int, global_batch: int):
        self._first, self._last, self._batch, self._began = first, last, global_batch, time.monotonic()

    def tick(self, done: int) -> dict[str, float]:
        seconds = (time.monotonic() - self._began) / max(1, done - self._first)
        return {"samples_per_s": self._batch / seconds, "seconds_left": seconds * (self._last - done)}


@contextmanager
def recording(
    accelerator: Accelerator, folder: Path, first: int, last: int, say: Callable[[str], None]
) -> Iterator[Record]:
    """Record to `folder`/metrics.jsonl, to TensorBoard and with `say`, on the main process alone.

    first: steps done. Lines of later steps are from after the checkpoint that the run goes on from; they are
    removed, since they will be written again. The accelerator's trackers and processes end with the context.
    """
    path = folder / NAME
    if accelerator.is_main_process:
        _rewrite(path, [line for line in read(path) if line["step"] <= first] if first else [])
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": first + 1}})

    def record(numbers: dict[str, Any], shown: bool = True) -> None:
        if not accelerator.is_main_process:
            return
        line = {key: _plain(value) for key, value in numbers.items()}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        scalars = {key: value for key, value in line.items() if isinstance(value, float)}
        accelerator.log(scalars, step=numbers["step"])
        if shown:
            say(spoken(numbers, last))

    try:
        yield record
    finally:
        accelerator.end_training()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that was cut off by a kill is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temp.replace(path)


def _plain(value: Any) -> Any:
    """JSON has no NaN: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spoken(numbers: dict[str, Any], last: int) -> str:
    """One console line: "step 12/1000  loss 0.8123  ...  0:12:03 left"."""
    words = [f"step {numbers['step']}/{last}"]
    words += [f"{key} {numbers[key]:.4g}" for key in ("loss", "eval_loss", "grad_norm", "lr") if key in numbers]
    if "seconds_left" in numbers:
        left = timedelta(seconds=round(numbers["seconds_left"]))
        words += [f"{numbers['samples_per_s']:.3g} samples/s", f"{left} left"]
    return "  ".join([*words, *(["skipped: not finite"] if numbers.get("skipped") else [])])
