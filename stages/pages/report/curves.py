"""Curves by step of a run's metrics and scores: smoothed, with a band for the spread over seeds, and thinned to what a
plot can show. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.scores import ScoreCurve, score_label
from cache.runs.training_run import SMOOTHED_STEPS
from schemas.text_format import escape_unprintable, shorten

MAX_POINTS = 4000  # of a chart, over all of its curves
MAX_CURVES = 8  # of a chart and a run: colors that can be told apart
MAX_NAMED_STEPS = 10  # in a note
Line = Mapping[str, Any]
_EVAL_ABSENT = "no validation measured it (validation.eval_samples is 0, or none was due yet)"
_STEP_ABSENT = "no step is recorded"
Runs = Sequence[tuple[str, Sequence[ScoreCurve]]]


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
        measured = [make_curve(name, number, points) for name, points in _list_series(kind, lines)]
        measured = [curve for curve in measured if np.isfinite(curve.values).any()]
        if not measured:
            missing.append(f"{prefix}{kind.absent}.")
        elif len(measured) > MAX_CURVES:
            notes.append(f"{prefix}the {MAX_CURVES} of {len(measured)} that were measured most often are shown.")
            measured = sorted(measured, key=lambda curve: -int(np.isfinite(curve.values).sum()))[:MAX_CURVES]
        if not kind.nested and (bad := _unmeasured_steps(kind, lines)):
            notes.append(f"{prefix}not finite at {len(bad)} steps: {name_steps(bad)}.")
        for line in lines if measured and kind.unit == "loss" else ():
            if "set" in line:
                marks.append(line["step"])
                notes.append(f"{prefix}trained on other data after step {line['step']}: set {clean_name(line['set'])}.")
        if kind.smooth:
            curves += [replace(curve, name=f"{prefix}each step", faint=True) for curve in measured]
            name = f"{prefix}mean of {SMOOTHED_STEPS} steps"
            curves += [replace(c, name=name, values=trailing_mean(c.values, SMOOTHED_STEPS)) for c in measured]
        else:
            names = [f"{prefix}{curve.name}" if curve.name else prefix[:-2] or kind.title for curve in measured]
            curves += [replace(curve, name=name) for curve, name in zip(measured, names, strict=True)]
    notes = [kind.note, *notes] if kind.note and curves else notes
    return thinned_chart(
        Chart(kind.key, kind.title, kind.unit, tuple(curves), tuple(notes), tuple(missing), tuple(marks))
    )


def thinned_chart(chart: Chart) -> Chart:
    """Thin a chart to MAX_POINTS; it says so where points are left out."""
    share = MAX_POINTS // max(1, len(chart.curves))
    thinned, notes = tuple(_thin_curve(curve, share) for curve in chart.curves), chart.notes
    if any(len(curve.steps) < curve.recorded for curve in thinned):
        most = max(curve.recorded for curve in thinned)
        notes = (*notes, f"Of {most} points the lowest and the highest of each stretch are drawn.")
    return replace(chart, curves=thinned, notes=notes)


def _list_series(kind: _Kind, lines: Sequence[Line]) -> list[tuple[str, list[tuple[int, float]]]]:
    """(name, its steps and values), ascending; NaN for what is no number."""
    lines = sorted(lines, key=lambda line: line["step"])
    if not kind.nested:
        several = len(kind.names) > 1
        labels = {name: name.removesuffix("_gib").replace("_", " ") if several else "" for name in kind.names}
        return [
            (label, [(line["step"], _number(line[name]) * kind.factor) for line in lines if name in line])
            for name, label in labels.items()
        ]
    (metric,) = kind.names
    parts = [(line["step"], line[metric]) for line in lines if isinstance(line.get(metric), dict)]
    names = dict.fromkeys(name for _, values in parts for name in values)
    return [(clean_name(name), [(step, _number(values.get(name))) for step, values in parts]) for name in names]


def make_curve(name: str, run: int, points: Sequence[tuple[int, float]], spread: np.ndarray | None = None) -> Curve:
    """points: steps and values."""
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return Curve(name, run, steps, values, recorded=len(points), spread=spread)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _unmeasured_steps(kind: _Kind, lines: Sequence[Line]) -> list[int]:
    """Steps that have the metric, as null."""
    return sorted(line["step"] for line in lines for name in kind.names if name in line and line[name] is None)


def name_steps(steps: Sequence[int]) -> str:
    """The first MAX_NAMED_STEPS."""
    return ", ".join(map(str, steps[:MAX_NAMED_STEPS])) + (", ..." if len(steps) > MAX_NAMED_STEPS else "")


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


def score_charts(runs: Runs) -> list[Chart]:
    """A chart for each score and, where there are several prompts, one by prompt. runs: name, its scores. Scores of
    different models are in different charts."""
    names = sorted({curve.name for _, curves in runs for curve in curves})
    if not names:
        return [Chart("scores", "Scores", "", (), missing=("none are recorded.",))]
    charts: list[Chart] = []
    for name in names[:MAX_CURVES]:
        models = list(dict.fromkeys(curve.measured for _, curves in runs for curve in curves if curve.name == name))
        for model in models:
            chosen = [(number, run, curve) for number, (run, curves) in enumerate(runs) for curve in curves
                      if (curve.name, curve.measured) == (name, model)]  # fmt: skip
            title = f"Score: {clean_name(score_label(name))}"
            if len(models) > 1:
                title += f", by {clean_name(Path(model.model).name) if model else 'another program'}"
            absent = [run for number, (run, _) in enumerate(runs) if number not in {entry[0] for entry in chosen}]
            charts += _charts_of_score(f"score-{len(charts)}", title, chosen, absent, len(runs) > 1)
    return charts


def _charts_of_score(
    key: str, title: str, chosen: Sequence[tuple[int, str, ScoreCurve]], absent: Sequence[str], several: bool
) -> list[Chart]:
    curves, by_prompt, notes = [], [], list[str]()
    for number, run, score in chosen:
        prefix = f"{clean_name(run)}: " if several else ""
        spread = np.array([math.nan if point.spread is None else point.spread for point in score.points], np.float64)
        points = [(point.step, point.value) for point in score.points]
        curves.append(make_curve(prefix[:-2] or title, number, points, spread if np.isfinite(spread).any() else None))
        prompts = list(dict.fromkeys(prompt for point in score.points for prompt in point.groups))
        for prompt in prompts[:MAX_CURVES] if len(prompts) > 1 else ():
            points = [(point.step, point.groups[prompt][0]) for point in score.points if prompt in point.groups]
            by_prompt.append(make_curve(f"{prefix}{clean_name(prompt)}", number, points))
        notes += [prefix + note for note in _notes(score)]
        if len(prompts) > MAX_CURVES:
            notes.append(f"{prefix}{MAX_CURVES} of {len(prompts)} prompts are shown by themselves.")
    missing = tuple(f"{clean_name(run)}: it was not scored with this." for run in absent)
    charts = [Chart(key, title, "score", tuple(curves), tuple(notes), missing)]
    if by_prompt:
        charts.append(Chart(f"{key}-prompts", f"{title}, by prompt", "score", tuple(by_prompt)))
    return [thinned_chart(chart) for chart in charts]


def _notes(score: ScoreCurve) -> list[str]:
    notes = []
    if score.measured is not None:
        notes.append(f"Model: {score.measured.model}.")
    if any(point.spread is not None for point in score.points):
        notes.append(f"The band is one standard deviation over {score.seeds} seeds to each side.")
    compared = score.comparable
    if other := [point.step for point in score.points if point not in compared]:
        steps = name_steps(other)
        notes.append(f"Of other prompts or seeds than step {compared[-1].step}, and not to be compared: step {steps}.")
    return notes
