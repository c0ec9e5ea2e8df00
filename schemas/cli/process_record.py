"""The record of a process: program, machine, start time, current tasks, their progress, and exit code.

Kinds of processes with more information add fields. `RecordWriter` writes each change, `try_read` reads:

    <output>/<run>/logs/run.json, $LATENTPRESS_NOTES/<program>.json   programs, by `record_program`
    <output>/<run>/logs/<program>.json         stages of `latentpress run` in a terminal
    <output>/.ui/starts/<job>.json             programs that the page started (stages/pages/ui/child_programs.py)
    <root>/jobs/<stage>/<fingerprint>/*.json   jobs of the encoding stages (stages/encoding/job_reports.py)
    <output>/<run>/failure.json                the last attempt of a run (cache/runs/training_run.py)

`latentpress ui` sets $LATENTPRESS_NOTES for the programs that it starts, and they pass it on to their subprocesses.
So a page that is opened later can still show the running programs, their progress and their results. A record that
can't be written does not stop the program. Files that are not valid records of this version are ignored.
"""

import os
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.activities import Progress
from schemas.errors import INTERRUPTED, OK, LatentpressError
from schemas.json_records import Record
from schemas.text_format import shorten

NOTES_VARIABLE = "LATENTPRESS_NOTES"
MAX_CHARS = 10_000  # of a text in a record
INTERVAL_S = 1.0
LAST_MOMENT = 253_402_214_400.0  # in the year 9999, the last year of datetime
Moment = Annotated[float, Field(ge=0, le=LAST_MOMENT, allow_inf_nan=False)]  # seconds since 1970
State = Literal["running", "lost", "failed", "stopped", "ended"]  # in the order of interest


class Task(BaseModel):
    """A part of the work. state: progress in words. total: number of units; None if it is unknown."""

    model_config = ConfigDict(frozen=True, str_max_length=2000, allow_inf_nan=False)

    description: str
    state: str
    done: float
    total: float | None = None


class ProcessRecord(Record):
    """process_start: start time from `find_process_start`, which distinguishes processes with the same id. began,
    updated: seconds since 1970. exit_code: None until the process has ended. reason: cause of a failure or stop; with
    exit_code None, the reason why the process counts as lost. advice: the next step for the user."""

    model_config = ConfigDict(str_max_length=MAX_CHARS)
    max_bytes: ClassVar[int] = 100_000

    program: str
    process: int = Field(default_factory=os.getpid, gt=0)
    process_start: str = ""
    host: str = Field(default_factory=lambda: socket.gethostname())
    began: Moment = Field(default_factory=time.time)
    updated: Moment = 0.0
    tasks: tuple[Task, ...] = ()
    exit_code: int | None = None
    reason: str = ""
    advice: str = ""

    @property
    def state(self) -> State:
        """The state according to the record: "running" for a killed process, which could not update its record."""
        if self.exit_code is None:
            return "lost" if self.reason else "running"
        return "ended" if self.exit_code == OK else "stopped" if self.exit_code == INTERRUPTED else "failed"

    @property
    def is_running(self) -> bool:
        """Whether the process is running on this machine."""
        return self.exit_code is None and is_process(self.process, self.process_start, self.host)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the process runs, or ran, on another machine, whose processes can't be checked from this machine."""
        return self.exit_code is None and self.host != socket.gethostname()


_writers: list["NoteWriter"] = []  # of the programs that are running in this process


def read_notes(folder: Path) -> list[ProcessRecord]:
    """The records of the programs in a folder."""
    return [note for path in sorted(folder.glob("*.json")) if (note := ProcessRecord.try_read(path))]


class RecordWriter:
    """Writes the record of this process. store: function that stores a record. Safe to use from several threads."""

    def __init__(self, record: ProcessRecord, store: Callable[[ProcessRecord], object]) -> None:
        self._record = record.model_copy(update={"process_start": find_process_start(os.getpid())})
        self._store, self._lock = store, threading.RLock()

    def update(self, **changes: object) -> None:
        """Write the record with these changes. After an `exit_code`, further calls have no effect."""
        with self._lock:
            if self._record.exit_code is None:
                self._record = self._record.model_copy(update={**changes, "updated": time.time()})
                with suppress(OSError, LatentpressError):  # the next one may be written
                    self._store(self._record)


class NoteWriter(RecordWriter):
    """A program's record in a folder, written again every INTERVAL_S while a task is in progress."""

    def __init__(self, folder: Path, program: str) -> None:
        path = folder / f"{program}.json"
        super().__init__(ProcessRecord(program=program), lambda record: record.write(path))
        self._tasks: list[Progress] = []
        self._ticker: threading.Thread | None = None

    def begin(self, task: Progress) -> None:
        """Include the task's progress in the record until `end`."""
        with self._lock:
            self._tasks.append(task)
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="note", daemon=True)
                self._ticker.start()

    def end(self, task: Progress) -> None:
        with self._lock:
            self._tasks.remove(task)

    def _tick(self) -> None:
        """Write until no task has been in progress for INTERVAL_S, so that consecutive tasks share a thread."""
        while True:
            with self._lock:
                tasks = tuple(_describe_task(task) for task in self._tasks)
                if tasks != self._record.tasks:
                    self.update(tasks=tasks)
                elif not tasks:
                    self._ticker = None
                    return
            time.sleep(INTERVAL_S)


def _describe_task(task: Progress) -> Task:
    description, state = storable_text(task.description, 1000), storable_text(task.state(), 1000)
    return Task(description=description, state=state, done=task.done, total=task.total)


def storable_text(text: str, limit: int = MAX_CHARS) -> str:
    """A text that a record can hold, with bytes that are not UTF-8, as in file names, escaped."""
    return shorten(text.encode(errors="backslashreplace").decode(), limit)


@contextmanager
def record_program(program: str, folder: Path | str | None = None) -> Iterator[NoteWriter | None]:
    """A context around a program: its record exists from the start and gets the exit code at the end, unless the
    process is killed. The body sets the exit code by `update(exit_code=...)`; an exception counts as 1. folder:
    directory of the record; by default the directory in $LATENTPRESS_NOTES. Without both, no record is written."""
    folder = folder or os.environ.get(NOTES_VARIABLE)
    if not folder:
        yield None
        return
    writer = NoteWriter(Path(folder), program)
    writer.update()
    _writers.append(writer)
    try:
        yield writer
        writer.update(tasks=(), exit_code=OK)
    finally:
        writer.update(tasks=(), exit_code=1)  # no effect on a record with an exit code
        _writers.remove(writer)


@contextmanager
def recording_programs(folder: Path) -> Iterator[None]:
    """Context in which programs that this process starts write their records to `folder`, unless $LATENTPRESS_NOTES is
    set already."""
    if os.environ.get(NOTES_VARIABLE):
        yield
        return
    os.environ[NOTES_VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(NOTES_VARIABLE, None)


def end_records(exit_code: int) -> None:
    """Write the exit code into the records of all programs in this process, which is about to end."""
    for writer in _writers:
        writer.update(tasks=(), exit_code=exit_code)


def is_process(process: int, start: str, host: str) -> bool:
    """Whether the process is running on this machine; False for a later process that got the same id."""
    return host == socket.gethostname() and bool(start) and find_process_start(process) == start


def find_process_start(process: int) -> str:
    """The start time of a process as the system reports it, which differs between processes with the same id. "" if no
    process with this id is running."""
    if platform.system() != "Linux":
        command = ["ps", "-o", "stat=,lstart=", "-p", str(process)]
        state, _, start = subprocess.run(command, capture_output=True, text=True).stdout.strip().partition(" ")
        return "" if state.startswith("Z") else start.strip()
    try:
        # The state and the 22nd value of "1234 (name) S 1 ...", whose name may hold anything.
        state, *values = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in ("Z", "X") else f"{boot}:{values[18]}"
