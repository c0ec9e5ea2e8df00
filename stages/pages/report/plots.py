"""Charts as plots of Bokeh, which the page draws without a network; and the same numbers as tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from stages.pages.report.curves import Chart, Curve

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
