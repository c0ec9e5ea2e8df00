"""The losses of a run as a small curve: read from its metrics as they grow, and drawn as SVG."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.training_run import SMOOTHED_STEPS, parse_metrics
from stages.pages.report.curves import make_curve, thin, trailing_mean

WIDTH, HEIGHT = 1000, 200  # of the SVG's coordinates
MAX_POINTS = 600  # of a line
MARGIN = 0.06  # of the range, above and below
PIECE_BYTES = 8 << 20  # read at a time
MIN_PAUSE_FACTOR = 50  # reading and drawing take 2 % of the time at most
KEPT = ("step", "loss", "eval_loss")
MEMORY = ("device_memory_gib", "host_memory_gib")
Line = Mapping[str, Any]


class MetricsHistory:
    """The losses of a metrics.jsonl, of which only what was added since is read."""

    _drawn: tuple[Path, "LossCurve | None", Line] | None = None
    _again = 0.0  # when it may be drawn again

    def __init__(self) -> None:
        self._file: tuple[Path, int] | None = None  # with its inode
        self._end, self._lines, self._lock = 0, list[dict[str, Any]](), threading.Lock()
        self._memory: dict[str, Any] = {}

    def read(self, path: Path) -> tuple[Sequence[Line], Line]:
        """(lines with KEPT of each step and evaluation, MEMORY of the last step); empty where there is no file."""
        with self._lock:
            try:
                self._read_more(path)
            except OSError:
                self._file, self._lines, self._memory = None, [], {}
            return self._lines, self._memory

    def draw(self, path: Path) -> tuple["LossCurve | None", Line]:
        """(the curve, MEMORY of the last step), of a long run as they were a while ago: of many steps it takes long."""
        began = time.monotonic()
        if self._drawn is None or self._drawn[0] != path or began > self._again:
            lines, memory = self.read(path)
            self._drawn = path, draw_losses(lines), memory
            ended = time.monotonic()
            self._again = ended + (ended - began) * MIN_PAUSE_FACTOR
        return self._drawn[1:]

    def _read_more(self, path: Path) -> None:
        with path.open("rb") as file:
            inode, size = path.stat().st_ino, file.seek(0, 2)
            if self._file != (path, inode) or size < self._end:
                self._file, self._end, self._lines, self._memory = (path, inode), 0, [], {}
            file.seek(self._end)
            rest = b""
            while piece := file.read(PIECE_BYTES):
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                self._end += len(whole) + len(newline)
                lines = parse_metrics(whole, self._lines)
                last: Line = next((line for line in reversed(lines) if "loss" in line), {})
                self._memory = {key: last[key] for key in MEMORY if key in last} or self._memory
                self._lines = [
                    {key: line[key] for key in KEPT if key in line}
                    for line in lines
                    if "loss" in line or "eval_loss" in line
                ]


@dataclass(frozen=True)
class LossCurve:
    """losses, mean: points of polylines, of each step and of the mean of SMOOTHED_STEPS; evaluations: (x, y) of eval
    losses. low, high: of the vertical axis; first, last: steps of the horizontal one. summary: in words."""

    losses: str
    mean: str
    evaluations: tuple[tuple[float, float], ...]
    low: str
    high: str
    first: int
    last: int
    summary: str
    smoothed: int = SMOOTHED_STEPS
    width: int = WIDTH
    height: int = HEIGHT


def draw_losses(lines: Sequence[Line]) -> LossCurve | None:
    """None where fewer than two steps have a finite loss."""
    losses, evaluations = (
        make_curve(key, 0, sorted((line["step"], _number(line[key])) for line in lines if key in line))
        for key in ("loss", "eval_loss")
    )
    finite = np.isfinite(losses.values)
    if finite.sum() < 2:
        return None
    mean = trailing_mean(losses.values, SMOOTHED_STEPS)
    # A few steps far from the others, as at the start, would press the rest into a line.
    usual = np.percentile(losses.values[finite], (2, 98))
    parts = np.concatenate([usual, mean[np.isfinite(mean)], evaluations.values[np.isfinite(evaluations.values)]])
    low, high = float(parts.min()), float(parts.max())
    margin = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
    low, high = low - margin, high + margin
    first, last = int(losses.steps[0]), int(losses.steps[-1])

    def scale(steps: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
        kept = np.isfinite(values)
        x = (steps[kept] - first) / max(last - first, 1) * WIDTH
        y = (high - np.clip(values[kept], low, high)) / (high - low) * HEIGHT
        return [(round(float(a), 1), round(float(b), 1)) for a, b in zip(np.clip(x, 0, WIDTH), y, strict=True)]

    def line(values: np.ndarray) -> str:
        shown = thin(values, MAX_POINTS)
        return " ".join(f"{x:g},{y:g}" for x, y in scale(losses.steps[shown], values[shown]))

    start, end = mean[finite][0], mean[finite][-1]
    return LossCurve(
        losses=line(losses.values),
        mean=line(mean),
        evaluations=tuple(scale(evaluations.steps, evaluations.values)),
        low=f"{low:.3g}",
        high=f"{high:.3g}",
        first=first,
        last=last,
        summary=f"The loss by step: {start:.4g} at step {first}, {end:.4g} at step {last}",
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
