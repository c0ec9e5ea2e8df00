"""How long stages take, by what former runs of the same output recorded; nothing is assumed where none did."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cache.runs.training_run import METRICS_FILE, read_last_metrics, read_stages
from schemas.config.loading import ConfigError, load_config
from schemas.config.pipeline import Config
from schemas.text_format import format_duration

UNKNOWN = "unknown: not measured here yet"
_ALIKE = ("family", "flavour", "path", "precision")  # of the model
_SAME_TRAINING = (
    *("precision", "weight_precision", "base_precision", "gradient_checkpointing", "gradient_checkpointing_interval"),
    *("offload", "attention_backend", "compile", "batch_size", "experts", "device"),
)


def former_runs(config: Config) -> list[tuple[str, Path, Config]]:
    """The runs of this output whose model, sizes and frames are those of `config`, the newest first."""
    runs = []
    for path in Path(config.output).glob("*/config.yaml"):
        with suppress(ConfigError, OSError):
            runs.append((path.stat().st_mtime, path.parent, load_config(path)))
    wanted = _shape(config)
    return [(folder.name, folder, run) for _, folder, run in sorted(runs, reverse=True) if _shape(run) == wanted]


def _shape(config: Config) -> Any:
    model = {key: getattr(config.model, key) for key in _ALIKE} | {"flavour": config.model.flavour_spec.name}
    sizes = [
        (dataset.dataset_type, dataset.resolutions(config.model.family_spec.resolution), dataset.video.num_frames)
        for dataset in config.datasets
    ]
    return model, sizes


def seconds_of_step(config: Config) -> tuple[float, str] | None:
    """Seconds of an optimizer step and the run that measured it, which trained in the same way; None without one."""
    for name, folder, run in former_runs(config):
        if any(getattr(run.train, key) != getattr(config.train, key) for key in _SAME_TRAINING):
            continue
        if run.train.adapter.type != config.train.adapter.type:
            continue
        speeds = [
            line["samples_per_s"] for line in read_last_metrics(folder / METRICS_FILE) if line.get("samples_per_s")
        ]
        if speeds:
            return config.train.batch_size * config.train.accumulate / speeds[-1], name
    return None


def predict_times(
    config: Config, counts: Mapping[str, int], measured: Mapping[str, tuple[float, str]]
) -> list[dict[str, Any]]:
    """A row for each stage: how long it takes, and by what that is known. counts: stage -> items that it has to do.
    measured: stage -> seconds that it took, and when."""
    rows, runs = [], former_runs(config)
    for stage in config.stage_order:
        took, by = UNKNOWN, ""
        if stage in measured:
            took, by = format_duration(measured[stage][0]), measured[stage][1]
        elif stage == "train":
            if step := seconds_of_step(config):
                took, by = format_duration(step[0] * config.train.steps), f"run {step[1]}"
        else:
            for name, folder, _ in runs:
                done = [row for row in read_stages(folder) if row["stage"] == stage and row.get("done")]
                if done and stage in counts:
                    took = format_duration(done[0]["seconds"] / done[0]["done"] * counts[stage])
                    by = f"run {name}, with the loading of its model"
                    break
        rows.append({"stage": stage, "time": took, "by": by})
    return rows
