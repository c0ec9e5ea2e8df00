"""The losses of a run as a small curve, drawn as SVG."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.training_run import SMOOTHED_STEPS, read_metrics
from stages.pages.report.charts import make_curve, thin, trailing_mean

WIDTH, HEIGHT = 1000, 200  # of the SVG's coordinates
MAX_POINTS = 600  # of a line
MARGIN = 0.06  # of the range, above and below
MIN_PAUSE_FACTOR = 50  # reading and drawing take 2 % of the time at most
MEMORY = ("device_memory_gib", "host_memory_gib")
Line = Mapping[str, Any]


class MetricsHistory:
    """The curve of a metrics.jsonl, which is read and drawn again only so often that it takes 2 % of the time."""

    def __init__(self) -> None:
        self._drawn: tuple[Path, LossCurve | None, Line] | None = None
        self._again = 0.0  # when it may be drawn again

    def draw(self, path: Path) -> tuple["LossCurve | None", Line]:
        """(the curve, MEMORY of the last step); of a long run as they were a while ago."""
        began = time.monotonic()
        if self._drawn is None or self._drawn[0] != path or began > self._again:
            lines = read_metrics(path)
            last: Line = next((line for line in reversed(lines) if "loss" in line), {})
            self._drawn = path, draw_losses(lines), {key: last[key] for key in MEMORY if key in last}
            ended = time.monotonic()
            self._again = ended + (ended - began) * MIN_PAUSE_FACTOR
        return self._drawn[1:]


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
