"""Charts of a run's metrics and scores as inline SVG: curves by step, smoothed, with a band for the spread over seeds,
and thinned to at most MAX_POINTS points.

templates/parts.html draws the charts without a script; templates/charts.js shows the values under the pointer, hides
curves and enlarges a part of the steps.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.scores import ScoreCurve, ScorePoint, score_label
from cache.runs.training_run import SMOOTHED_STEPS
from schemas.text_format import shorten

MAX_POINTS = 4000  # points in a chart, over all of its curves
MAX_CURVES = 8  # curves per run in a chart: number of colors that can be distinguished
MAX_NAMED_STEPS = 10  # steps named in a note
MAX_ROWS = 12  # rows in a table of values
MARKED_POINTS = 60  # curves with at most this many points have a dot for each point
SIDE = 1000  # width and height in SVG coordinates, which are stretched to the size of the plot
MARGIN = 0.06  # empty share of the range of values, above and below
MAX_TICKS = 5  # intervals between ticks
#: Okabe and Ito's colors for the color-blind without black and yellow, and two more; visible on white and on black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASHES = ("", "6", "2 4", "2 4 6 4")
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """Values by step.

    run: index of the curve's run. steps: (n,) ascending. values: (n,), NaN for steps without a value. is_faint: whether
    another curve is the smoothed version of this curve. spread: (n,) half the height of a band around the curve, NaN
    for points without a band."""

    name: str
    run: int
    steps: np.ndarray
    values: np.ndarray
    is_faint: bool = False
    spread: np.ndarray | None = None


@dataclass(frozen=True)
class Axis:
    """start: value at the left or upper end. end: value at the other end. least: smallest interval between ticks."""

    start: float
    end: float
    least: float = 0.0

    def place(self, values: np.ndarray) -> np.ndarray:
        """Coordinates of values: 0 at the start of the axis, SIDE at its end."""
        return (values - self.start) / (self.end - self.start) * SIDE

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(coordinate, label) of ticks at round values."""
        low, high = sorted((self.start, self.end))
        rough = (high - low) / MAX_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = max(self.least, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))
        values = step * np.arange(math.ceil(low / step), math.floor(high / step) + 1)
        return [(round(float(at), 1), f"{value:.6g}") for at, value in zip(self.place(values), values, strict=True)]


@dataclass(frozen=True)
class Chart:
    """One plot. runs: number of runs; with several runs, each run has a color, and the curves of a run differ by
    dashes. notes: sentences below the plot. gaps: reasons why runs do not have curves. marks: steps with a vertical
    line."""

    key: str
    title: str
    unit: str
    runs: int
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    marks: tuple[int, ...] = ()

    @cached_property
    def x(self) -> Axis:
        steps = np.concatenate([curve.steps for curve in self.curves])
        return Axis(float(steps.min()), max(float(steps.max()), float(steps.min()) + 1), least=1.0)

    @cached_property
    def y(self) -> Axis:
        """The axis of values. It covers all values; for a faint curve only the 2nd to 98th percentile, because a few
        outliers would flatten the rest of the curve."""
        parts = list[np.ndarray]()
        for curve in self.curves:
            spread = 0.0 if curve.spread is None else np.nan_to_num(curve.spread)
            percentiles = [np.nanpercentile(curve.values, (2, 98))] if curve.is_faint else []
            parts += percentiles or [curve.values - spread, curve.values + spread]
        values = np.concatenate(parts)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
        return Axis(high + margin, low - margin)

    @property
    def mark_places(self) -> list[float]:
        return [round(float(place), 2) for place in self.x.place(np.array(self.marks))]

    @cached_property
    def curve_paths(self) -> list[dict[str, Any]]:
        """A dict per curve for the legend and the SVG: name, color, dash, faint, and <path> data: path, band and dots
        ("" for none). A curve and its smoothed version have the same color."""
        paths, counts = [], Counter[int]()
        is_smoothed = any(curve.is_faint for curve in self.curves)
        for number, curve in enumerate(self.curves):
            indices = _thin(curve.values, self.max_points)
            x, values = self.x.place(curve.steps[indices]), curve.values[indices]
            y, band, runs = self.y.place(values), "", self.runs > 1
            if curve.spread is not None:
                spread = curve.spread[indices]
                is_finite = np.isfinite(values) & np.isfinite(spread)
                upper, lower = (self.y.place((values + sign * spread)[is_finite]) for sign in (1, -1))
                outline = np.concatenate([upper, lower[::-1]])
                band = _draw(np.concatenate([x[is_finite], x[is_finite][::-1]]), outline) + "Z"
            color = COLORS[(curve.run if runs or is_smoothed else number) % len(COLORS)]
            dash = DASHES[counts[curve.run] % len(DASHES)] if runs and not is_smoothed else ""
            dots = _draw(x, y, "h0") if not curve.is_faint and len(x) <= MARKED_POINTS else ""
            paths.append(
                {"name": curve.name, "color": color, "dash": dash, "is_faint": curve.is_faint, "path": _draw(x, y)}
                | {"band": band, "dots": dots}
            )
            counts[curve.run] += 1
        return paths

    @property
    def max_points(self) -> int:
        """The largest number of points in a curve."""
        return MAX_POINTS // max(1, len(self.curves))

    @property
    def thinning(self) -> list[str]:
        """A list with a note if points are left out, else empty."""
        point_count = max((len(curve.steps) for curve in self.curves), default=0)
        is_thin = point_count > self.max_points
        return (
            [f"The lowest and the highest point of each stretch are drawn, of {point_count} points."] if is_thin else []
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of a table of values: at most MAX_ROWS steps, spread evenly over the steps of the first curve that is
        not faint."""
        curves = [curve for curve in self.curves if not curve.is_faint]
        steps = curves[0].steps if curves else np.array([])
        indices = np.unique(np.linspace(0, len(steps) - 1, min(MAX_ROWS, len(steps))).astype(int))
        return [
            {"step": int(step)} | {curve.name: _format_value(curve, step) for curve in curves}
            for step in steps[indices]
        ]

    @property
    def summary(self) -> str:
        """The first, last, lowest and highest value of each curve that is not faint."""
        texts = []
        for curve in (curve for curve in self.curves if not curve.is_faint):
            finite = curve.values[np.isfinite(curve.values)]
            values = {"first": finite[0], "last": finite[-1], "lowest": finite.min(), "highest": finite.max()}
            texts.append(f"{curve.name}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        return "; ".join(texts)


def _draw(x: np.ndarray, y: np.ndarray, after: str = "") -> str:
    """Data of a <path> through points, interrupted at points that are not finite. after: path command that draws each
    point as a separate mark; "" to join the points by lines."""
    pieces, pen = list[str](), "M"
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(down):
            pieces.append(f"{pen}{round(across, 2):g} {round(down, 2):g}{after}")
        pen = "L" if math.isfinite(down) and not after else "M"
    return "".join(pieces)


def _format_value(curve: Curve, step: float) -> str:
    """The value at a step, or at the last step before it, as text; "" if it is not finite or does not exist."""
    index = int(np.searchsorted(curve.steps, step, side="right")) - 1
    if index < 0 or not np.isfinite(curve.values[index]):
        return ""
    spread = math.nan if curve.spread is None else curve.spread[index]
    return f"{curve.values[index]:.5g}" + (f" ± {spread:.2g}" if np.isfinite(spread) else "")


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, one for each label, made of stacked parts. parts: name of a part -> a number for each label."""

    title: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[int]]

    @property
    def colors(self) -> dict[str, str]:
        return dict(zip(self.parts, COLORS, strict=False))

    @property
    def longest(self) -> int:
        return max(map(sum, zip(*self.parts.values(), strict=True)), default=1)


@dataclass(frozen=True)
class _Kind:
    """The definition of a chart. names: metrics, each drawn as a curve. is_nested: whether the metric is an object with
    a curve for each key. spread: metric with half the height of a band. is_smooth: whether the mean of the last steps
    is drawn over the raw values. absent: reason to show if a run does not have a curve."""

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    is_nested: bool = False
    spread: str = ""
    is_smooth: bool = False
    factor: float = 1.0
    note: str = ""
    absent: str = "no steps are recorded"


_NOT_MEASURED = "no validation measured it (validation.eval_samples is 0, or no validation was due yet)"
_KINDS = (
    _Kind("loss", "Training loss", "loss", ("loss",), is_smooth=True),
    _Kind("eval", "Eval loss", "loss", ("eval_loss",), absent=_NOT_MEASURED),
    _Kind("eval-sigma", "Eval loss by sigma", "loss", ("eval_by_sigma",), is_nested=True, absent=_NOT_MEASURED,
          note="Sigma 0 is data, 1 is noise."),
    _Kind("eval-bucket", "Eval loss by bucket", "loss", ("eval_by_bucket",), is_nested=True, absent=_NOT_MEASURED),
    _Kind("lr", "Learning rate", "learning rate", ("lr",)),
    _Kind("grad-norm", "Gradient norm before clipping", "norm", ("grad_norm",), is_smooth=True),
    _Kind("speed", "Throughput", "samples per second", ("samples_per_s",)),
    _Kind("wait", "Waiting for data", "% of the time", ("data_wait_share",), factor=100.0),
    _Kind("memory", "Memory", "GiB", ("device_memory_gib", "host_memory_gib"),
          note="Peak since the process started. Device memory is the memory that torch allocated."),
)  # fmt: skip


def build_charts(runs: Sequence[tuple[str, Sequence[Line]]], keys: Sequence[str] = ()) -> list[Chart]:
    """Build the charts of runs (name, lines of metrics). keys: keys of the charts to build, by default all charts."""
    return [_build(kind, runs) for kind in _KINDS if not keys or kind.key in keys]


def _build(
    kind: _Kind, runs: Sequence[tuple[str, Sequence[Line]]], about: Mapping[str, Sequence[str]] | None = None
) -> Chart:
    """Build a chart. about: run -> further notes for the chart."""
    curves, notes, gaps, marks = list[Curve](), list[str](), list[str](), list[int]()
    for number, (run, lines) in enumerate(runs):
        prefix = f"{shorten(run, 40)}: " if len(runs) > 1 else ""
        measured = [curve for curve in _list_curves(kind, number, lines) if np.isfinite(curve.values).any()]
        notes += [prefix + note for note in (about or {}).get(run, ())]
        if not measured:
            gaps.append(f"{prefix}{kind.absent}.")
        elif len(measured) > MAX_CURVES:
            notes.append(f"{prefix}only the {MAX_CURVES} curves with the most values are shown, of {len(measured)}.")
            measured = sorted(measured, key=lambda curve: -int(np.isfinite(curve.values).sum()))[:MAX_CURVES]
        gap_steps = sorted(line["step"] for line in lines for name in kind.names if name in line and line[name] is None)
        if gap_steps and not kind.is_nested:
            notes.append(f"{prefix}not finite at {len(gap_steps)} steps: {_name_steps(gap_steps)}.")
        for line in lines if measured and kind.unit == "loss" else ():
            if "set" in line:
                marks.append(line["step"])
                notes.append(
                    f"{prefix}trained on other data after step {line['step']}: set {shorten(line['set'], 40)}."
                )
        if kind.is_smooth:
            curves += [replace(curve, name=f"{prefix}each step", is_faint=True) for curve in measured]
            averages = [(curve, _moving_average(curve.values)) for curve in measured]
            curves += [replace(curve, name=f"{prefix}average", values=average) for curve, average in averages]
        else:
            names = [f"{prefix}{curve.name}" if curve.name else prefix[:-2] or kind.title for curve in measured]
            curves += [replace(curve, name=name) for curve, name in zip(measured, names, strict=True)]
    notes = [kind.note, *notes] if kind.note and curves else notes
    return Chart(kind.key, kind.title, kind.unit, len(runs), tuple(curves), tuple(notes), tuple(gaps), tuple(marks))


def _list_curves(kind: _Kind, run: int, lines: Sequence[Line]) -> Iterator[Curve]:
    """The curves of one run, with ascending steps. Values that are not numbers become NaN."""
    lines = sorted(lines, key=lambda line: line["step"])
    if kind.is_nested:
        (metric,) = kind.names
        points = [(line["step"], line[metric]) for line in lines if isinstance(line.get(metric), dict)]
        series = {name: points for _, values in points for name in values}
    else:
        series = {name: [(line["step"], line) for line in lines if name in line] for name in kind.names}
    for name, points in series.items():
        steps, values = np.array([(step, _number(line.get(name))) for step, line in points]).reshape(-1, 2).T
        spread = np.array([_number(line.get(kind.spread)) for _, line in points]) if kind.spread else None
        label = shorten(name, 40) if kind.is_nested else name.removesuffix("_gib").replace("_", " ")
        label = label if kind.is_nested or len(kind.names) > 1 else ""
        band = spread if spread is not None and np.isfinite(spread).any() else None
        yield Curve(label, run, steps, values * kind.factor, spread=band)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _name_steps(steps: Sequence[int]) -> str:
    """The first MAX_NAMED_STEPS steps as text."""
    return ", ".join(map(str, steps[:MAX_NAMED_STEPS])) + (", ..." if len(steps) > MAX_NAMED_STEPS else "")


def _moving_average(values: np.ndarray) -> np.ndarray:
    """(n,) exponential averages of the finite values on both sides of each index, divided by the sum of their weights
    as Adam corrects its bias; NaN if no value is finite. An average of earlier values only would lag above a falling
    loss. The weights fall by 1 / e over SMOOTHED_STEPS values, over fewer if there are few."""
    decay = math.exp(-1 / min(SMOOTHED_STEPS, max(1, len(values) // 20)))
    finite = np.isfinite(values)
    parts = np.stack([np.where(finite, values, 0.0), finite.astype(np.float64)])
    total = -parts  # each value is in the sums of both sides
    for order in (1, -1):
        sums = list(accumulate(parts.T[::order], lambda before, value: decay * before + value))
        total += np.array(sums).reshape(-1, 2)[::order].T
    return np.divide(total[0], total[1], out=np.full(len(values), np.nan), where=total[1] > 0)


def _thin(values: np.ndarray, max_points: int) -> np.ndarray:
    """Indices of at most `max_points` (4 or more) values, ascending: all indices, or the first, the last, and the
    lowest and the highest value of stretches of equal length, so that no peak is lost."""
    if len(values) <= max_points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (max_points - 2) // 2 + 1).astype(int)
    indices = {0, len(values) - 1}
    for first, last in pairwise(edges.tolist()):
        part = values[first:last]
        if np.isfinite(part).any():
            indices |= {first + int(np.nanargmin(part)), first + int(np.nanargmax(part))}
    return np.array(sorted(indices))


def build_score_charts(runs: Sequence[tuple[str, Sequence[ScoreCurve]]]) -> list[Chart]:
    """Build a chart for each score and, if there are several prompts, a second chart with a curve for each prompt.
    runs: (name, score curves). Scores of different models are in different charts."""
    names = sorted({curve.name for _, curves in runs for curve in curves})
    if not names:
        return [Chart("scores", "Scores", "", len(runs), gaps=("no scores are recorded.",))]
    charts: list[Chart] = []
    for name in names[:MAX_CURVES]:
        models = list(dict.fromkeys(curve.measured for _, curves in runs for curve in curves if curve.name == name))
        for model in models:
            title = f"Score: {shorten(score_label(name), 40)}"
            if len(models) > 1:
                title += f", by {shorten(Path(model.model).name, 40) if model else 'another program'}"
            lines, about = list[tuple[str, list[Line]]](), dict[str, list[str]]()
            for run, curves in runs:
                score = next((curve for curve in curves if (curve.name, curve.measured) == (name, model)), None)
                about[run] = list(_describe_score(score)) if score else []
                lines.append((run, [_make_score_line(point) for point in score.points] if score else []))
            kind = _Kind(f"score-{len(charts)}", title, "score", ("value",), spread="spread",
                         absent="it was not scored with this model")  # fmt: skip
            charts.append(_build(kind, lines, about))
            if any(len(line["prompts"]) > 1 for _, run_lines in lines for line in run_lines):
                by_prompt = replace(kind, key=f"{kind.key}-prompts", title=f"{title}, by prompt", spread="")
                charts.append(_build(replace(by_prompt, names=("prompts",), is_nested=True), lines))
    return charts


def _make_score_line(point: ScorePoint) -> Line:
    prompts = {prompt: group.mean for prompt, group in point.groups.items()}
    return {"step": point.step, "value": point.value, "spread": point.spread, "prompts": prompts}


def _describe_score(score: ScoreCurve) -> Iterator[str]:
    if score.measured is not None:
        yield f"Model: {score.measured.model}."
    if any(point.spread is not None for point in score.points):
        yield f"The band is one standard deviation over {score.seeds} seeds to each side."
    compared = score.comparable
    if other_steps := [point.step for point in score.points if point not in compared]:
        steps = _name_steps(other_steps)
        yield f"Not comparable with step {compared[-1].step}, because prompts or seeds differ: steps {steps}."
