"""The events of a run, found in its folder: started, validation, checkpoint, finished, failed."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cache.runs.scores import read_lines
from cache.runs.training_run import (
    CHECKPOINTS,
    METRICS_FILE,
    RunProgress,
    read_failure,
    read_last_metrics,
    read_progress,
    step_of,
)
from cache.runs.validations import find_picture
from schemas.config.pipeline import Config
from schemas.config.training import EventName

PICTURES_WAIT_S = 900.0  # for which a validation waits at most for its pictures to be decoded
SCORES_WAIT_S = 900.0  # and then for its scores, unless the next validation comes first
_PHASES = ("started", "finished", "failed")


class Event(BaseModel, frozen=True):
    """key: unique in the run. failure: of a failed run, the stage, the reason and the advice."""

    key: str
    event: EventName
    step: int
    failure: tuple[str, str, str] | None = None


def find_events(config: Config, known: Sequence[Event], *, watching: bool) -> tuple[list[Event], int]:
    """The events that are not among `known`, in order, and the number of validations that wait for their pictures or
    scores. watching: whether decode and score may still make these; if not, and no trainer is at work, a validation is
    sent with those that exist."""
    folder = config.run_folder
    progress = read_progress(config)
    keys, phase = {event.key for event in known}, next((e for e in reversed(known) if e.event in _PHASES), None)
    events: list[Event] = []

    def add(event: EventName, step: int, mark: object, failure: tuple[str, str, str] | None = None) -> None:
        if (key := f"{event}-{mark}") not in keys:
            keys.add(key)
            events.append(Event(key=key, event=event, step=step, failure=failure))

    if _has_started(progress, phase, folder):
        add("started", progress.step, sum(e.event == "started" for e in known))
    ready, pending = _find_validations(config, folder, progress, watching)
    rows: list[tuple[int, EventName]] = [(step, "validation") for step in ready]
    rows += [(step, "checkpoint") for step, _ in _find_steps(folder / CHECKPOINTS)]
    for step, event in sorted(rows, key=lambda row: (row[0], row[1] == "checkpoint")):
        add(event, step, step)
    if progress.state == "finished" and not pending:
        add("finished", progress.step, progress.step)
    last = None if progress.state == "running" else read_failure(folder)
    if last and not (progress.state == "unknown" and last.state == "lost"):  # then it may still be at work
        add("failed", progress.step, last.began, (last.program, last.reason, last.advice))
    return events, pending


def _has_started(progress: RunProgress, phase: Event | None, folder: Path) -> bool:
    """Whether training has begun, for the first time or again, and there is no "started" event of that yet."""
    if phase is None:
        return progress.state == "running" or (folder / METRICS_FILE).exists()
    if phase.event == "finished":
        return progress.state == "running" and progress.steps > phase.step
    return phase.event == "failed" and progress.state in ("running", "finished")


def _find_validations(config: Config, folder: Path, progress: RunProgress, watching: bool) -> tuple[list[int], int]:
    """(steps of validations that can be sent, number of validations that wait for pictures or scores)."""
    lines = read_last_metrics(folder / METRICS_FILE)
    trained = max((line["step"] for line in lines if "loss" in line), default=0)
    evaluated = {line["step"] for line in lines if "eval_loss" in line}
    latents = {step: list(path.glob("*.safetensors")) for step, path in _find_steps(folder / "validation")}
    ready, pending = [], 0
    steps = sorted(evaluated | {step for step, files in latents.items() if files})
    scored = {line["step"] for line in read_lines(folder)} if "score" in config.stage_order else set(steps)
    for step in steps:
        if not (trained > step or progress.state == "finished"):
            continue  # the trainer may still be denoising prompts
        files = latents.get(step, [])
        pictures = [picture for file in files if (picture := find_picture(file))]
        if len(pictures) < len(files):
            waits = _age(files) < PICTURES_WAIT_S
        else:
            waits = step not in scored and step == steps[-1] and _age(pictures) < SCORES_WAIT_S
        if waits and (watching or progress.state == "running"):
            pending += 1
        else:
            ready.append(step)
    return ready, pending


def _age(files: Sequence[Path]) -> float:
    """Seconds since the newest was written; without files, since 1970."""
    return time.time() - max((file.stat().st_mtime for file in files), default=0.0)


def read_eval_loss(folder: Path, step: int) -> dict[str, Any]:
    """The line of metrics of this validation; empty if it no longer exists."""
    lines = read_last_metrics(folder / METRICS_FILE)
    return next((line for line in reversed(lines) if line["step"] == step and "eval_loss" in line), {})


def _find_steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*"):
        if (step := step_of(path)) is not None:
            yield step, path
