"""A training run's folder, <output>/<run>/, for other programs: its metrics, whether a trainer is running, and the
records of its processes. Does not import torch.

failure.json: the record of the run's last attempt, if the attempt is running, was killed or ended with an error. The
record is removed when another attempt begins. stages.jsonl: a line for each stage that `latentpress run` ran and that
did work.
"""

import io
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from cache.store.files import explained, is_locked, make_folders, replacing
from schemas.cli.process_record import ProcessRecord, RecordWriter, storable_text
from schemas.config.pipeline import Config
from schemas.errors import INCOMPLETE, USAGE, LatentpressError
from schemas.json_records import Record, parse_json
from schemas.regular_files import open_regular
from schemas.text_format import format_duration

METRICS_FILE, LOCK_NAME, RESULT_NOTE, CHECKPOINTS = "metrics.jsonl", ".lock", "result.json", "checkpoints"
WANDB_ID = "wandb-id.txt"
TENSORBOARD = "tensorboard"
SILENT_S = 1800.0  # after this time without a written file, a trainer with an invisible lock counts as killed
SMOOTHED_STEPS = 50  # number of steps over which the displayed loss is averaged
TAIL_BYTES = 1 << 20  # bytes at the end of the metrics that status reads: about 1,500 steps
MAX_HEADER_BYTES = 1 << 20  # limit for the header of a validation latent
#: Values in a line of metrics: numbers or null.
NUMBERS = ("loss", "eval_loss", "samples_per_s", "data_wait_share", "seconds_left")
Step = TypeVar("Step", int, str)  # a number, or the name of its folder
_STEP_PATTERN = re.compile(r"step-([0-9]{1,18})", re.ASCII)
FAILURE_NOTE, STAGES_FILE = "failure.json", "stages.jsonl"
KILLED = "it ended without a message: it was killed, for example because memory was full, or the machine stopped"


class RunError(LatentpressError):
    """Training can't be started with these options or this configuration."""

    exit_code = USAGE


class OutputLocked(LatentpressError):
    """Another trainer is running in this folder."""

    def __init__(self, folder: Path) -> None:
        step = "Wait until it has ended, stop it, or choose another train.run."
        super().__init__(f"another trainer is running in {folder}", step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without lines that a resumed run repeated or that a kill cut off."""
    return parse_metrics(read_regular(path))


def read_last_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines in the last TAIL_BYTES of a metrics.jsonl, in constant time however long the run is."""
    return parse_metrics(read_regular(path, TAIL_BYTES))


def read_regular(path: Path, last: int | None = None) -> bytes:
    """Return the bytes of a file, or only the last `last` bytes; b"" if the file is missing. Raises StoreError for a
    pipe or a device, which has no end."""
    with explained(str(path)), suppress(FileNotFoundError, NotADirectoryError), open_regular(path) as file:
        file.seek(0 if last is None else max(0, file.seek(0, io.SEEK_END) - last))
        return file.read()
    return b""


def parse_metrics(content: bytes) -> list[dict[str, Any]]:
    """Parse lines of metrics. Lines are skipped if `step` is not an integer or a value in NUMBERS is not a number."""
    lines = list[dict[str, Any]]()
    for raw in content.split(b"\n"):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            continue
        if not all(isinstance(line.get(key), int | float | None) for key in NUMBERS):
            continue
        if line.get("resumed"):
            lines = [earlier for earlier in lines if earlier["step"] <= line["step"]] if line["step"] else []
            if isinstance(line.get("set"), str):  # the run continues on a different set
                lines = [earlier for earlier in lines if "set" not in earlier or earlier["step"] < line["step"]]
                lines.append({"step": line["step"], "set": line["set"]})
        else:
            lines.append(line)
    return lines


class ResultNote(Record):
    """result.json: the step at which the run was finished, the path of its result, and which weights the result has."""

    step: int = Field(ge=0)
    result: str
    weights: str


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the newest last, without temporary folders of killed processes."""
    with explained(str(folder)):
        checkpoints = [path for path in folder.glob("step-*") if step_of(path) is not None and path.is_dir()]
    return sorted(checkpoints, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the number in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def spread(steps: Sequence[Step], max_count: int) -> list[Step]:
    """Choose at most `max_count` of the steps, evenly spaced, with the first and the last step. max_count: at least
    2."""
    if len(steps) <= max_count:
        return list(steps)
    return [steps[round(number * (len(steps) - 1) / (max_count - 1))] for number in range(max_count)]


def step_of(path: Path) -> int | None:
    """Return the step of a folder with a name such as "step-000500"; None for any other name."""
    match = _STEP_PATTERN.fullmatch(path.name)
    return int(match[1]) if match else None


def read_description(path: Path) -> dict[str, Any]:
    """Return the trainer's description of a validation latent, from the header of its safetensors file: 8 bytes of
    length, then JSON. The description is empty if the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(size, MAX_HEADER_BYTES)))
        description = json.loads(header["__metadata__"]["latentpress"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return description if isinstance(description, dict) else {}


def smoothed_loss(losses: Sequence[float | None]) -> float | None:
    """Return the mean of the last SMOOTHED_STEPS losses, without the losses of skipped steps (null)."""
    finite = [loss for loss in losses[-SMOOTHED_STEPS:] if isinstance(loss, int | float)]
    return fmean(finite) if finite else None


def format_eval(line: Mapping[str, Any]) -> str:
    """Format the eval loss of a line of metrics, in total and by sigma: "0.8123 (0.2: 1.101, 0.8: 0.7021)"."""
    by_sigma = ", ".join(f"{sigma}: {loss:.4g}" for sigma, loss in line.get("eval_by_sigma", {}).items() if loss)
    return f"{line['eval_loss'] or math.nan:.4g}" + (f" ({by_sigma})" if by_sigma else "")


def is_running(folder: Path) -> bool | None:
    """Whether a trainer holds the lock of this run's folder. None if the lock is not conclusive: on a file system
    without locks, or if a trainer may be running on another machine, whose locks may be invisible to this one.
    """
    locked = is_locked(folder / LOCK_NAME)
    return None if locked is False and may_be_running(folder, elsewhere=True) else locked


def may_be_running(folder: Path, elsewhere: bool = False) -> bool:
    """Whether a trainer may be running, judged by the run's files: its record has no end (the record of a killed
    trainer has none either), and the trainer wrote a file within SILENT_S. elsewhere: consider only other machines."""
    record = read_failure(folder)
    if record is None or record.state != "lost" or (elsewhere and record.host == socket.gethostname()):
        return False
    write_times = [record.began]
    for path in (folder / METRICS_FILE, folder / CHECKPOINTS, *folder.glob("validation/*")):
        with suppress(OSError):
            write_times.append(path.stat().st_mtime)
    return time.time() - max(write_times) < SILENT_S


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, by its files. steps: number of steps in the configuration. state: "not started",
    "running", "stopped", "finished", or "unknown" if `is_running` returns None. checkpoint: step of the newest
    checkpoint. eval_loss: the last eval loss, its step, and "on training samples" if no samples are held out."""

    run: str
    state: str
    step: int
    steps: int
    loss: float | None
    samples_per_s: float | None
    data_wait_share: float | None
    seconds_left: float | None
    checkpoint: int | None
    eval_loss: str = ""

    def row(self) -> dict[str, Any]:
        """Return the progress as a row of a table."""
        time_left = format_duration(self.seconds_left) if self.seconds_left is not None else ""
        return {
            "run": self.run,
            "state": self.state,
            "step": f"{self.step} of {self.steps}",
            "loss": "" if self.loss is None else f"{self.loss:.4g}",
            "eval_loss": self.eval_loss,
            "samples_per_second": "" if self.samples_per_s is None else f"{self.samples_per_s:.3g}",
            "waiting_for_data": "" if self.data_wait_share is None else f"{100 * self.data_wait_share:.0f} %",
            "left": str(time_left),
            "last_checkpoint": "none" if self.checkpoint is None else f"step {self.checkpoint}",
        }


def read_progress(config: Config, folder: Path | None = None) -> RunProgress:
    """Read the progress of the configuration's run, or of the run in `folder`. For a running run, speed and time left
    are measured since its last start, so they are None while the trainer loads."""
    folder, steps = folder or config.run_folder, config.train.steps
    content = read_regular(folder / METRICS_FILE, TAIL_BYTES)
    metrics = parse_metrics(content)
    lines, evals = ([line for line in metrics if key in line] for key in ("loss", "eval_loss"))
    saved = [checkpoint_step(path) for path in list_checkpoints(folder / CHECKPOINTS)]
    step = max([lines[-1]["step"] if lines else 0, *saved])
    running = is_running(folder)
    if running:
        state = "running"
    elif step >= steps and (folder / RESULT_NOTE).exists():
        state = "finished"
    elif running is None:
        state = "unknown"
    else:
        state = "stopped" if lines or saved else "not started"
    last = lines[-1] if lines else {}
    if running:
        _, resumed, after_start = content.rpartition(b'"resumed"')
        since_start = [] if _was_started_since(folder) else parse_metrics(after_start) if resumed else metrics
        last = next((line for line in reversed(since_start) if "loss" in line), {})
    speed, waited = last.get("samples_per_s"), last.get("data_wait_share")
    seconds_left = last.get("seconds_left") if running else None
    losses = [line["loss"] for line in lines]
    return RunProgress(
        *(folder.name, state, step, steps, smoothed_loss(losses), speed, waited, seconds_left),
        *(max(saved, default=None), _format_last_eval(evals[-1]) if evals else ""),
    )


def run_at_work(config: Config) -> Config:
    """Return the configuration of one run. For two experts, this is the first run that is not finished, or else the
    last run."""
    runs = config.expert_runs
    return next((run for run in runs if read_progress(run).state != "finished"), runs[-1])


def _format_last_eval(line: Mapping[str, Any]) -> str:
    """Format the eval loss of a line of metrics: "0.8123 at step 100", with "on training samples" if no samples are
    held out."""
    on = " on training samples" if line.get("eval_on") == "training samples" else ""
    return f"{line['eval_loss'] or math.nan:.4g} at step {line['step']}{on}"


def _was_started_since(folder: Path) -> bool:
    """Whether a trainer was started after the last line of metrics was written: a trainer first writes failure.json."""
    try:
        return (folder / FAILURE_NOTE).stat().st_mtime_ns > (folder / METRICS_FILE).stat().st_mtime_ns
    except OSError:
        return False


def wandb_options(folder: Path, job: str) -> dict[str, Any]:
    """Return keyword arguments of accelerate's WandBTracker for a run's folder. The job "train" continues its wandb
    run; any other job has its own wandb run in the same group, since two processes can't write to one run. wandb prints
    nothing to the terminal."""
    try:
        key = (folder / WANDB_ID).read_text().strip()
    except FileNotFoundError:
        key = uuid.uuid4().hex[:8]
        with replacing(folder / WANDB_ID) as temporary:
            temporary.write_text(key)
    suffix = "" if job == "train" else f"-{job}"
    names = {"id": key + suffix, "name": folder.name + suffix.replace("-", " "), "group": f"{folder.name}-{key}"}
    names["run_name"] = os.environ.get("WANDB_PROJECT", "latentpress")  # accelerate's name of the project
    settings = {"console": "off", "quiet": True}
    return {**names, "job_type": job, "dir": str(folder), "resume": "allow", "settings": settings}


def begin_record(folder: Path, stage: str) -> RecordWriter:
    """Return the writer of failure.json. On a full disk or without write permission, nothing is written, because the
    failure itself reports the cause."""
    return RecordWriter(ProcessRecord(program=stage), lambda record: record.write(folder / FAILURE_NOTE))


def record_failure(folder: Path, stage: str, reason: str, advice: str = "") -> None:
    """Record in failure.json that `stage` failed. reason: the error. advice: the next step."""
    _end_record(begin_record(folder, stage), reason, advice)


def _end_record(writer: RecordWriter, reason: str, advice: str) -> None:
    writer.update(exit_code=INCOMPLETE, reason=storable_text(reason), advice=storable_text(advice))


def clear_failure(folder: Path) -> None:
    with suppress(OSError):
        (folder / FAILURE_NOTE).unlink(missing_ok=True)


@contextmanager
def noting_failure(folder: Path, stage: str, ignored: type[Exception]) -> Iterator[None]:
    """Context that records that `stage` is running, and the error with which the body ends. ignored: exception type
    that is not recorded as a failure."""
    writer = begin_record(folder, stage)
    writer.update()
    try:
        yield
    except ignored:
        clear_failure(folder)
        raise
    except LatentpressError as error:
        _end_record(writer, error.message, error.next_step)
        raise
    except Exception as error:
        _end_record(writer, f"{type(error).__name__}: {error}", "")
        raise
    except BaseException:  # Ctrl-C, and exits
        clear_failure(folder)
        raise
    clear_failure(folder)


def read_failure(folder: Path) -> ProcessRecord | None:
    """Return the record of the last attempt, or None if the record does not exist. Its state is "failed", or "lost" if
    the record has no exit code, for example because the attempt is still running."""
    record = ProcessRecord.try_read(folder / FAILURE_NOTE)
    if record is not None and record.exit_code is None:
        record = record.model_copy(update={"reason": KILLED, "advice": f"latentpress {record.program}"})
    return record


class StageRun(BaseModel):
    """A line of stages.jsonl. began: start of the stage, in seconds since 1970."""

    stage: str
    began: float
    seconds: float
    done: int
    failed: bool


def append_stage(folder: Path, row: StageRun) -> None:
    """Add a line to stages.jsonl."""
    with explained(str(folder / STAGES_FILE)):
        make_folders(folder)
        with (folder / STAGES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.model_dump()) + "\n")


def read_stages(folder: Path) -> list[StageRun]:
    """Return the lines of stages.jsonl in order, without lines that a kill cut off."""
    rows = list[StageRun]()
    for raw in read_regular(folder / STAGES_FILE).splitlines():
        with suppress(ValueError):
            rows.append(StageRun.model_validate_json(raw))
    return rows
