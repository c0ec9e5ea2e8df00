"""A run's validations: the latents of the trainer, and the pictures and clips that were decoded from them.

<run>/validation/step-000500/<name>.safetensors
<run>/samples/step-000500/<name>.png|mp4

Also the best steps, by eval loss and by each score, and their checkpoints.

A file that is made from another file, such as the picture of a latent, contains a mark that identifies its source.
Modification times are not compared, because a copy may lack them, and a killed program can leave a file that is newer
than its inputs but does not show them. The mark is text: in a chunk of a PNG, the comment of an MP4, or at the end of
HTML."""

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cache.models.weights import hash_file
from cache.runs.scores import SCORES_FILE, read_curves, score_label
from cache.runs.training_run import (
    CHECKPOINTS,
    FAILURE_NOTE,
    METRICS_FILE,
    STAGES_FILE,
    checkpoint_step,
    is_running,
    list_checkpoints,
    read_description,
    read_metrics,
    step_of,
)
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import hash_json
from schemas.regular_files import open_regular

SUFFIXES = (".png", ".mp4")
MARK_BYTES = 4096  # bytes at the beginning and at the end of a file that are searched for the mark
_MARK = re.compile(rb"latentpress made (this|this preview) from ([0-9a-f]{32})")


class Mark(NamedTuple):
    """The mark of a file. source: hash of the file's source, "" if the file does not have a mark. is_preview: whether a
    tiny autoencoder made the file."""

    source: str = ""
    is_preview: bool = False

    def __str__(self) -> str:
        return f"latentpress made this{' preview' if self.is_preview else ''} from {self.source}"


def read_mark(path: Path) -> Mark:
    """Return the last mark of a file; its source is "" if the file or the mark does not exist."""
    marks = list[tuple[bytes, bytes]]()
    with suppress(OSError), open_regular(path) as file:
        data = file.read(MARK_BYTES)
        file.seek(max(0, os.fstat(file.fileno()).st_size - MARK_BYTES))
        marks = _MARK.findall(data + b"\n" + file.read(MARK_BYTES))
    return Mark(marks[-1][1].decode(), marks[-1][0] != b"this") if marks else Mark()


@dataclass(frozen=True)
class ValidationFile:
    """A validation sample at a step, with at least one existing file. picture: a picture or a clip."""

    step: int
    name: str
    latent: Path | None
    picture: Path | None


def list_validations(folder: Path) -> list[ValidationFile]:
    """List the validations of the run in `folder`, by step and name, without pictures that were not made from the
    current latents."""
    latents = _list_files(folder / "validation", (".safetensors",))
    pictures = _list_files(folder / "samples", SUFFIXES)
    current = {key: path for key, path in pictures.items() if key not in latents or is_current(path, latents[key])}
    return [ValidationFile(*key, latents.get(key), current.get(key)) for key in sorted(latents | current)]


def latent_path(folder: Path, step: int, name: str) -> Path:
    """Return the path of a sample's latent for the run in `folder`."""
    return folder / "validation" / f"step-{step:06d}" / f"{name}.safetensors"


def _list_files(folder: Path, suffixes: tuple[str, ...]) -> dict[tuple[int, str], Path]:
    """(step, name) -> file"""
    return {
        (step, path.stem): path
        for path in folder.glob("step-*/*")
        if path.suffix in suffixes and not path.name.startswith(".") and (step := step_of(path.parent)) is not None
    }


def is_current(picture: Path, latent: Path) -> bool:
    """Whether the picture exists and was made from this latent, not from a latent of an earlier run with the same
    name."""
    try:
        return read_mark(picture).source == hash_file(latent, None)
    except (OSError, LatentpressError):
        return False


def find_picture(latent: Path) -> Path | None:
    """Return the current picture or clip of a latent; None if it does not exist."""
    folder = latent.parents[2] / "samples" / latent.parent.name
    return next(
        (path for path in (folder / f"{latent.stem}{suffix}" for suffix in SUFFIXES) if is_current(path, latent)), None
    )


def hash_results(folders: Iterable[Path]) -> str:
    """Return a hash of everything that a page shows for the runs in `folders`: numbers, settings, validations and
    training samples."""
    return hash_json([_list_results(folder) for folder in folders])


def _list_results(folder: Path) -> list[Any]:
    names = ("config.yaml", METRICS_FILE, SCORES_FILE, STAGES_FILE, FAILURE_NOTE)
    contents = dict[str, str]()
    for path in (*(folder / name for name in names), *folder.glob("samples/training/*/sample.json")):
        with suppress(FileNotFoundError):
            contents[path.relative_to(folder).as_posix()] = hash_file(path, None)
    samples = [
        (file.step, file.name, file.latent is not None, file.picture and read_mark(file.picture))
        for file in list_validations(folder)
    ]
    return [sorted(contents.items()), samples, is_running(folder)]


def describe_sample(config: Config, latent: Path) -> dict[str, Any]:
    """Return a validation sample's prompt, negative prompt and seed from the configuration, and the trainer's
    description of its latent, such as bucket, steps and guidance. The trainer's description takes precedence."""
    samples = {sample.name: sample for sample in config.validation_samples()}
    prompts = {prompt.name: prompt for prompt in config.validation.prompts}
    values = dict[str, Any]()
    if (sample := samples.get(latent.stem)) is not None and (prompt := prompts.get(sample.prompt)) is not None:
        values = {"prompt": prompt.prompt, "negative_prompt": prompt.negative_prompt, "seed": sample.seed}
    return values | read_description(latent)


NOTHING_HELD_OUT = (
    "no samples are held out, so this loss measures the fit to training samples and not to new samples; set a "
    "dataset's eval_fraction: 0.05 (more for a small dataset), or its eval: true"
)


class Evaluation(NamedTuple):
    step: int
    eval_loss: float


def best_evaluation(lines: Iterable[Mapping[str, Any]], steps: Collection[int] | None = None) -> Evaluation | None:
    """Return the lowest eval loss in the lines of a metrics.jsonl, the earliest of equal losses; None if the lines have
    no eval loss.

    Only losses on the same samples, sigmas and noise as the last eval loss are compared (`eval_id`). steps: the steps
    to consider, by default all steps.
    """
    evaluated = [
        line for line in lines if isinstance(line.get("eval_loss"), float) and math.isfinite(line["eval_loss"])
    ]
    candidates = [
        Evaluation(line["step"], line["eval_loss"])
        for line in evaluated
        if line.get("eval_id") == evaluated[-1].get("eval_id") and (steps is None or line["step"] in steps)
    ]
    return min(candidates, key=lambda candidate: (candidate.eval_loss, candidate.step), default=None)


def best_checkpoint(folder: Path) -> Evaluation | None:
    """Return the step with the lowest eval loss among the steps with a checkpoint."""
    steps = [checkpoint_step(path) for path in list_checkpoints(folder / CHECKPOINTS)]
    return best_evaluation(read_metrics(folder / METRICS_FILE), steps)


def measured_on(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the data on which the last eval loss was measured: "held-out samples" or "training samples"."""
    on = [line.get("eval_on") for line in lines if "eval_loss" in line]
    return "training samples" if on[-1:] == ["training samples"] else "held-out samples"


def loss_name(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of the eval loss for pages and tables."""
    return "eval loss" if measured_on(lines) == "held-out samples" else "loss on training samples"


def best_steps(folder: Path) -> list[dict[str, Any]]:
    """Return rows of a table: the best step by the eval loss (the lowest; its name mentions training samples if none
    are held out) and by each score (the highest). If the best step does not have a checkpoint, another row has the best
    step with a checkpoint. checkpoint: the checkpoint's path, "" if it does not exist."""
    paths = {checkpoint_step(path): str(path) for path in list_checkpoints(folder / CHECKPOINTS)}
    lines = read_metrics(folder / METRICS_FILE)
    rows, name = [], loss_name(lines)
    name = name if name == "eval loss" else f"lowest {name}"
    for steps in (None, paths):
        if (best := best_evaluation(lines, steps)) is not None:
            rows.append(_best_row(name, best.step, best.eval_loss, None, paths))
    for curve in read_curves(folder):
        name = score_label(curve.name)
        for steps in (None, paths):
            if (point := curve.best(steps)) is not None:
                rows.append(_best_row(name, point.step, point.value, point.spread, paths))
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def _best_row(measure: str, step: int, value: float, spread: float | None, paths: Mapping[int, str]) -> dict[str, Any]:
    cell = "" if spread is None else spread
    return {"measure": measure, "step": step, "value": value, "spread": cell, "checkpoint": paths.get(step, "")}
