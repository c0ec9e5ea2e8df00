"""score: how well decoded validation samples fit their prompts, by step, and which step is the best by each measure.

Reads <output>/<run>/samples/<step>/ and what the trainer wrote about each validation latent; adds a line to
<output>/<run>/scores.jsonl for each step with new or changed samples, and its numbers to the trackers. With --watch it
does so beside training, a step at a time once its validation is over and all of it is decoded. The models are those of
`validation.scores`; without one nothing is loaded.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cache.models.weights import hash_file
from cache.runs.derived import read_mark
from cache.runs.scores import SCORES_FILE, SampleScores, ScorePoint, append_step, read_samples, score_label
from cache.runs.training_run import METRICS_FILE, read_description, read_last_metrics
from cache.runs.validations import best_steps, find_picture, list_validations
from cache.store.files import check_folder
from cache.store.store import Store
from schemas.cli.console import Console, Options, Progress, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import garbage_collection_paused
from schemas.config.pipeline import Config
from schemas.identity import hash_json
from stages.encoding.stage import refuse_partition
from stages.follow.clip_score import ClipScore
from stages.follow.trackers import Trackers, open_trackers
from stages.follow.watchers import Watch
from stages.media.files import MediaError, unreadable_error


@dataclass(frozen=True)
class Sample:
    """A validation sample at a step. group: its prompt's name, and what varies but the seed. picture: its file."""

    name: str
    group: str
    seed: int
    prompt: str
    picture: Path

    def content(self) -> str:
        """Hash of what a score is of: the file and the prompt. "" where the file can't be read."""
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


def find_samples(folder: Path) -> list[StepSamples]:
    """Find the samples of each step of the run in `folder`, by step. A preview is not scored."""
    steps = []
    validations = [file for file in list_validations(folder) if file.latent is not None]
    for step, files in groupby(validations, key=lambda file: file.step):
        samples, waiting = [], []
        for latent in [file.latent for file in files if file.latent is not None]:
            picture, about = find_picture(latent), read_description(latent)
            if picture is None or read_mark(picture).is_preview:
                waiting.append(latent.stem)
            else:
                group, seed = about.get("group", latent.stem), about.get("seed", 0)
                samples.append(Sample(latent.stem, str(group), int(seed), str(about.get("prompt", "")), picture))
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
    refuse_partition(options, "score")
    folder = config.run_folder
    check_folder(folder)
    report = Report(program="score", dry_run=options.dry_run, what="samples")
    if not config.validation.scores.any:
        console.log("validation.scores names no model, so there is nothing to score with")
        return report
    scorer = _Scorer(config, options, console)
    if options.dry_run:
        report.remaining = sum(len(work.missing) for work in scorer.find_work(find_samples(folder)))
        return report
    with scorer:
        if watch:
            seen = _Watched(folder, Watch([folder]))
            for steps in seen:
                scorer.score(steps, report)
            if seen.told:  # `latentpress run` scores the rest
                return report
        steps = find_samples(folder)
        scorer.score(steps, report)
    report.skipped = max(0, sum(len(step.samples) for step in steps) - report.done - len(report.failed))
    if waiting := sum(len(step.waiting) for step in steps):
        report.remaining = waiting
        report.next_steps = ["latentpress decode", "latentpress score"]
    report.details = {"scores": str(folder / SCORES_FILE), "best_steps": best_steps(folder)}
    return report


@dataclass(frozen=True)
class _Work:
    """The scores to compute of a step. missing: (sample's name, measure's name) of the scores that are not known."""

    step: StepSamples
    contents: dict[str, str]
    known: dict[str, dict[tuple[str, str], float]]
    missing: list[tuple[str, str]]

    def score_of(self, name: str, measure: str) -> float | None:
        return self.known.get(measure, {}).get((name, self.contents[name]))


class _Scorer:
    """Scores steps with the measures, whose models are loaded when the first sample needs them."""

    def __init__(self, config: Config, options: Options, console: Console) -> None:
        """Raises WeightsError if a model is missing."""
        self._folder = config.run_folder
        self._config, self._options, self._console = config, options, console
        self._measures = [ClipScore(config.validation.scores, Store(config.root))]
        self._measured = {measure.name: measure.measured for measure in self._measures}
        self._is_loaded = False
        self._stack = ExitStack()
        self._trackers: Trackers | None = None
        self._cut: set[str] = set()  # prompts of which it was said

    def __enter__(self) -> "_Scorer":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def find_work(self, steps: Iterable[StepSamples]) -> Iterator[_Work]:
        """Find the work of the steps that are decoded and have samples that are new, changed or gone since they were
        scored."""
        known = read_samples(self._folder, self._measured)
        for step in steps:
            if step.waiting:
                continue
            known_scores = known.get(step.step, {})
            contents = {sample.name: sample.content() for sample in step.samples}
            missing = [
                (name, measure)
                for name, content in contents.items()
                for measure in self._measured
                if (name, content) not in known_scores.get(measure, {})
            ]
            gone = any(scores.keys() - set(contents.items()) for scores in known_scores.values())
            if missing or gone:
                yield _Work(step, contents, known_scores, missing)

    def score(self, steps: Iterable[StepSamples], report: Report) -> None:
        work = list(self.find_work(steps))
        if not work:
            return
        if any(step_work.missing for step_work in work):
            self._load()
        total = sum(len({name for name, _ in step_work.missing}) for step_work in work)
        with self._console.progress(total, "score", "samples") as progress:
            for step_work in work:
                self._score_step(step_work, report, progress)

    def _load(self) -> None:
        if self._is_loaded:
            return
        with garbage_collection_paused():
            from stages.encoding import model_loading

            model_loading.disable_progress_bars()
            device = model_loading.select_device(self._options.resources(self._config, "score"))
            for measure in self._measures:
                self._console.log(f"loading {measure.measured.model} for the {score_label(measure.name)}")
                measure.load(device)
        self._is_loaded = True

    def _score_step(self, work: _Work, report: Report, progress: Progress) -> None:
        scored, damaged = [], []
        report.failed = [row for row in report.failed if row["step"] != work.step.step]
        unknown = {name for name, _ in work.missing}
        for sample in work.step.samples:
            try:
                scores = self._score_sample(sample, work, report)
            except MediaError as error:
                row = {"item": sample.name, "path": str(sample.picture), "step": work.step.step}
                report.failed.append(row | {"reason": error.reason, "message": f"{error.problem}; {REMEDY}"})
                damaged.append(sample.name)
            else:
                scored.append(SampleScores(sample.name, sample.group, sample.seed, work.contents[sample.name], scores))
                report.done += sample.name in unknown
            if sample.name in unknown:
                progress.advance(1)
        before = {name for scores in work.known.values() for name in scores}
        if scored and (len(work.known) < len(self._measured) or before != {(s.name, s.content) for s in scored}):
            points = append_step(self._folder, work.step.step, scored, self._measured, damaged)
            self._add_to_trackers(work.step.step, points)
            self._console.log(f"step {work.step.step}: {_format(points)}")

    def _score_sample(self, sample: Sample, work: _Work, report: Report) -> dict[str, float]:
        """MediaError where its file can't be read."""
        known = {measure: work.score_of(sample.name, measure) for measure in self._measured}
        scores = {measure: score for measure, score in known.items() if score is not None}
        if len(scores) == len(known):
            return scores
        try:
            frames_FHWC = read_sample(sample.picture, self._config.validation.scores.frames)
        except OSError as error:
            raise unreadable_error(sample.picture, error) from error
        for measure in self._measures:
            if measure.name not in scores:
                scores[measure.name] = measure.score(frames_FHWC, sample.prompt)
                self._note_cut(measure, sample, report)
        return scores

    def _note_cut(self, measure: ClipScore, sample: Sample, report: Report) -> None:
        if sample.prompt not in self._cut and (cut := measure.find_cut(sample.prompt)):
            self._cut.add(sample.prompt)
            message = f"the prompt has {cut[0]} tokens, of which CLIP reads {cut[1]}"
            report.truncated.append({"item": sample.group, "reason": "prompt-cut", "message": message})

    def _add_to_trackers(self, step: int, points: dict[str, ScorePoint]) -> None:
        names = self._config.train.trackers
        if not names:
            return
        if self._trackers is None:
            self._trackers = self._stack.enter_context(open_trackers(self._folder, names, self._console, "scores"))
        self._trackers.add_scores(step, dict(_numbers(points)))


def _numbers(points: dict[str, ScorePoint]) -> Iterator[tuple[str, float]]:
    """Return the numbers of a tracker: each score, its spread, and by prompt."""
    for name, point in points.items():
        yield name, point.value
        if point.spread is not None:
            yield f"{name}_spread", point.spread
        if len(point.groups) > 1:
            for group, (mean, _) in point.groups.items():
                yield f"{name}/{group}", mean


def _format(points: dict[str, ScorePoint]) -> str:
    spread = {name: "" if point.spread is None else f" ± {point.spread:.3g}" for name, point in points.items()}
    return ", ".join(f"{score_label(name)} {point.value:.4g}{spread[name]}" for name, point in points.items())


class _Watched:
    """Steps whose validation is over and which are decoded, as they come, while a trainer is at work.

    Files are read again only where one of their step is new or changed. told: whether the program was told to finish.
    """

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder, self._watch = folder, watch
        self._seen: dict[int, list[Any]] = {}

    @property
    def told(self) -> bool:
        return self._watch.told

    def __iter__(self) -> Iterator[list[StepSamples]]:
        for last in self._watch:
            if last:
                return
            lines = read_last_metrics(self._folder / METRICS_FILE)
            newest = lines[-1]["step"] if lines else 0
            decoded = [step for step in find_samples(self._folder) if step.step < newest and not step.waiting]
            if new := [step for step in decoded if self._is_new(step)]:
                self._watch.hide_wait()
                yield new

    def _is_new(self, step: StepSamples) -> bool:
        stamps = [(sample.name, sample.content()) for sample in step.samples]
        is_new = self._seen.get(step.step) != stamps
        self._seen[step.step] = stamps
        return is_new


app = make_app(
    "score",
    "Measure how decoded validation samples fit their prompts, by step; which step is the best.",
    run,
    examples=["--watch", "--device cuda"],
)

if __name__ == "__main__":
    app()
