"""The page of `latentpress report`: runs, their curves, samples, data, costs and settings, as one HTML file.

The page loads nothing from elsewhere: its Content-Security-Policy forbids every request, and allows only the page's own
script, by its hash.
"""

import base64
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cache.runs.scores import SCORES_FILE, read_curves
from cache.runs.training_run import METRICS_FILE, read_metrics, read_progress, read_stages
from cache.runs.validations import NOTHING_HELD_OUT, best_evaluation, best_steps, loss_name, measured_on
from cache.store.files import walk
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable, format_bytes, format_duration, shorten
from stages.discovery.sources.urls import scrub_secrets
from stages.encoding import stage_registry
from stages.encoding.job_reports import read_reports
from stages.pages.charts import COLORS, build_charts, build_score_charts
from stages.pages.html import TEMPLATES, render_template
from stages.pages.report.dataset import summarize_data
from stages.pages.report.samples import gather_samples

SAMPLE_BYTES = 6_000_000  # bytes of pictures and clips, before base64 adds a third
MAX_SHOWN = 300  # characters of a value
MAX_TEXT = 200_000  # characters of a configuration
NOT_SET = ("train.set",)  # not a choice of the user: config.yaml has the id of the set that was found
ABSENT = "\N{EM DASH}"
TableRow = dict[str, Any]


class ReportRun:
    """A run of the report. called_config: the configuration that the program was called with. config: the run's own
    configuration, or `called_config` if the run does not have one (has_no_config). plan_config: the configuration by
    which the run's plan is found: `called_config` if it has the same root, datasets and model, because a plan is found
    by paths relative to the configuration's folder; otherwise `config`."""

    def __init__(self, name: str, folder: Path, config: Config, called_config: Config) -> None:
        keys = {"root", "datasets", "model"}
        is_same = config.model_dump(include=keys) == called_config.model_dump(include=keys)
        self.name, self.folder, self.config, self.has_no_config = name, folder, config, config is called_config
        self.plan_config = called_config if is_same else config
        self.metrics, self.scores = read_metrics(folder / METRICS_FILE), read_curves(folder)
        self.progress = read_progress(config, folder)


def make_page(
    runs: Sequence[ReportRun], command: str = "", copy_folders: tuple[Path, Path] | None = None
) -> tuple[list[bytes], list[str]]:
    """Make the page. Returns (the page in pieces, sentences about missing content). command: command that makes the
    page again. copy_folders: see `gather_samples`."""
    several = len(runs) > 1
    charts = build_charts([(run.name, run.metrics) for run in runs])
    charts += build_score_charts([(run.name, run.scores) for run in runs])
    grid = gather_samples([(run.name, run.folder, run.config) for run in runs], SAMPLE_BYTES, copy_folders)
    data = summarize_data([(run.name, run.config, run.plan_config) for run in runs])
    absent = [f"{run.name}: {text}" if several else text for run in runs for text in _missing_of_run(run)]
    script = Markup((TEMPLATES / "charts.js").read_text(encoding="utf-8"))
    pieces = render_template(
        "report.html",
        title="Report: " + ", ".join(run.name for run in runs),
        made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        command=command,
        policy=make_content_policy(script),
        script=script,
        runs=[list_run_facts(run) for run in runs],
        absent=absent,
        charts=charts,
        best=[row for run in runs for row in list_best_steps(run, several)],
        colors={run.name: COLORS[number % len(COLORS)] for number, run in enumerate(runs)} if several else {},
        grid=grid,
        data=data,
        costs=[row for run in runs for row in list_costs(run, several)],
        between=list_different_options([(run.name, run.config) for run in runs]) if several else [],
        changed=[(run.name, list_changed_options(run.config)) for run in runs],
        texts=[(run.name, read_configuration(run.folder / "config.yaml")) for run in runs],
    )
    gaps = [*absent, *grid.gaps, *(f"{chart.title}: {text}" for chart in charts for text in chart.gaps)]
    return list(pieces), gaps + [text for summary in data for text in summary.gaps]


def _missing_of_run(run: ReportRun) -> Iterator[str]:
    if run.has_no_config:
        yield "Training has not started: config.yaml does not exist. The settings are from the given configuration."
    if best_evaluation(run.metrics) and measured_on(run.metrics) == "training samples":
        yield f"The eval loss is a loss on training samples: {NOTHING_HELD_OUT}."
    if run.progress.state == "running":
        yield "Training is running. This page shows its state when the page was made."
    elif run.progress.state == "stopped":
        yield f"Training stopped at step {run.progress.step} of {run.progress.steps}; latentpress run continues it."


def list_run_facts(run: ReportRun) -> TableRow:
    row, best, name = run.progress.row(), best_evaluation(run.metrics), loss_name(run.metrics)
    model, trains = run.config.model, run.config.train
    losses = [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
    trained = (f"{model.family} {model.flavour_spec.name}", trains.experts, trains.adapter.type)
    return {
        "run": run.name,
        "state": row["state"],
        "step": row["step"],
        "loss": row["loss"],
        name: f"{math.nan if losses[-1] is None else losses[-1]:.4g}" if losses else "",
        f"lowest {name}": f"{best.eval_loss:.4g} at step {best.step}" if best else "",
        "model": ", ".join(filter(None, trained)),
        "folder": str(run.folder),
    }


def list_best_steps(run: ReportRun, named: bool) -> Iterator[TableRow]:
    """Rows with the best step by each measure. named: whether rows have the name of the run."""
    for row in best_steps(run.folder):
        spread = f"{row['spread']:.2g}" if row["spread"] != "" else ""
        values = {"value": f"{row['value']:.5g}", "spread": spread, "checkpoint": row["checkpoint"] or "none"}
        yield ({"run": run.name} if named else {}) | {"measure": row["measure"], "step": row["step"]} | values


def list_costs(run: ReportRun, named: bool) -> Iterator[TableRow]:
    """Rows with the time and the size of each stage: the sum of the times that `latentpress run` took for the stage,
    and the bytes of its files. If `run` did not run the stage, training's time is the sum of the recorded steps, and an
    encoding stage's time is the sum over its jobs of the last day. named: whether rows have the name of the run."""
    config, folder, store = run.config, run.folder, Store(run.config.root)
    seconds = defaultdict[str, float](float)
    for stage_run in read_stages(folder):
        seconds[stage_run.stage] += stage_run.seconds
    steps = [line["step_s"] for line in run.metrics if isinstance(line.get("step_s"), int | float)]
    if steps:
        seconds.setdefault("train", math.fsum(filter(math.isfinite, steps)))

    def measure(*names: str) -> int:
        return sum(entry.size for name in names for entry in store.list_files(name))

    is_named = "/" not in config.train.set and config.train.set != "current"
    items, required = stage_registry.item_stages(config), stage_registry.required_stages(config)
    sizes: dict[str, int | None] = {"discover": measure(*(f"media/{dataset.id}" for dataset in config.datasets))}
    sizes |= dict.fromkeys(stage.name for stage in items) | {"bucket": measure("plans")}
    fingerprints = dict[str, str]()
    for stage in (*items, *required):
        sizes[stage.name] = None
        with suppress(LatentpressError):  # its checkpoint is not on this machine
            fingerprints[stage.name] = stage.fingerprint(config)
            sizes[stage.name] = measure(f"{stage.kind}/{fingerprints[stage.name]}")
    for name, jobs in read_reports(store, fingerprints, time.time()).items():
        if jobs:
            seconds.setdefault(name, math.fsum(job.seconds for job in jobs))
    samples = _measure_folder(folder / "samples")
    sizes["index"] = measure(f"sets/{config.train.set}" if is_named else "sets")
    sizes |= {"train": _measure_folder(folder) - samples, "decode": samples}
    if (folder / SCORES_FILE).exists():
        sizes["score"] = (folder / SCORES_FILE).stat().st_size
    for stage_name, size in sizes.items():
        duration = format_duration(seconds[stage_name]) if stage_name in seconds else "not recorded"
        row = {"stage": stage_name, "time": duration, "size": "not known" if size is None else format_bytes(size)}
        yield ({"run": run.name} if named else {}) | row


def _measure_folder(folder: Path) -> int:
    return sum(entry.stat().st_size for _, entry in walk(folder)) if folder.is_dir() else 0


def list_settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, default) for every option. Keys in lists have the item's name, for example
    "datasets.photos.resolution". The default of a required option is PydanticUndefined."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{field.alias or name}"
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, BaseModel):
            yield from list_settings(value, f"{key}.")
        elif isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                item_key = next((getattr(item, word) for word in ("id", "name") if getattr(item, word, None)), number)
                yield from list_settings(item, f"{key}.{item_key}.")
        else:
            yield key, value, default


def show(value: Any) -> str:
    """A value as the page shows it, on one line and without secrets in URLs."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return escape_unprintable(shorten(scrub_secrets(text), MAX_SHOWN)) or '""'


def list_changed_options(config: Config) -> list[dict[str, str]]:
    """A row for each option whose value differs from the default of its section or of the model's family."""
    family = config.model.family_spec
    sources = family.flavours[family.default_flavour].task == "i2i"  # such a family requires source images
    required = {"instance_data_dir": "any"} | ({"conditioning_data": "any"} if sources else {})
    datasets = [required | {"id": dataset.id} for dataset in config.datasets]
    minimum = {"root": config.root, "model": {"family": family.name}, "datasets": datasets}
    minimum |= {"train": {"experts": config.train.experts}} if config.experts else {}  # required, and shown in "Runs"
    settings = list_settings(Config.model_validate(minimum))
    defaults = {key: value for key, value, _ in settings if not key.endswith(".conditioning_data")}
    rows = []
    for key, value, default in list_settings(config):
        if default is not PydanticUndefined:  # a required option has no default
            default = defaults.get(key, default)
        if value != default and key not in NOT_SET:
            rows.append({"option": escape_unprintable(key), "value": show(value), "default": show(default)})
    return rows


def list_different_options(configs: Sequence[tuple[str, Config]]) -> list[dict[str, str]]:
    """A row for each option whose value differs between runs (name, configuration), with a column for each run."""
    tables: list[Mapping[str, str]] = [
        {key: show(value) for key, value, _ in list_settings(config)} for _, config in configs
    ]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = [table.get(key, ABSENT) for table in tables]
        if len(set(values)) > 1:
            by_run = {name: value for (name, _), value in zip(configs, values, strict=True)}
            rows.append({"option": escape_unprintable(key)} | by_run)
    return rows


def read_configuration(path: Path) -> str:
    """The resolved configuration that the trainer wrote, without secrets in URLs; empty if it can't be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return shorten("\n".join(map(scrub_secrets, lines)), MAX_TEXT)


def make_content_policy(script: str) -> str:
    """A Content-Security-Policy that allows only files next to the page and this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'; img-src data: blob: file: 'self'; media-src data: file: 'self'"
    )
