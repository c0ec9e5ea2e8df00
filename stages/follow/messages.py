"""The events of a run, which are found in its folder, and messages about them, which are sent with apprise: a title, a
sentence and pictures.

The URL of a webhook is a secret: it is not in any message or log of this project, and apprise's own log is disabled.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cache.runs.scores import read_curves, read_lines
from cache.runs.training_run import (
    CHECKPOINTS,
    METRICS_FILE,
    RunProgress,
    read_failure,
    read_last_metrics,
    read_progress,
    step_of,
)
from cache.runs.validations import find_picture, loss_name
from schemas.config.pipeline import Config
from schemas.config.training import EventName, Webhook
from schemas.interruption import pause
from schemas.text_format import format_duration
from stages.discovery.sources.urls import scrub_secrets
from stages.pages.pictures import SmallPicture, list_samples, read_pictures

PICTURES_WAIT_S = 900.0  # longest time that a validation's message waits for decoded pictures
SCORES_WAIT_S = 900.0  # longest time that it then waits for scores, unless there is a newer validation
MAX_CHARACTERS = 1500  # maximum length of a text: Discord accepts 2,000
MAX_PICTURE_BYTES = 200_000
TRIES, PAUSE_S = 3, 2.0  # tries per message, seconds between tries; apprise waits 4 s for an answer
_PHASES = ("started", "finished", "failed")


class Event(BaseModel, frozen=True):
    """An event of a run. key: identifier that is unique in the run. failure: (stage, reason, advice) of a failed run,
    otherwise None."""

    key: str
    event: EventName
    step: int
    failure: tuple[str, str, str] | None = None


def find_events(config: Config, sent_events: Sequence[Event], *, watching: bool) -> tuple[list[Event], int]:
    """Find new events. Returns (events that are not in `sent_events`, in order; number of validations that wait for
    pictures or scores). watching: whether decode and score may still make pictures and scores; if not, and no trainer
    is running, a validation is sent with the pictures and scores that exist."""
    folder = config.run_folder
    progress = read_progress(config)
    keys, events = {event.key for event in sent_events}, list[Event]()
    phase = next((event for event in reversed(sent_events) if event.event in _PHASES), None)

    def add(event: EventName, step: int, mark: object, failure: tuple[str, str, str] | None = None) -> None:
        if (key := f"{event}-{mark}") not in keys:
            keys.add(key)
            events.append(Event(key=key, event=event, step=step, failure=failure))

    if _has_started(progress, phase, folder):
        add("started", progress.step, sum(event.event == "started" for event in sent_events))
    scores = "score" in config.stage_order
    ready_steps, pending = _find_validations(folder, progress, scores, watching)
    rows: list[tuple[int, EventName]] = [(step, "validation") for step in ready_steps]
    rows += [(step, "checkpoint") for step, _ in _find_steps(folder / CHECKPOINTS)]
    for step, event in sorted(rows, key=lambda row: (row[0], row[1] == "checkpoint")):
        add(event, step, step)
    if progress.state == "finished" and not pending:
        add("finished", progress.step, progress.step)
    last = None if progress.state == "running" else read_failure(folder)
    if last and not (progress.state == "unknown" and last.state == "lost"):  # a lost run may still be running
        add("failed", progress.step, last.began, (last.program, last.reason, last.advice))
    return events, pending


def _has_started(progress: RunProgress, phase: Event | None, folder: Path) -> bool:
    """Whether training has begun, for the first time or again, without a "started" event for it. phase: last event of
    _PHASES, None if there is none."""
    if phase is None:
        return progress.state == "running" or (folder / METRICS_FILE).exists()
    if phase.event == "finished":
        return progress.state == "running" and progress.steps > phase.step
    return phase.event == "failed" and progress.state in ("running", "finished")


def _find_validations(folder: Path, progress: RunProgress, scores: bool, watching: bool) -> tuple[list[int], int]:
    """Returns (steps of validations that can be sent, number of validations that wait for pictures or scores). scores:
    whether pictures get scores."""
    lines = read_last_metrics(folder / METRICS_FILE)
    trained_step = max((line["step"] for line in lines if "loss" in line), default=0)
    evaluated_steps = {line["step"] for line in lines if "eval_loss" in line}
    latents = {step: list(path.glob("*.safetensors")) for step, path in _find_steps(folder / "validation")}
    ready_steps, pending = [], 0
    steps = sorted(evaluated_steps | {step for step, files in latents.items() if files})
    scored_steps = {line.step for line in read_lines(folder)} if scores else set(steps)
    for step in steps:
        if not (trained_step > step or progress.state == "finished"):
            continue  # the trainer may still be denoising prompts
        files = latents.get(step, [])
        pictures = [picture for file in files if (picture := find_picture(file))]
        if len(pictures) < len(files):
            is_waiting = _age(files) < PICTURES_WAIT_S
        else:
            is_waiting = step not in scored_steps and step == steps[-1] and _age(pictures) < SCORES_WAIT_S
        if is_waiting and (watching or progress.state == "running"):
            pending += 1
        else:
            ready_steps.append(step)
    return ready_steps, pending


def _age(files: Sequence[Path]) -> float:
    """The seconds since the newest file was written; without files, the seconds since 1970."""
    return time.time() - max((file.stat().st_mtime for file in files), default=0.0)


def read_eval_loss(folder: Path, step: int) -> dict[str, Any]:
    """The metrics of a validation; empty if its line no longer exists."""
    lines = read_last_metrics(folder / METRICS_FILE)
    return next((line for line in reversed(lines) if line["step"] == step and "eval_loss" in line), {})


def _find_steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*"):
        if (step := step_of(path)) is not None:
            yield step, path


@dataclass
class Message:
    title: str
    text: str
    pictures: list[SmallPicture] = field(default_factory=list)


def describe(config: Config, event: Event) -> Message:
    """Make the message about an event, with the current losses, scores and pictures of the run."""
    folder, progress, run = config.run_folder, read_progress(config), config.run_name
    position = f"step {event.step} of {config.train.steps}"
    pictures: list[SmallPicture] = []
    if event.event == "started":
        model = f"{config.model.family}, {config.model.flavour_spec.name}"
        text = f"{run} started ({model}), {f'from {position}' if event.step else f'{config.train.steps} steps'}"
    elif event.event == "checkpoint":
        text = f"{run}: checkpoint at {position}"
    elif event.event == "finished":
        text = f"{run} finished: {position}{_number('loss', progress.loss)}"
    elif event.failure is not None:
        stage, reason, advice = map(scrub_secrets, event.failure)
        text = "\n".join(filter(None, (f"{run} failed in {stage}, {position}: {reason}", advice)))
    else:
        newest = read_pictures(config, folder, event.step, config.notify.picture_size, MAX_PICTURE_BYTES)
        pictures = list(islice(newest, config.notify.pictures))
        eval_line = read_eval_loss(folder, event.step)
        numbers = [_number(loss_name([eval_line]), eval_line.get("eval_loss")), _number("loss", progress.loss)]
        points = ((curve.name, point) for curve in read_curves(folder) for point in curve.points)
        numbers += [_number(name, point.value) for name, point in points if point.step == event.step]
        time_left = "" if progress.seconds_left is None else f", {format_duration(progress.seconds_left)} left"
        hidden_count = sum(event.step in steps for steps in list_samples(config, folder).values()) - len(pictures)
        text = f"{run}: validation at {position}{''.join(numbers)}{time_left}"
        text += f" ({hidden_count} more pictures are not shown)" if hidden_count else ""
    text = text.encode(errors="replace").decode()  # file names may contain unpaired surrogates
    for mention in ("everyone", "here"):
        text = text.replace(f"@{mention}", f"@ {mention}")
    return Message(run, text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}...", pictures)


def _number(name: str, value: float | None) -> str:
    return "" if value is None else f", {name} {value:.4g}"


class Service:
    """A webhook. sent_count, lost_count: numbers of messages that were sent, and that could not be sent. problem: why
    the last message was not sent; "" if it was sent."""

    def __init__(self, hook: Webhook) -> None:
        from apprise import Apprise

        logging.getLogger("apprise").disabled = True  # apprise logs addresses
        self.hook, self.sent_count, self.lost_count, self.problem = hook, 0, 0, ""
        self._apprise, url = Apprise(), os.environ.get(hook.url_env, "").strip()
        if not url:
            self.problem = f"the environment variable {hook.url_env} is not set"
        elif not self._apprise.add(url):
            self.problem = f"the environment variable {hook.url_env} does not contain a URL that apprise supports"
        self.is_usable = not self.problem

    def send(self, message: Message, tries: int) -> None:
        from apprise import NotifyFormat
        from apprise.attachment.memory import AttachMemory

        for number in range(tries):
            pause(PAUSE_S if number else 0.0)
            files = [
                AttachMemory(picture.picture.data, name=f"{number}.jpg", mimetype="image/jpeg")
                for number, picture in enumerate(message.pictures)
            ]
            notify, text = self._apprise.notify, NotifyFormat.TEXT
            if notify(title=message.title, body=message.text, body_format=text, attach=files or None):
                self.sent_count, self.problem = self.sent_count + 1, ""
                return
        # apprise does not return the reason
        self.lost_count, self.problem = self.lost_count + 1, "did not accept the message"
