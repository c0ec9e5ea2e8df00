"""score: how well decoded validation samples fit their prompts, by step, and which step is the best by each measure.

Reads <output>/<run>/samples/<step>/ and what the trainer wrote about each validation latent; adds a line to
<output>/<run>/scores.jsonl for each step with new or changed samples, and its numbers to the trackers. With --watch it
does so beside training, a step at a time once its validation is over and all of it is decoded. The models are those of
`validation.scores`; without one nothing is loaded.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from cache.models.weights import hash_file
from cache.runs.scores import (
    SCORES_FILE,
    SampleScores,
    ScoreLine,
    append_line,
    read_lines,
    score_label,
    summarize_scores,
)
from cache.runs.training_run import METRICS_FILE, read_description, read_last_metrics
from cache.runs.validations import best_steps, list_validations, read_mark
from cache.store.files import check_folder
from cache.store.store import Store
from schemas.cli.console import Console, Options, Progress, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import garbage_collection_paused
from schemas.config.pipeline import Config
from schemas.identity import hash_json
from stages.follow.clip_score import ClipScore
from stages.follow.trackers import Trackers, open_trackers
from stages.follow.watchers import Watch
from stages.media.files import MediaError, unreadable_error

NAME = ClipScore.name


@dataclass(frozen=True)
class Sample:
    """A validation sample at a step. group: its prompt's name, and what varies but the seed. picture: its file."""

    name: str
    group: str
    seed: int
    prompt: str
    picture: Path

    @cached_property
    def content(self) -> str:
        """Hash of what a score is of: the file and the prompt. "" if the file can't be read."""
        try:
            return hash_json([hash_file(self.picture, None), self.prompt])
        except OSError:
            return ""


@dataclass(frozen=True)
class StepSamples:
    """waiting: names of the samples that are not decoded yet."""

    step: int
    samples: tuple[Sample, ...]
    waiting: tuple[str, ...]

    @property
    def contents(self) -> dict[str, str]:
        return {sample.name: sample.content for sample in self.samples}


def find_samples(folder: Path) -> list[StepSamples]:
    """Find the samples of each step of the run in `folder`, by step. A preview is not scored."""
    steps = []
    for step, files in groupby(list_validations(folder), key=lambda file: file.step):
        samples, waiting = [], []
        for file in files:
            if file.latent is None:
                continue
            if file.picture is None or read_mark(file.picture).is_preview:
                waiting.append(file.name)
            else:
                about = read_description(file.latent)
                group, seed = str(about.get("group", file.name)), int(about.get("seed", 0))
                samples.append(Sample(file.name, group, seed, str(about.get("prompt", "")), file.picture))
        if samples or waiting:
            steps.append(StepSamples(step, tuple(samples), tuple(waiting)))
    return steps


def frame_numbers(count: int, most: int) -> list[int]:
    """At most `most` of `count` frames: the middle ones of equal parts."""
    number = min(count, most)
    return [(2 * part + 1) * count // (2 * number) for part in range(number)]


def read_sample(path: Path, most: int) -> np.ndarray:
    """frames_FHWC uint8 of a picture, or at most `most` of a clip. Raises MediaError."""
    from stages.media.image import load_image
    from stages.media.video import probe_video, read_frames

    if path.suffix == ".png":
        return np.asarray(load_image(path))[None]
    about = probe_video(path)
    # In the middle of a frame's time; the clips that decode writes have a constant rate.
    times = [(number + 0.5) / about.rate for number in frame_numbers(about.frames, most)]
    if not times:
        raise MediaError("no-frames", path, "has no frames", "delete it, and run `latentpress decode`")
    return np.stack(list(read_frames(path, times)))


REMEDY = "delete it, and run `latentpress decode`, then `latentpress score`"  # for a picture that can't be read


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Score each step when its samples are decoded, while it trains.")
    ] = False,
) -> Report:
    folder = config.run_folder
    check_folder(folder)
    report = Report(program="score", dry_run=options.dry_run, what="samples")
    if not config.validation.scores.any:
        console.log("validation.scores names no model, so there is nothing to score with")
        return report
    with ExitStack() as stack:
        scorer = _Scorer(config, options, console, stack)
        if options.dry_run:
            report.remaining = sum(len(step.samples) for step in scorer.find_due(find_samples(folder)))
            return report
        if watch:
            trainer = Watch([folder])
            for last in trainer:
                lines = [] if last else read_last_metrics(folder / METRICS_FILE)
                over = [step for step in find_samples(folder) if lines and step.step < lines[-1]["step"]]
                if due := scorer.find_due(over):
                    trainer.hide_wait()
                    scorer.score(due, report)
            if trainer.told:  # `latentpress run` scores the rest
                return report
        steps = find_samples(folder)
        scorer.score(scorer.find_due(steps), report)
    report.skipped = max(0, sum(len(step.samples) for step in steps) - report.done - len(report.failed))
    if waiting := sum(len(step.waiting) for step in steps):
        report.remaining = waiting
        report.next_steps = ["latentpress decode", "latentpress score"]
    report.details = {"scores": str(folder / SCORES_FILE), "best_steps": best_steps(folder)}
    return report


class _Scorer:
    """Scores steps by CLIP, whose model is loaded when the first sample needs it. stack: what is open until the end."""

    def __init__(self, config: Config, options: Options, console: Console, stack: ExitStack) -> None:
        """Raises WeightsError if the model is missing."""
        self._folder, self._stack = config.run_folder, stack
        self._config, self._options, self._console = config, options, console
        self._measure = ClipScore(config.validation.scores, Store(config.root))
        self._is_loaded = False
        self._trackers: Trackers | None = None
        self._tried: dict[int, dict[str, str]] = {}  # step -> what was scored, or could not be read
        self._cut = set[str]()  # prompts that are in the report as too long

    def find_due(self, steps: Iterable[StepSamples]) -> list[StepSamples]:
        """The steps that are decoded and have samples that are new, changed or gone since they were scored."""
        lines = [line for line in read_lines(self._folder) if line.measures.get(NAME) == self._measure.measured]
        scored = {line.step: {sample.name: sample.content for sample in line.samples} for line in lines}
        known = scored | self._tried
        return [step for step in steps if not step.waiting and known.get(step.step) != step.contents]

    def score(self, steps: Sequence[StepSamples], report: Report) -> None:
        if not steps:
            return
        if not self._is_loaded:
            with garbage_collection_paused():
                from stages.encoding import model_loading

                model_loading.disable_progress_bars()
                device = model_loading.select_device(self._options.resources(self._config, "score"))
                self._console.log(f"loading {self._measure.measured.model} for the {score_label(NAME)}")
                self._measure.load(device)
            self._is_loaded = True
        with self._console.progress(sum(len(step.samples) for step in steps), "score", "samples") as progress:
            for step in steps:
                self._score_step(step, report, progress)

    def _score_step(self, step: StepSamples, report: Report, progress: Progress) -> None:
        scored, damaged = list[SampleScores](), list[str]()
        report.failed = [row for row in report.failed if row["step"] != step.step]
        self._tried[step.step] = step.contents
        for sample in step.samples:
            try:
                scores = {NAME: self._score_sample(sample, report)}
            except MediaError as error:
                row = {"item": sample.name, "path": str(sample.picture), "step": step.step}
                report.failed.append(row | {"reason": error.reason, "message": f"{error.problem}; {REMEDY}"})
                damaged.append(sample.name)
            else:
                scored.append(SampleScores(sample.name, sample.group, sample.seed, sample.content, scores))
            progress.advance(1)
        if scored:
            line = summarize_scores(step.step, scored, {NAME: self._measure.measured}, damaged)
            if line not in read_lines(self._folder):  # as of a step with a picture that still can't be read
                append_line(self._folder, line)
                report.done += len(scored)
                self._add_to_trackers(line)
                spread = "" if line.spread[NAME] is None else f" ± {line.spread[NAME]:.3g}"
                self._console.log(f"step {step.step}: {score_label(NAME)} {line.scores[NAME]:.4g}{spread}")

    def _score_sample(self, sample: Sample, report: Report) -> float:
        """MediaError if its file can't be read."""
        try:
            frames_FHWC = read_sample(sample.picture, self._config.validation.scores.frames)
        except OSError as error:
            raise unreadable_error(sample.picture, error) from error
        if sample.prompt not in self._cut and (cut := self._measure.find_cut(sample.prompt)):
            self._cut.add(sample.prompt)
            message = f"the prompt has {cut[0]} tokens, of which CLIP reads {cut[1]}"
            report.truncated.append({"item": sample.group, "reason": "prompt-cut", "message": message})
        return self._measure.score(frames_FHWC, sample.prompt)

    def _add_to_trackers(self, line: ScoreLine) -> None:
        """The score, its spread, and the score by prompt."""
        names = self._config.train.trackers
        if not names:
            return
        if self._trackers is None:
            self._trackers = self._stack.enter_context(open_trackers(self._folder, names, self._console, "scores"))
        numbers, spread = dict(line.scores), line.spread[NAME]
        if spread is not None:
            numbers[f"{NAME}_spread"] = spread
        if len(line.prompts) > 1:
            numbers |= {f"{NAME}/{prompt}": scores[NAME].mean for prompt, scores in line.prompts.items()}
        self._trackers.add_scores(line.step, numbers)


app = make_app(
    "score",
    "Measure how decoded validation samples fit their prompts, by step; which step is the best.",
    run,
    examples=["--watch", "--device cuda"],
)

if __name__ == "__main__":
    app()
