"""<output>/<run>/scores.jsonl: the scores that `latentpress score` measured for the validation samples of each step.

A line for each step, added when all its samples are scored; a later line of a step replaces the scores that it has.
docs/watching.md describes it. Scores of different models or settings have different fingerprints and are never
compared.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict, FiniteFloat

from cache.runs.training_run import parse_metrics, read_regular
from cache.store.files import explained
from schemas.identity import hash_json

SCORES_FILE = "scores.jsonl"
DIGITS = 6


@dataclass(frozen=True)
class SampleScores:
    """A validation sample at a step. prompt: name of the prompt, which samples with different seeds share. content:
    hash of the picture or clip and of the prompt. scores: measure name -> score."""

    name: str
    prompt: str
    seed: int
    content: str
    scores: dict[str, FiniteFloat]


@dataclass(frozen=True)
class Measured:
    """The model and settings of a score. fingerprint: hash of both. model: the model's name in the configuration."""

    fingerprint: str
    model: str


@dataclass(frozen=True)
class GroupScore:
    """The score of a prompt over its seeds. spread: None with one seed."""

    mean: FiniteFloat
    spread: FiniteFloat | None = None


class ScoreLine(BaseModel):
    """A line of scores.jsonl, which another program may have written, with only step and scores. scores, spread:
    measure name -> value. measures: measure name -> model and settings. prompts: prompt -> measure name -> score.
    missing: names of samples that could not be read."""

    model_config = ConfigDict(frozen=True)

    step: int
    scores: dict[str, FiniteFloat]
    spread: dict[str, FiniteFloat | None] = {}
    prompts: dict[str, dict[str, GroupScore]] = {}
    samples: tuple[SampleScores, ...] = ()
    missing: tuple[str, ...] = ()
    measures: dict[str, Measured] = {}

    def point(self, name: str) -> "ScorePoint":
        groups = {prompt: scores[name] for prompt, scores in self.prompts.items() if name in scores}
        compared = sorted([sample.prompt, sample.seed] for sample in self.samples)
        samples = hash_json(compared) if compared else ""
        return ScorePoint(self.step, self.scores[name], self.spread.get(name), samples, not self.missing, groups)


@dataclass(frozen=True)
class ScorePoint:
    """A score at a step. spread: the standard deviation over seeds, None with one seed. compared: value that is
    equal for means over the same samples. is_whole: whether all samples of the step have a score. groups: prompt ->
    score of the prompt."""

    step: int
    value: float
    spread: float | None = None
    compared: str = ""
    is_whole: bool = True
    groups: Mapping[str, "GroupScore"] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreCurve:
    """A score by step, for one model; a higher score is better. seeds: maximum number of seeds of a prompt."""

    name: str
    measured: Measured | None
    points: tuple[ScorePoint, ...]
    seeds: int = 1

    @property
    def comparable(self) -> list[ScorePoint]:
        """The points over the same samples as the last point with is_whole."""
        last = next((point for point in reversed(self.points) if point.is_whole), self.points[-1])
        return [point for point in self.points if point.compared == last.compared]

    def best(self, steps: Collection[int] | None = None) -> ScorePoint | None:
        """Return the highest comparable point, the earliest of equal points. steps: the steps to consider, by default
        all steps."""
        points = [point for point in self.comparable if steps is None or point.step in steps]
        return max(points, key=lambda point: (point.value, -point.step), default=None)


def score_label(name: str) -> str:
    """Return a score's name for display, such as "CLIP score" for clip_score."""
    return " ".join({"clip": "CLIP"}.get(word, word) for word in name.split("_"))


def spread_of(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (the seeds are a sample of all possible seeds); None for fewer than two
    values."""
    return round(stdev(values), DIGITS) if len(values) > 1 else None


def summarize_scores(
    step: int, samples: Sequence[SampleScores], measures: dict[str, Measured], missing: Sequence[str] = ()
) -> ScoreLine:
    """Return the line of a step. A score is the mean of the prompts' means. Its spread is the standard deviation of
    the means over all prompts with the same seed, for seeds that every prompt has. It shows how much the score depends
    on the noise."""
    by_seed: dict[str, dict[int, SampleScores]] = {}
    for sample in samples:
        by_seed.setdefault(sample.prompt, {})[sample.seed] = sample
    common = sorted(set.intersection(*(set(seeds) for seeds in by_seed.values())))
    prompts = dict[str, dict[str, GroupScore]]()
    scores, spread = dict[str, float](), dict[str, float | None]()
    for name in measures:
        for prompt, seeds in by_seed.items():
            values = [sample.scores[name] for sample in seeds.values()]
            prompts.setdefault(prompt, {})[name] = GroupScore(round(fmean(values), DIGITS), spread_of(values))
        scores[name] = round(fmean(prompts[prompt][name].mean for prompt in by_seed), DIGITS)
        spread[name] = spread_of([fmean(seeds[seed].scores[name] for seeds in by_seed.values()) for seed in common])
    return ScoreLine(
        step=step,
        scores=scores,
        spread=spread,
        prompts=prompts,
        samples=tuple(
            replace(sample, scores={name: round(sample.scores[name], DIGITS) for name in measures})
            for sample in samples
        ),
        missing=tuple(sorted(missing)),
        measures=measures,
    )


def append_line(folder: Path, line: ScoreLine) -> None:
    """Add a complete line to scores.jsonl, or raise an error."""
    path = folder / SCORES_FILE
    with explained(str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            cut_off = size and os.pread(descriptor, 1, size - 1) != b"\n"  # the last line, by a kill
            data = (b"\n" if cut_off else b"") + json.dumps(line.model_dump()).encode() + b"\n"
            if file.write(data) != len(data):
                raise OSError("only a part of the line was written")


def read_lines(folder: Path) -> list[ScoreLine]:
    """Return the readable lines in the order in which they were written."""
    lines = list[ScoreLine]()
    for values in parse_metrics(read_regular(folder / SCORES_FILE)):
        with suppress(ValueError):
            lines.append(ScoreLine.model_validate(values))
    return lines


def read_curves(folder: Path) -> list[ScoreCurve]:
    """Return the curves of a run's scores, by name. Each has only the points of the last used model and settings."""
    lines, curves = read_lines(folder), []
    for name in sorted({name for line in lines for name in line.scores}):
        named = [line for line in lines if name in line.scores]
        measured = named[-1].measures.get(name)
        points = {line.step: line.point(name) for line in named if line.measures.get(name) == measured}
        seeds = [count for line in named for count in Counter(sample.prompt for sample in line.samples).values()]
        curves.append(ScoreCurve(name, measured, tuple(points[step] for step in sorted(points)), max(seeds, default=1)))
    return curves
