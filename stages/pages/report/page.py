"""The page of `latentpress report`: runs, their curves, samples, data, costs and settings, as one HTML file.

Nothing on it is loaded from elsewhere: a Content-Security-Policy forbids every request, and runs no script but the
page's own, whose hashes it has.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from cache.runs.scores import read_curves
from cache.runs.training_run import METRICS_FILE, read_metrics, read_progress
from cache.runs.validations import NOTHING_HELD_OUT, measured_on
from schemas.config.pipeline import Config
from stages.pages.charts import COLORS, Chart, build_charts, score_charts
from stages.pages.html import TEMPLATES, render_template
from stages.pages.report import tables
from stages.pages.report.dataset import DataGlance, glance_at_data
from stages.pages.report.samples import SampleGrid, gather_samples
from stages.pages.report.tables import ReportRun

SAMPLE_BYTES = 6_000_000  # of pictures and clips, before base64 makes a third more of them


@dataclass(frozen=True)
class ReportContent:
    """The gathered content of the page. missing: what is not there, and why."""

    runs: list[ReportRun]
    charts: list[Chart]
    grid: SampleGrid
    data: list[DataGlance]
    missing: list[str]


def read_run(name: str, folder: Path, config: Config, given: Config) -> ReportRun:
    """config: the run's own, or `given`, the configuration that the program was called with."""
    shared = {"root", "datasets", "model"}
    is_same = config.model_dump(include=shared) == given.model_dump(include=shared)
    not_own, planned = config is given, given if is_same else config
    metrics = read_metrics(folder / METRICS_FILE)
    return ReportRun(
        name, folder, config, planned, not_own, metrics, read_curves(folder), read_progress(config, folder)
    )


def make_page(
    runs: Sequence[ReportRun], command: str = "", beside: tuple[Path, Path] | None = None
) -> tuple[ReportContent, list[bytes]]:
    """Make the page in pieces. command: that makes it again. beside: see `gather_samples`."""
    charts = build_charts([(run.name, run.metrics) for run in runs])
    charts += score_charts([(run.name, run.scores) for run in runs])
    named = [(run.name, run.folder, run.config) for run in runs]
    content = ReportContent(
        runs=list(runs),
        charts=charts,
        grid=gather_samples(named, SAMPLE_BYTES, beside),
        data=glance_at_data([(run.name, run.config, run.planned) for run in runs]),
        missing=[f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in _missing_of_run(run)],
    )
    return content, list(render_report(content, command))


def _missing_of_run(run: ReportRun) -> Iterator[str]:
    if run.not_own:
        yield "It has no config.yaml, so it has not begun training: settings are those of the given configuration."
    if run.best and measured_on(run.metrics) == "training samples":
        yield f"The eval loss is a loss on training samples: {NOTHING_HELD_OUT}."
    if run.progress.state == "running":
        yield "Training goes on: this page shows what there was when it was made."
    elif run.progress.state == "stopped":
        yield f"Training stopped at step {run.progress.step} of {run.progress.steps}; latentpress run continues it."


def render_report(content: ReportContent, command: str = "") -> Iterator[bytes]:
    """The page in pieces. command: that makes it again."""
    runs, title = content.runs, "Report: " + ", ".join(run.name for run in content.runs)
    script = Markup((TEMPLATES / "charts.js").read_text(encoding="utf-8"))
    configs = [(run.name, run.config) for run in runs]
    return render_template(
        "report.html",
        title=title,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        command=command,
        policy=content_policy(script),
        script=script,
        runs=tables.run_rows(runs),
        absent=content.missing,
        charts=content.charts,
        best=tables.best_rows([(run.name, run.folder) for run in runs]),
        colors={run.name: COLORS[number % len(COLORS)] for number, run in enumerate(runs)} if len(runs) > 1 else {},
        grid=content.grid,
        data=content.data,
        costs=tables.cost_table(runs),
        between=tables.differing_between(configs) if len(runs) > 1 else [],
        changed=[(run.name, tables.differing_from_defaults(run.config)) for run in runs],
        texts=[(run.name, tables.configuration_text(run.folder / "config.yaml")) for run in runs],
    )


def content_policy(script: str) -> str:
    """Forbids every request but for files beside the page, and every script but this."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'; img-src data: blob: file: 'self'; media-src data: file: 'self'"
    )
