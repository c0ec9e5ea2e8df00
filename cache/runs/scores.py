"""<output>/<run>/scores.jsonl: what `latentpress score` measured of the validation samples of each step.

A line for each step, added when all its samples are scored; a later line of a step replaces the scores that it names.
docs/results-reference.md describes it. Scores of different models or settings have different fingerprints and are never
compared.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cache.runs.training_run import parse_metrics, read_regular
from cache.store.files import explained
from schemas.identity import hash_json

SCORES_FILE = "scores.jsonl"
DIGITS = 6


@dataclass(frozen=True)
class SampleScores:
    """A validation sample at a step. group: what it has in common with those of other seeds, a name. content: hash of
    its picture or clip and of its prompt. scores: by the measure's name."""

    name: str
    group: str
    seed: int
    content: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """The model and settings of a score. fingerprint: their hash; model: as the configuration names it."""

    fingerprint: str
    model: str


@dataclass(frozen=True)
class ScorePoint:
    """A score at a step. spread: the standard deviation over seeds, None with one seed. compared: equal where means are
    over the same samples. is_whole: of all samples of the step. groups: mean and spread of each group."""

    step: int
    value: float
    spread: float | None = None
    compared: str = ""
    is_whole: bool = True
    groups: dict[str, tuple[float, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreCurve:
    """A score by step, of one model. seeds: the most that a group has. higher is better."""

    name: str
    measured: Measured | None
    points: tuple[ScorePoint, ...]
    seeds: int = 1

    @property
    def comparable(self) -> list[ScorePoint]:
        """The points over the same samples as the last whole one."""
        last = next((point for point in reversed(self.points) if point.is_whole), self.points[-1])
        return [point for point in self.points if point.compared == last.compared]

    def best(self, steps: Collection[int] | None = None) -> ScorePoint | None:
        """The highest that can be compared, of equal ones the earliest. steps: consider no others."""
        points = [point for point in self.comparable if steps is None or point.step in steps]
        return max(points, key=lambda point: (point.value, -point.step), default=None)


def score_label(name: str) -> str:
    """A score's name as people read it: clip_score is "CLIP score"."""
    return " ".join({"clip": "CLIP"}.get(word, word) for word in name.split("_"))


def spread_of(values: Sequence[float]) -> float | None:
    """The standard deviation, of a sample of all seeds that there might be; None of fewer than two values."""
    return _rounded(stdev(values)) if len(values) > 1 else None


def summarize_scores(samples: Sequence[SampleScores], name: str) -> ScorePoint:
    """The mean of the groups' means, and by group. The spread is that of the means over all groups with each seed that
    every group has: how much the score depends on the noise."""
    groups: dict[str, dict[int, float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, {})[sample.seed] = sample.scores[name]
    of_groups = {group: (_rounded(fmean(by_seed.values())), spread_of([*by_seed.values()]))
                 for group, by_seed in groups.items()}  # fmt: skip
    common = set.intersection(*(set(by_seed) for by_seed in groups.values()))
    by_seed = [fmean(group[seed] for group in groups.values()) for seed in sorted(common)]
    mean = _rounded(fmean(value for value, _ in of_groups.values()))
    return ScorePoint(0, mean, spread_of(by_seed), groups=of_groups)


def _rounded(value: float) -> float:
    return round(value, DIGITS)


def append_step(
    folder: Path, step: int, samples: Sequence[SampleScores], measured: dict[str, Measured], missing: Sequence[str]
) -> dict[str, ScorePoint]:
    """Add a step's line, whole or not at all; returns its points. missing: names of samples that could not be read."""
    points = {name: summarize_scores(samples, name) for name in measured}
    line = {
        "step": step,
        "scores": {name: point.value for name, point in points.items()},
        "spread": {name: point.spread for name, point in points.items()},
        "prompts": {
            group: {name: {"mean": points[name].groups[group][0], "spread": points[name].groups[group][1]}
                    for name in points}
            for group in dict.fromkeys(sample.group for sample in samples)
        },
        "samples": [
            {"name": sample.name, "prompt": sample.group, "seed": sample.seed, "content": sample.content,
             "scores": {name: _rounded(sample.scores[name]) for name in measured}}
            for sample in samples
        ],
        "missing": sorted(missing),
        "measures": {
            name: {"fingerprint": measure.fingerprint, "model": measure.model} for name, measure in measured.items()
        },
    }  # fmt: skip
    path = folder / SCORES_FILE
    with explained(str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            cut_off = size and os.pread(descriptor, 1, size - 1) != b"\n"  # by a kill: it ends there
            data = (b"\n" if cut_off else b"") + json.dumps(line).encode() + b"\n"
            if file.write(data) != len(data):
                raise OSError("the line was not written whole")
    return points


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines that can be read, in the order in which they were written."""
    lines = parse_metrics(read_regular(folder / SCORES_FILE))
    return [line for line in lines if isinstance(line.get("scores"), dict)]


def read_samples(folder: Path, measured: dict[str, Measured]) -> dict[int, dict[str, dict[tuple[str, str], float]]]:
    """The samples of the last line of each step and measure with this fingerprint: (name, content) -> score."""
    scores: dict[int, dict[str, dict[tuple[str, str], float]]] = {}
    for line in read_lines(folder):
        for name, measure in measured.items():
            if _measured(line, name) == measure:
                rows = [row for row in line.get("samples", ()) if name in row["scores"]]
                values = {(row["name"], row["content"]): row["scores"][name] for row in rows}
                scores.setdefault(line["step"], {})[name] = values
    return scores


def read_curves(folder: Path) -> list[ScoreCurve]:
    """The curves of a run's scores, by name; of each those of the model and settings that were used last."""
    lines = read_lines(folder)
    names = sorted({name for line in lines for name in line["scores"]})
    curves = []
    for name in names:
        named = [line for line in lines if _is_number(line["scores"].get(name))]
        if not named:
            continue
        measured = _measured(named[-1], name)
        points = {line["step"]: _point(line, name) for line in named if _measured(line, name) == measured}
        seeds = max((_count_seeds(line) for line in named), default=1)
        curves.append(ScoreCurve(name, measured, tuple(points[step] for step in sorted(points)), seeds))
    return curves


def _point(line: dict[str, Any], name: str) -> ScorePoint:
    """Parse a line that another program may have written, with its step and scores alone."""
    samples = _rows(line)
    compared = hash_json(sorted([row.get("prompt"), row.get("seed")] for row in samples)) if samples else ""
    spread = line["spread"].get(name) if isinstance(line.get("spread"), dict) else None
    groups = {}
    for group, values in (line["prompts"] if isinstance(line.get("prompts"), dict) else {}).items():
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, dict) and _is_number(value.get("mean")):
            groups[group] = float(value["mean"]), value["spread"] if _is_number(value.get("spread")) else None
    spread = float(spread) if _is_number(spread) else None  # type: ignore[arg-type]
    return ScorePoint(line["step"], float(line["scores"][name]), spread, compared, not line.get("missing"), groups)


def _rows(line: dict[str, Any]) -> list[dict[str, Any]]:
    rows = line.get("samples")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _count_seeds(line: dict[str, Any]) -> int:
    counts: Counter[str] = Counter(str(row.get("prompt")) for row in _rows(line))
    return max(counts.values(), default=1)


def _measured(line: dict[str, Any], name: str) -> Measured | None:
    about = line["measures"].get(name) if isinstance(line.get("measures"), dict) else None
    if not isinstance(about, dict):
        return None
    return Measured(str(about.get("fingerprint")), str(about.get("model")))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
