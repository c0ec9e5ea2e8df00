"""What a run measured, as curves by step: from its metrics, smoothed, and thinned to what a plot can show. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cache.runs.training_run import SMOOTHED_STEPS
from schemas.text_format import escape_unprintable, shorten

MAX_POINTS = 4000  # of a chart, over all of its curves
MAX_CURVES = 8  # of a chart and a run: colors that can be told apart
MAX_NAMED_STEPS = 10  # in a note
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """Values by step, ascending; NaN where there is none. run: its number. faint: what `smoothed` lies over. recorded:
    the points before thinning. spread: half the height of a band around the curve, NaN where it has none."""

    name: str
    run: int
    steps: np.ndarray
    values: np.ndarray
    faint: bool = False
    recorded: int = 0
    spread: np.ndarray | None = None


@dataclass(frozen=True)
class Chart:
    """One plot. notes: sentences below it. missing: why there are no curves, for the runs that have none. marks: steps
    with a vertical line."""

    key: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Kind:
    """A chart before it has curves. names: metrics, each a curve. nested: the metric is an object, each of whose keys
    is a curve. smooth: the mean of the last steps lies over the raw values."""

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    absent: str
    nested: bool = False
    smooth: bool = False
    factor: float = 1.0
    note: str = ""


_EVAL_ABSENT = "no validation measured it (validation.eval_samples is 0, or none was due yet)"
_STEP_ABSENT = "no step is recorded"
_KINDS = (
    _Kind("loss", "Training loss", "loss", ("loss",), _STEP_ABSENT, smooth=True),
    _Kind("eval", "Eval loss", "loss", ("eval_loss",), _EVAL_ABSENT),
    _Kind("eval-sigma", "Eval loss by sigma", "loss", ("eval_by_sigma",), _EVAL_ABSENT, nested=True,
          note="Sigma 0 is data, 1 is noise."),
    _Kind("eval-bucket", "Eval loss by bucket", "loss", ("eval_by_bucket",), _EVAL_ABSENT, nested=True),
    _Kind("lr", "Learning rate", "learning rate", ("lr",), _STEP_ABSENT),
    _Kind("grad-norm", "Gradient norm before clipping", "norm", ("grad_norm",), _STEP_ABSENT, smooth=True),
    _Kind("speed", "Throughput", "samples per second", ("samples_per_s",), _STEP_ABSENT),
    _Kind("wait", "Waiting for data", "% of the time", ("data_wait_share",), _STEP_ABSENT, factor=100.0),
    _Kind("memory", "Memory", "GiB", ("device_memory_gib", "host_memory_gib"),
          "no memory is recorded (by versions before this report)",
          note="The most since the process began, of the device as torch allocated it."),
)  # fmt: skip


def build_charts(runs: Sequence[tuple[str, Sequence[Line]]]) -> list[Chart]:
    """The charts of runs (name, lines of metrics)."""
    return [_build(kind, runs) for kind in _KINDS]


def _build(kind: _Kind, runs: Sequence[tuple[str, Sequence[Line]]]) -> Chart:
    curves: list[Curve] = []
    notes: list[str] = []
    missing: list[str] = []
    marks: list[int] = []
    for number, (run, lines) in enumerate(runs):
        prefix = f"{clean_name(run)}: " if len(runs) > 1 else ""
        found = _nested_curves(kind, number, lines) if kind.nested else _plain_curves(kind, number, lines)
        if not found:
            missing.append(f"{prefix}{kind.absent}.")
        elif len(found) > MAX_CURVES:
            notes.append(f"{prefix}the {MAX_CURVES} of {len(found)} that were measured most often are shown.")
            found = sorted(found, key=lambda curve: -int(np.isfinite(curve.values).sum()))[:MAX_CURVES]
        if not kind.nested and (bad := _unmeasured_steps(kind, lines)):
            named = ", ".join(map(str, bad[:MAX_NAMED_STEPS])) + (", ..." if len(bad) > MAX_NAMED_STEPS else "")
            notes.append(f"{prefix}not finite at {len(bad)} steps: {named}.")
        for line in lines if found and kind.unit == "loss" else ():
            if "set" in line:
                marks.append(line["step"])
                notes.append(f"{prefix}trained on other data after step {line['step']}: set {clean_name(line['set'])}.")
        if kind.smooth and found:
            curves += [_named(curve, f"{prefix}each step", faint=True) for curve in found]
            curves += [
                _named(curve, f"{prefix}mean of {SMOOTHED_STEPS} steps", trailing_mean(curve.values, SMOOTHED_STEPS))
                for curve in found
            ]
        else:
            curves += [_named(curve, (f"{prefix}{curve.name}" if curve.name else prefix[:-2]) or kind.title)
                       for curve in found]  # fmt: skip
    notes = [kind.note, *notes] if kind.note and curves else notes
    return thinned_chart(
        Chart(kind.key, kind.title, kind.unit, tuple(curves), tuple(notes), tuple(missing), tuple(marks))
    )


def thinned_chart(chart: Chart) -> Chart:
    """With at most MAX_POINTS; it says so where points are left out."""
    share = MAX_POINTS // max(1, len(chart.curves))
    thinned, notes = tuple(_thin_curve(curve, share) for curve in chart.curves), chart.notes
    if any(len(curve.steps) < curve.recorded for curve in thinned):
        most = max(curve.recorded for curve in thinned)
        notes = (*notes, f"Of {most} points the lowest and the highest of each stretch are drawn.")
    return replace(chart, curves=thinned, notes=notes)


def _plain_curves(kind: _Kind, run: int, lines: Sequence[Line]) -> list[Curve]:
    found = []
    for name in kind.names:
        steps, values = _column([(line["step"], line[name]) for line in lines if name in line])
        if np.isfinite(values).any():
            label = name.removesuffix("_gib").replace("_", " ") if len(kind.names) > 1 else ""
            found.append(Curve(label, run, steps, values * kind.factor, recorded=len(steps)))
    return found


def _nested_curves(kind: _Kind, run: int, lines: Sequence[Line]) -> list[Curve]:
    (metric,) = kind.names
    lines = [line for line in lines if isinstance(line.get(metric), dict)]
    found = []
    for name in dict.fromkeys(key for line in lines for key in line[metric]):
        steps, values = _column([(line["step"], line[metric].get(name)) for line in lines])
        if np.isfinite(values).any():
            found.append(Curve(clean_name(name), run, steps, values, recorded=len(steps)))
    return found


def _column(found: Iterable[tuple[int, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values in the order of the steps; NaN for what is no number."""
    pairs = sorted(((step, _number(value)) for step, value in found), key=lambda pair: pair[0])
    steps = np.array([step for step, _ in pairs], np.float64)
    return steps, np.array([number for _, number in pairs], np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _unmeasured_steps(kind: _Kind, lines: Sequence[Line]) -> list[int]:
    """Steps that have the metric, as null."""
    return sorted(line["step"] for line in lines for name in kind.names if name in line and line[name] is None)


def _named(curve: Curve, name: str, values: np.ndarray | None = None, faint: bool = False) -> Curve:
    values = curve.values if values is None else values
    return Curve(name, curve.run, curve.steps, values, faint, curve.recorded)


def clean_name(text: str) -> str:
    """A name from a file as a legend shows it. Bokeh reads $$...$$ as TeX, for which it would load MathJax."""
    return escape_unprintable(shorten(text, 40)).replace("$", "\N{FULLWIDTH DOLLAR SIGN}")


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """(n,) the mean of the last `window` finite values up to each one; NaN where there is none."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - window)
    number = counts[last] - counts[first]
    return np.where(number > 0, (sums[last] - sums[first]) / np.maximum(number, 1), np.nan)


def _thin_curve(curve: Curve, most: int) -> Curve:
    kept = thin(curve.values, most)
    spread = None if curve.spread is None else curve.spread[kept]
    return replace(curve, steps=curve.steps[kept], values=curve.values[kept], spread=spread)


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most `most` (4 or more) values, ascending: all, or the first, the last, and the lowest and the
    highest of equal stretches, so that no peak is lost."""
    if len(values) <= most:
        return np.arange(len(values))
    bins = (most - 2) // 2
    edges = np.linspace(0, len(values), bins + 1).astype(int)
    kept = {0, len(values) - 1}
    for first, last in pairwise(edges.tolist()):
        part = values[first:last]
        if np.isfinite(part).any():
            kept |= {first + int(np.nanargmin(part)), first + int(np.nanargmax(part))}
    return np.array(sorted(kept))
