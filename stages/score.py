"""score: how well decoded validation samples match their prompts at each step, and the best step by each measure.

Reads <output>/<run>/samples/<step>/ and the trainer's metadata of each validation latent. For each step with new or
changed samples, adds a line to <output>/<run>/scores.jsonl and the scores to the trackers. With --watch it scores
during training, each step after its validation has ended and all of its samples are decoded. The model is set by
`validation.scores`; if it is not set, nothing is loaded.
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
    """A validation sample at a step. group: name shared by the samples that differ only in the seed. picture: file."""

    name: str
    group: str
    seed: int
    prompt: str
    picture: Path

    @cached_property
    def content(self) -> str:
        """Hash of the file and the prompt, which determine the score; "" if the file cannot be read."""
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
                description = read_description(file.latent)
                group, seed = str(description.get("group", file.name)), int(description.get("seed", 0))
                samples.append(Sample(file.name, group, seed, str(description.get("prompt", "")), file.picture))
        if samples or waiting:
            steps.append(StepSamples(step, tuple(samples), tuple(waiting)))
    return steps


def frame_numbers(count: int, max_frames: int) -> list[int]:
    """Indices of at most `max_frames` of `count` frames: the middle frames of equal parts."""
    parts = min(count, max_frames)
    return [(2 * part + 1) * count // (2 * parts) for part in range(parts)]


def read_sample(path: Path, max_frames: int) -> np.ndarray:
    """Returns frames_FHWC uint8: the picture, or at most `max_frames` frames of a clip. Raises MediaError."""
    from stages.media.image import load_image
    from stages.media.video import probe_video, read_frames

    if path.suffix == ".png":
        return np.asarray(load_image(path))[None]
    clip = probe_video(path)
    # The middle of a frame's time; the clips that decode writes have a constant frame rate.
    times = [(number + 0.5) / clip.rate for number in frame_numbers(clip.frames, max_frames)]
    if not times:
        raise MediaError("no-frames", path, "has no frames", "delete the file, and run `latentpress decode`")
    return np.stack(list(read_frames(path, times)))


REMEDY = "delete the file, and run `latentpress decode`, then `latentpress score`"  # for an unreadable picture


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Score each step as soon as its samples are decoded, until training ends.")
    ] = False,
) -> Report:
    folder = config.run_folder
    check_folder(folder)
    report = Report(program="score", dry_run=options.dry_run, what="samples")
    if not config.validation.scores.any:
        console.log("validation.scores.clip is not set: nothing to score")
        return report
    with ExitStack() as stack:
        scorer = _Scorer(config, options, console, stack)
        if options.dry_run:
            report.remaining = sum(len(step.samples) for step in scorer.find_unscored(find_samples(folder)))
            return report
        if watch:
            trainer = Watch([folder])
            for last in trainer:
                lines = [] if last else read_last_metrics(folder / METRICS_FILE)
                validated_steps = [step for step in find_samples(folder) if lines and step.step < lines[-1]["step"]]
                if unscored_steps := scorer.find_unscored(validated_steps):
                    trainer.hide_wait()
                    scorer.score(unscored_steps, report)
            if trainer.is_stopped:  # `latentpress run` scores the remaining steps
                return report
        steps = find_samples(folder)
        scorer.score(scorer.find_unscored(steps), report)
    report.skipped = max(0, sum(len(step.samples) for step in steps) - report.done - len(report.failed))
    if waiting := sum(len(step.waiting) for step in steps):
        report.remaining = waiting
        report.next_steps = ["latentpress decode", "latentpress score"]
    report.details = {"scores": str(folder / SCORES_FILE), "best_steps": best_steps(folder)}
    return report


class _Scorer:
    """Scores steps by CLIP, whose model is loaded for the first sample. stack: contexts that are closed at the end."""

    def __init__(self, config: Config, options: Options, console: Console, stack: ExitStack) -> None:
        """Raises WeightsError if the model is missing."""
        self._folder, self._stack = config.run_folder, stack
        self._config, self._options, self._console = config, options, console
        self._measure = ClipScore(config.validation.scores, Store(config.root))
        self._is_loaded = False
        self._trackers: Trackers | None = None
        self._tried: dict[int, dict[str, str]] = {}  # step -> contents of its samples, scored or unreadable
        self._truncated = set[str]()  # prompts that are in the report as too long

    def find_unscored(self, steps: Iterable[StepSamples]) -> list[StepSamples]:
        """The decoded steps whose samples have not been scored, or have changed since."""
        lines = [line for line in read_lines(self._folder) if line.measures.get(NAME) == self._measure.measured]
        scored_contents = {line.step: {sample.name: sample.content for sample in line.samples} for line in lines}
        contents = scored_contents | self._tried
        return [step for step in steps if not step.waiting and contents.get(step.step) != step.contents]

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
        sample_scores, damaged_names = list[SampleScores](), list[str]()
        report.failed = [row for row in report.failed if row["step"] != step.step]
        self._tried[step.step] = step.contents
        for sample in step.samples:
            try:
                scores = {NAME: self._score_sample(sample, report)}
            except MediaError as error:
                row = {"item": sample.name, "path": str(sample.picture), "step": step.step}
                report.failed.append(row | {"reason": error.reason, "message": f"{error.problem}; {REMEDY}"})
                damaged_names.append(sample.name)
            else:
                sample_scores.append(SampleScores(sample.name, sample.group, sample.seed, sample.content, scores))
            progress.advance(1)
        if sample_scores:
            line = summarize_scores(step.step, sample_scores, {NAME: self._measure.measured}, damaged_names)
            if line not in read_lines(self._folder):  # a step with an unreadable picture is scored again by each run
                append_line(self._folder, line)
                report.done += len(sample_scores)
                self._add_to_trackers(line)
                spread = "" if line.spread[NAME] is None else f" ± {line.spread[NAME]:.3g}"
                self._console.log(f"step {step.step}: {score_label(NAME)} {line.scores[NAME]:.4g}{spread}")

    def _score_sample(self, sample: Sample, report: Report) -> float:
        """Raises MediaError if the file cannot be read."""
        try:
            frames_FHWC = read_sample(sample.picture, self._config.validation.scores.frames)
        except OSError as error:
            raise unreadable_error(sample.picture, error) from error
        if sample.prompt not in self._truncated and (cut := self._measure.find_cut(sample.prompt)):
            self._truncated.add(sample.prompt)
            message = f"the prompt has {cut[0]} tokens; CLIP reads the first {cut[1]}"
            report.truncated.append({"item": sample.group, "reason": "prompt-cut", "message": message})
        return self._measure.score(frames_FHWC, sample.prompt)

    def _add_to_trackers(self, line: ScoreLine) -> None:
        """Add the score, its spread, and the score of each prompt."""
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
    "Measure how well decoded validation samples match their prompts, and report the best step.",
    run,
    examples=["--watch", "--device cuda"],
)

if __name__ == "__main__":
    app()
