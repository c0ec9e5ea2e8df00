"""Time and bytes of each stage of a run."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cache.runs.process_record import read_stages
from cache.runs.scores import SCORES_FILE
from cache.store.files import walk
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import format_bytes, format_duration
from stages.encoding import stage_registry
from stages.encoding.job_reports import read_reports

TableRow = dict[str, Any]


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
    for stage in stage_registry.required_stages(config):
        with suppress(LatentpressError):
            fingerprints[stage.name] = stage.fingerprint(config)
    return fingerprints


def _sizes(store: Store, config: Config, folder: Path, fingerprints: Mapping[str, str]) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {
        "discover": _stored(store, [f"media/{dataset.id}" for dataset in config.datasets]),
        "bucket": _stored(store, ["plans"]),
    }
    for stage in stage_registry.required_stages(config):
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
