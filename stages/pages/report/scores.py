"""The scores of runs by step as curves with a band for the spread over seeds; and the best steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache.runs.best_step import best_steps
from cache.runs.scores import ScoreCurve, score_label
from stages.pages.report.curves import MAX_CURVES, Chart, clean_name, make_curve, name_steps, thinned_chart

Runs = Sequence[tuple[str, Sequence[ScoreCurve]]]


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


def best_rows(runs: Sequence[tuple[str, Path]]) -> list[dict[str, Any]]:
    """List the best step of each run (name, folder) by each measure."""
    rows = []
    for run, folder in runs:
        for row in best_steps(folder):
            shown = {"run": run} if len(runs) > 1 else {}
            spread = f"{row['spread']:.2g}" if row["spread"] != "" else ""
            values = {"value": f"{row['value']:.5g}", "spread": spread, "checkpoint": row["checkpoint"] or "none"}
            rows.append(shown | {"measure": row["measure"], "step": row["step"]} | values)
    return rows
