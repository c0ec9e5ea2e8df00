"""The events of a run, by its folder: started, validation, checkpoint, finished, failed; and which were sent.

<output>/<run>/notifications.json has the events, and which were sent to which webhook. An event is saved before it is
sent, and marked as sent afterwards. So after a kill it may be sent twice, with the same id, but is never lost. A
webhook is identified by the environment variable that holds its URL.
"""

import fcntl
import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
from cache.store.files import replacing
from cache.store.json_checks import parse_json
from schemas.config.pipeline import Config
from schemas.config.sharing import EventName, Webhook
from schemas.errors import LatentpressError
from schemas.notification import NotifiedFailure

PICTURES_WAIT_S = 900.0  # for which a validation waits at most for its pictures to be decoded
SCORES_WAIT_S = 900.0  # and then for its scores, unless the next validation comes first
OUTBOX_FILE, LOCK_FILE = "notifications.json", ".notify.lock"
MOST_WAITING = 100  # events of a webhook, the newest; older ones are no longer sent
_PHASES = ("started", "finished", "failed")


@dataclass(frozen=True)
class Event:
    """key: unique in the run. id: the same in every request about the event. time: when it was found, UTC."""

    key: str
    event: EventName
    step: int
    id: str
    time: str
    failure: NotifiedFailure | None = None


def find_events(config: Config, known: Sequence[Event], *, watching: bool) -> tuple[list[Event], int]:
    """The events that are not among `known`, in order, and the number of validations that wait for their pictures or
    scores. watching: whether decode and score may still make these; if not, and no trainer is at work, a validation is
    sent with those that are there."""
    folder = config.run_folder
    progress = read_progress(config)
    keys, phase = {event.key for event in known}, next((e for e in reversed(known) if e.event in _PHASES), None)
    events: list[Event] = []

    def add(event: EventName, step: int, mark: str, failure: NotifiedFailure | None = None) -> None:
        if (key := f"{event}-{mark}") not in keys:
            keys.add(key)
            moment = datetime.now(UTC).strftime("%FT%TZ")
            events.append(Event(key, event, step, uuid.uuid4().hex, moment, failure))

    if _has_started(progress, phase, folder):
        add("started", progress.step, f"{sum(e.event == 'started' for e in known)}")
    ready, pending = _find_validations(config, folder, progress, watching)
    rows: list[tuple[int, EventName]] = [(step, "validation") for step in ready]
    rows += [(step, "checkpoint") for step, _ in _find_steps(folder / CHECKPOINTS)]
    for step, event in sorted(rows, key=lambda row: (row[0], row[1] == "checkpoint")):
        add(event, step, f"{step}")
    if progress.state == "finished" and not pending:
        add("finished", progress.step, f"{progress.step}")
    last = None if progress.state == "running" else read_failure(folder)
    if last and not (progress.state == "unknown" and last.state == "lost"):  # then it may still be at work
        failure = NotifiedFailure(stage=last.program, reason=last.reason, advice=last.advice)
        add("failed", progress.step, f"{last.began}", failure)
    return events, pending


def _has_started(progress: RunProgress, phase: Event | None, folder: Path) -> bool:
    """Whether training has begun, for the first time or again, and there is no "started" event of that yet."""
    if phase is None:
        return progress.state == "running" or (folder / METRICS_FILE).exists()
    if phase.event == "finished":
        return progress.state == "running" and progress.steps > phase.step
    return phase.event == "failed" and progress.state in ("running", "finished")


def _find_validations(config: Config, folder: Path, progress: RunProgress, watching: bool) -> tuple[list[int], int]:
    """(steps of those that can be sent, how many wait for pictures or scores)."""
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
    """The line of metrics of this validation; empty where there is none any more."""
    lines = read_last_metrics(folder / METRICS_FILE)
    return next((line for line in reversed(lines) if line["step"] == step and "eval_loss" in line), {})


def _find_steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*"):
        if (step := step_of(path)) is not None:
            yield step, path


class Outbox:
    """Safe to use from several threads of one process."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / OUTBOX_FILE, threading.Lock()
        self.events: list[Event] = []
        self._handled: dict[str, set[str]] = {}  # webhook -> ids
        if not self._path.exists():
            return
        try:
            content = parse_json(self._path.read_bytes())
            self.events = [_read_event(row) for row in content["events"]]
            self._handled = {name: set(ids) for name, ids in content["handled"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            advice = "remove it: then every event of the run is sent again"
            raise LatentpressError(f"{self._path} can't be read ({type(error).__name__})", advice) from error

    def add(self, events: Sequence[Event], *, save: bool = True) -> None:
        with self._lock:
            self.events += events
            if events and save:
                self._save()

    def waiting(self, hook: Webhook) -> list[Event]:
        """The events that this webhook subscribes to and that are not handled, oldest first."""
        with self._lock:
            handled = self._handled.get(hook.url_env, set())
            wanted = [event for event in self.events if event.event in hook.events][-MOST_WAITING:]
            return [event for event in wanted if event.id not in handled]

    def mark(self, hook: Webhook, event: Event) -> None:
        """The event is handled: it was sent, or the server refused it. It is not tried again."""
        with self._lock:
            self._handled.setdefault(hook.url_env, set()).add(event.id)
            self._save()

    def _save(self) -> None:
        content = {
            "events": [
                asdict(event) | {"failure": event.failure.model_dump() if event.failure else None}
                for event in self.events
            ],
            "handled": {name: sorted(ids) for name, ids in self._handled.items()},
        }
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def only_one(folder: Path) -> Iterator[bool]:
    """Lock the sending of this run's events: False where another process has the lock. True, without a lock, on a file
    system that has none."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True


def _read_event(row: dict[str, Any]) -> Event:
    """Read an event, also of an older version, whose failure has more values."""
    values = row["failure"] and {name: row["failure"][name] for name in NotifiedFailure.model_fields}
    failure = NotifiedFailure(**values) if values else None
    return Event(row["key"], row["event"], row["step"], row["id"], row["time"], failure)
