"""The tables of a report: runs, time and bytes of their stages, their best steps, and settings: what differs from the
defaults, and between runs."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cache.runs.scores import SCORES_FILE, ScoreCurve
from cache.runs.training_run import RunProgress, read_stages
from cache.runs.validations import Evaluation, best_evaluation, best_steps, loss_name
from cache.store.files import walk
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable, format_bytes, format_duration, shorten
from stages.discovery.sources.urls import scrub_secrets
from stages.encoding import stage_registry
from stages.encoding.job_reports import read_reports

TableRow = dict[str, Any]
MAX_SHOWN = 300  # characters of a value
MAX_ROWS = 500  # of a table
MAX_TEXT = 200_000  # characters of a configuration
NOT_SET = ("train.set",)  # config.yaml has the id of the set that was found
ABSENT = "\N{EM DASH}"
_ITEM_KEYS = ("id", "name")  # by which the items of a list are called


@dataclass(frozen=True)
class ReportRun:
    """A run of the report. config: its own. planned: the given configuration where it has
    the same datasets, as a plan is found by paths relative to the configuration's folder; else the run's own. not_own:
    whether config.yaml is missing, so that settings are those of the given configuration."""

    name: str
    folder: Path
    config: Config
    planned: Config
    not_own: bool
    metrics: list[dict[str, Any]]
    scores: list[ScoreCurve]
    progress: RunProgress

    @property
    def best(self) -> Evaluation | None:
        """The lowest eval loss, as "Best steps" has it."""
        return best_evaluation(self.metrics)


def run_rows(runs: Sequence[ReportRun]) -> list[TableRow]:
    rows, names = [], {loss_name(run.metrics) for run in runs}
    name = names.pop().replace(" ", "_") if len(names) == 1 else "eval_loss"  # what each was measured on is said below
    for run in runs:
        row, best = run.progress.row(), run.best
        model, trains = run.config.model, run.config.train
        rows.append(
            {
                "run": run.name,
                "state": row["state"],
                "step": row["step"],
                "loss": row["loss"],
                name: _last_eval(run),
                f"lowest_{name}": f"{best.eval_loss:.4g} at step {best.step}" if best else "",
                "model": ", ".join(
                    filter(None, (f"{model.family} {model.flavour_spec.name}", trains.experts, trains.adapter.type))
                ),
                "folder": str(run.folder),
            }
        )
    return rows


def _last_eval(run: ReportRun) -> str:
    lines = [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
    return f"{lines[-1] if lines[-1] is not None else math.nan:.4g}" if lines else ""


def cost_table(runs: Sequence[ReportRun]) -> list[TableRow]:
    """A row for each stage, two columns for each run."""
    merged: dict[str, TableRow] = {}
    for run in runs:
        prefix = f"{run.name} " if len(runs) > 1 else ""
        for row in cost_rows(run.config, run.folder, run.metrics):
            columns = {f"{prefix}time": row["time"], f"{prefix}size": row["size"]}
            merged.setdefault(row["stage"], {"stage": row["stage"]}).update(columns)
    keys = dict.fromkeys(key for row in merged.values() for key in row)
    return [{key: row.get(key, "") for key in keys} for row in merged.values()]


def cost_rows(config: Config, folder: Path, metrics: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """A row for each stage: the time that `latentpress run` took for it, all its runs together, and the bytes that it
    has made. Without `run`, training's time is that of the recorded steps, and an encoding stage's that of its jobs of
    the last day, added up."""
    seconds: dict[str, float] = {}
    for row in read_stages(folder):
        seconds[row["stage"]] = seconds.get(row["stage"], 0.0) + row["seconds"]
    steps = [value for line in metrics if isinstance(value := line.get("step_s"), int | float) and math.isfinite(value)]
    if steps:
        seconds.setdefault("train", math.fsum(steps))
    store, fingerprints = Store(config.root), _fingerprints(config)
    for stage, jobs in read_reports(store, fingerprints, time.time()).items():
        if jobs:
            seconds.setdefault(stage, math.fsum(job.seconds for job in jobs))
    return [
        {
            "stage": stage,
            "time": format_duration(seconds[stage]) if stage in seconds else "not recorded",
            "size": "not known" if size is None else format_bytes(size),
        }
        for stage, size in _sizes(store, config, folder, fingerprints).items()
    ]


def _fingerprints(config: Config) -> dict[str, str]:
    """Fingerprints of the encoding stages whose checkpoint is on this machine."""
    fingerprints = {}
    for stage in (*stage_registry.item_stages(config), *stage_registry.required_stages(config)):
        with suppress(LatentpressError):
            fingerprints[stage.name] = stage.fingerprint(config)
    return fingerprints


def _sizes(store: Store, config: Config, folder: Path, fingerprints: Mapping[str, str]) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {
        "discover": _stored(store, [f"media/{dataset.id}" for dataset in config.datasets]),
        **dict.fromkeys((stage.name for stage in stage_registry.item_stages(config)), None),
        "bucket": _stored(store, ["plans"]),
    }
    for stage in (*stage_registry.item_stages(config), *stage_registry.required_stages(config)):
        fingerprint = fingerprints.get(stage.name)
        sizes[stage.name] = None if fingerprint is None else _stored(store, [f"{stage.kind}/{fingerprint}"])
    is_named = "/" not in config.train.set and config.train.set != "current"
    sizes["index"] = _stored(store, [f"sets/{config.train.set}" if is_named else "sets"])
    samples = _local(folder / "samples")
    sizes["train"], sizes["decode"] = _local(folder) - samples, samples
    scores = folder / SCORES_FILE
    if scores.exists():
        sizes["score"] = scores.stat().st_size
    return sizes


def _stored(store: Store, folders: Iterable[str]) -> int:
    return sum(entry.size for folder in folders for entry in store.list_files(folder))


def _local(folder: Path) -> int:
    return sum(entry.stat().st_size for _, entry in walk(folder)) if folder.is_dir() else 0


def list_settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, default) of every option, with those of lists as "datasets.photos.resolution". The default of
    a required option is PydanticUndefined."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{field.alias or name}"
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, BaseModel):
            yield from list_settings(value, f"{key}.")
        elif isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                item_key = next((getattr(item, word) for word in _ITEM_KEYS if getattr(item, word, None)), number)
                yield from list_settings(item, f"{key}.{item_key}.")
        else:
            yield key, value, default


def show(value: Any) -> str:
    """A value as the page shows it, on one line and without the secrets of URLs."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True, by_alias=True)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return escape_unprintable(shorten(scrub_secrets(text), MAX_SHOWN)) or '""'


def differing_from_defaults(config: Config) -> list[dict[str, str]]:
    """A row for each option whose value is not its default: what its section, or the model's family, has without it."""
    family = config.model.family_spec
    sources = family.flavours[family.default_flavour].task == "i2i"  # which it can't do without
    required = {"instance_data_dir": "any"} | ({"conditioning_data": "any"} if sources else {})
    datasets = [required | {"id": dataset.id} for dataset in config.datasets]
    given = {"root": config.root, "model": {"family": family.name}, "datasets": datasets}
    given |= {"train": {"experts": config.train.experts}} if config.experts else {}  # required, and in "Runs"
    settings = list_settings(Config.model_validate(given))
    made = {key: value for key, value, _ in settings if not key.endswith(".conditioning_data")}
    rows = []
    for key, value, default in list_settings(config):
        if default is not PydanticUndefined:  # else required, and not the same in every configuration
            default = made.get(key, default)
        if value != default and key not in NOT_SET:
            rows.append({"option": escape_unprintable(key), "value": show(value), "default": show(default)})
    return _shorten_table(rows)


def _shorten_table(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The first MAX_ROWS, and one that says how many there are besides."""
    if len(rows) <= MAX_ROWS:
        return rows
    last = dict.fromkeys(rows[0], "") | {"option": f"and {len(rows) - MAX_ROWS} more"}
    return [*rows[:MAX_ROWS], last]


def differing_between(configs: Sequence[tuple[str, Config]]) -> list[dict[str, str]]:
    """A row for each option that runs (name, configuration) have with different values; a column for each run."""
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
    return _shorten_table(rows)


def configuration_text(path: Path) -> str:
    """The resolved configuration as the trainer wrote it, without the secrets of URLs; empty where there is none."""
    try:
        text = "\n".join(scrub_secrets(line) for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ""
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]}\n[{left} more characters: {path.name}]"


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
