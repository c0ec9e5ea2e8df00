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
from schemas.text_format import format_duration
from stages.encoding import stage_registry
from stages.encoding.job_reports import read_reports

NOT_RECORDED = "not recorded"
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
    known = {stage: fingerprint for stage, fingerprint in fingerprints.items() if fingerprint is not None}
    for stage, jobs in read_reports(store, known, time.time()).items():
        if jobs:
            seconds.setdefault(stage, math.fsum(job.seconds for job in jobs))
    rows = []
    for stage, size in _sizes(store, config, folder, fingerprints).items():
        took = seconds.get(stage)
        shown = NOT_RECORDED if took is None else format_duration(took)
        rows.append({"stage": stage, "time": shown, "size": format_bytes(size)})
    return rows


def _fingerprints(config: Config) -> dict[str, str | None]:
    """Of each encoding stage; None where the checkpoint that names it is not on this machine."""
    found: dict[str, str | None] = {}
    for stage in stage_registry.required_stages(config):
        found[stage.name] = None
        with suppress(LatentpressError):
            found[stage.name] = stage.fingerprint(config)
    return found


def _sizes(store: Store, config: Config, folder: Path, fingerprints: Mapping[str, str | None]) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {
        "discover": _stored(store, [f"media/{dataset.id}" for dataset in config.datasets]),
        "bucket": _stored(store, ["plans"]),
    }
    for stage in stage_registry.required_stages(config):
        fingerprint = fingerprints[stage.name]
        sizes[stage.name] = None if fingerprint is None else _stored(store, [f"{stage.kind}/{fingerprint}"])
    named = "/" not in config.train.set and config.train.set != "current"
    sizes["index"] = _stored(store, [f"sets/{config.train.set}" if named else "sets"])
    own = {name: _local(folder / name) for name in ("validation", "samples")}
    sizes["train"] = _local(folder) - own["samples"]
    sizes["decode"] = own["samples"]
    scores = folder / SCORES_FILE
    if scores.exists():
        sizes["score"] = scores.stat().st_size
    return sizes


def _stored(store: Store, places: Iterable[str]) -> int:
    return sum(entry.size for place in places for entry in store.list_files(place))


def _local(folder: Path) -> int:
    return sum(entry.stat().st_size for _, entry in walk(folder)) if folder.is_dir() else 0


def format_bytes(size: int | None) -> str:
    """With a unit of 1024: "3.4 MiB"."""
    if size is None:
        return "not known"
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" or value >= 100 else f"{value:.1f} {units[0]}"
