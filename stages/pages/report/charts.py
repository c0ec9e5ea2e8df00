"""Charts of a run's metrics and scores: curves by step, smoothed, with a band for the spread over seeds, and thinned to
what a plot can show; as plots of Bokeh, which the page draws without a network, and as tables of the same numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

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


HEIGHT = 300  # pixels
#: Okabe and Ito's colors for the color-blind without black and yellow, and two more; seen on white and on black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
DASH_ARRAYS = {"solid": "", "dashed": "6", "dotted": "2 4", "dotdash": "2 4 6 4"}  # Bokeh's names and lengths
DASHES = tuple(DASH_ARRAYS)
MAX_ROWS = 12  # of a table of values
MARKED_POINTS = 60  # curves of at most so many have a dot for each point
DIGITS = 6


@dataclass(frozen=True)
class LegendEntry:
    """A curve in the legend. line: the name of its renderers, which the page shows and hides."""

    line: str
    name: str
    color: str
    dash: str
    faint: bool

    @property
    def dash_array(self) -> str:
        """The dash as SVG has it."""
        return DASH_ARRAYS[self.dash]


@dataclass(frozen=True)
class Plot:
    """A plot on the page. item: the document that BokehJS draws, JSON that can stand in a <script>. rows: some of the
    values, for readers who can't see the plot. legend: the page's, as Bokeh's own is cut off where names are long, and
    can't be reached by keyboard."""

    key: str
    title: str
    item: Markup
    notes: tuple[str, ...]
    missing: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    summary: str
    legend: tuple[LegendEntry, ...] = ()

    @property
    def drawn(self) -> bool:
        return bool(self.item)


def script_library() -> Markup:
    """BokehJS, without the bundles for widgets, tables, WebGL and TeX."""
    import bokeh

    path = Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js"
    return Markup(path.read_text(encoding="utf-8"))  # the library's own, trusted


def draw_chart(chart: Chart, runs: int) -> Plot:
    """A line plot. With several runs a color is a run's, and the curves of one differ by dashes."""
    legend = legend_of(chart, runs)
    item = embed(line_figure(chart, legend)) if chart.curves else Markup()
    shown = legend if len(legend) > 1 else ()
    return Plot(chart.key, chart.title, item, chart.notes, chart.missing, value_rows(chart), summarize(chart), shown)


def legend_of(chart: Chart, runs: int) -> tuple[LegendEntry, ...]:
    """The look of each curve. Curves that differ only in being smoothed have the same color."""
    entries, counts = [], dict[int, int]()
    for number, curve in enumerate(chart.curves):
        position = counts[curve.run] = counts.get(curve.run, -1) + (not curve.faint)
        smoothed = any(other.faint for other in chart.curves)
        color = curve.run if runs > 1 or smoothed else number
        dash = DASHES[max(0, position) % len(DASHES)] if runs > 1 and not smoothed else DASHES[0]
        entries.append(LegendEntry(f"line-{number}", curve.name, COLORS[color % len(COLORS)], dash, curve.faint))
    return tuple(entries)


def line_figure(chart: Chart, legend: Sequence[LegendEntry]) -> Any:
    from bokeh.models import BasicTickFormatter, ColumnDataSource, HoverTool
    from bokeh.models.annotations import Span

    figure = empty_figure("step", chart.unit)
    figure.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    most = max((float(np.nanmax(np.abs(curve.values))) for curve in chart.curves), default=0.0)
    figure.y_range.default_span = most or 1.0  # of the axis where all values are equal
    shown = []
    for curve, entry in zip(chart.curves, legend, strict=True):
        data = {"step": curve.steps.astype(int).tolist(), "value": [_rounded(value) for value in curve.values]}
        source = ColumnDataSource(data | {"name": [curve.name] * len(curve.steps)})
        look: dict[str, Any] = {"line_color": entry.color, "line_dash": entry.dash}
        look |= {"line_width": 1, "line_alpha": 0.5} if entry.faint else {"line_width": 2}
        if curve.spread is not None:
            _draw_band(figure, curve, entry)
        line = figure.line("step", "value", source=source, name=entry.line, **look)
        line.nonselection_glyph = None
        if not curve.faint and len(curve.steps) <= MARKED_POINTS:
            figure.scatter("step", "value", source=source, name=entry.line, size=5, color=entry.color)
        shown.append(line)
    for step in chart.marks:
        figure.add_layout(Span(location=step, dimension="height", line_color="gray", line_dash="dashed"))
    figure.add_tools(HoverTool(renderers=shown, tooltips=[("", "@name"), ("step", "@step"), (chart.unit, "@value")]))
    return figure


def _draw_band(figure: Any, curve: Curve, entry: LegendEntry) -> None:
    """Between the values less and plus their spread, where they have one."""
    assert curve.spread is not None
    known = np.isfinite(curve.values) & np.isfinite(curve.spread)
    steps, values, spread = curve.steps[known].astype(int), curve.values[known], curve.spread[known]
    low, high = ([_rounded(value) for value in side] for side in (values - spread, values + spread))
    figure.varea(x=steps.tolist(), y1=low, y2=high, name=entry.line, fill_color=entry.color, fill_alpha=0.2)


def draw_bars(key: str, title: str, unit: str, labels: Sequence[str], parts: Mapping[str, Sequence[int]]) -> Plot:
    """Horizontal bars, one for each label, of stacked parts (name -> a number for each label)."""
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool

    rows = tuple(
        {"": label} | {name: values[number] for name, values in parts.items()} for number, label in enumerate(labels)
    )
    if not labels:
        return Plot(key, title, Markup(), (), ("There is nothing to count.",), rows, "")
    figure = empty_figure(unit, "", y_range=list(reversed(labels)), height=70 + 24 * len(labels))
    source = ColumnDataSource({"label": list(labels), **{name: list(map(int, part)) for name, part in parts.items()}})
    colors = list(COLORS[: len(parts)])
    bars = figure.hbar_stack(list(parts), y="label", height=0.75, source=source, color=colors)
    figure.x_range.start, figure.xaxis.ticker = 0, BasicTicker(min_interval=1)
    figure.add_tools(HoverTool(renderers=bars, tooltips=[("", "@label"), ("$name", "@$name")]))
    named = zip(bars, parts, colors, strict=True)
    legend = tuple(LegendEntry(bar.name, name, color, DASHES[0], False) for bar, name, color in named)
    summary = f"{sum(sum(values) for values in parts.values())} in {len(labels)} bars"
    return Plot(key, title, embed(figure), (), (), rows, summary, legend if len(legend) > 1 else ())


def empty_figure(x_label: str, y_label: str, height: int = HEIGHT, **options: Any) -> Any:
    """A figure without data. Nothing is dragged or scrolled until its tool is chosen, so a finger scrolls the page."""
    from bokeh.plotting import figure

    made = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x_label,
        y_axis_label=y_label,
        tools="pan,box_zoom,wheel_zoom,reset",
        active_drag=None,
        active_scroll=None,
        toolbar_location="above",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
        **options,
    )
    made.toolbar.logo = None
    return made


def embed(figure: Any) -> Markup:
    """The figure's document as JSON in which no tag can end."""
    from bokeh.embed import json_item

    text = json.dumps(json_item(figure), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def value_rows(chart: Chart) -> tuple[dict[str, Any], ...]:
    """Some of the values, spread evenly, at steps that the first curve that is not faint has."""
    shown = [curve for curve in chart.curves if not curve.faint]
    if not shown:
        return ()
    steps = shown[0].steps
    indices = np.unique(np.linspace(0, len(steps) - 1, min(MAX_ROWS, len(steps))).astype(int))
    return tuple({"step": int(step)} | {curve.name: _at(curve, step) for curve in shown} for step in steps[indices])


def _at(curve: Curve, step: float) -> str:
    """The value at a step, or of the last one before it."""
    index = int(np.searchsorted(curve.steps, step, side="right")) - 1
    if index < 0 or not np.isfinite(curve.values[index]):
        return ""
    has_spread = curve.spread is not None and np.isfinite(curve.spread[index])
    return f"{curve.values[index]:.5g}" + (f" ± {curve.spread[index]:.2g}" if has_spread else "")  # type: ignore[index]


def summarize(chart: Chart) -> str:
    """List the first, last, lowest and highest value of each curve that is not faint."""
    lines = []
    for curve in chart.curves:
        finite = curve.values[np.isfinite(curve.values)]
        if not curve.faint and len(finite):
            span = f"{finite[0]:.4g} at first, {finite[-1]:.4g} at last, from {finite.min():.4g} to {finite.max():.4g}"
            lines.append(f"{curve.name}: {span}")
    return "; ".join(lines)
