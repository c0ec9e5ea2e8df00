"""The record in which a process says what it does: who, where, since when, doing what, how far, and how it ended.

A kind of process with more to say adds fields. `RecordWriter` writes again what has changed, `try_read` reads:

    <output>/<run>/logs/run.json, $LATENTPRESS_NOTES/<program>.json   programs, by `noted`
    <output>/.ui/starts/<job>.json             what the page started (stages/pages/ui/child_programs.py)
    <root>/jobs/<stage>/<fingerprint>/*.json   jobs of the encoding stages (stages/encoding/job_reports.py)
    <output>/<run>/failure.json                the last attempt of a run (cache/runs/training_run.py)

`latentpress ui` sets $LATENTPRESS_NOTES for the programs that it starts, and they pass it on to those that they start.
So a page that is opened later still knows what runs, how far it is, and how it ended. A record that can't be written
stops nothing; a file that is none, or of another version, is passed over.
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
MAX_CHARS = 10_000  # of a text in it
INTERVAL_S = 1.0
LAST_MOMENT = 253_402_214_400.0  # in the year 9999, where calendars end
Moment = Annotated[float, Field(ge=0, le=LAST_MOMENT, allow_inf_nan=False)]  # seconds since 1970
State = Literal["running", "lost", "failed", "stopped", "ended"]  # in the order of interest


class Task(BaseModel):
    """A part of the work. state: how far it is, in words. total: None where the end is not known."""

    model_config = ConfigDict(frozen=True, str_max_length=2000, allow_inf_nan=False)

    description: str
    state: str
    done: float
    total: float | None = None


class ProcessRecord(Record):
    """process_start: of `find_process_start`, so that another process with the same id is not taken for this one.
    began, updated: seconds since 1970. exit_code: None until it has ended. reason: why it failed or stopped; without an
    exit code, why it counts as lost. advice: the next step."""

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
        """The state by the record alone: a process that was killed could not write that down."""
        if self.exit_code is None:
            return "lost" if self.reason else "running"
        return "ended" if self.exit_code == OK else "stopped" if self.exit_code == INTERRUPTED else "failed"

    @property
    def is_running(self) -> bool:
        """Whether its process is at work on this machine."""
        return self.exit_code is None and is_process(self.process, self.process_start, self.host)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether it runs, or ran, on another machine, whose processes are not seen from here."""
        return self.exit_code is None and self.host != socket.gethostname()


_noted: list["NoteWriter"] = []  # the records that are written at the moment


def read_notes(folder: Path) -> list[ProcessRecord]:
    """The records of the programs in a folder."""
    return [note for path in sorted(folder.glob("*.json")) if (note := ProcessRecord.try_read(path))]


class RecordWriter:
    """The record of this process. put: writes it to its place. Safe to use from several threads."""

    def __init__(self, record: ProcessRecord, put: Callable[[ProcessRecord], object]) -> None:
        self._record = record.model_copy(update={"process_start": find_process_start(os.getpid())})
        self._put, self._lock = put, threading.RLock()

    def update(self, **changes: object) -> None:
        """Write it with these changes. With an `exit_code` it is the last time."""
        with self._lock:
            if self._record.exit_code is None:
                self._record = self._record.model_copy(update={**changes, "updated": time.time()})
                with suppress(OSError, LatentpressError):  # the next one may be written
                    self._put(self._record)


class NoteWriter(RecordWriter):
    """A program's record in a folder, written again every INTERVAL_S while something is being done."""

    def __init__(self, folder: Path, program: str) -> None:
        path = folder / f"{program}.json"
        super().__init__(ProcessRecord(program=program), lambda record: record.write(path))
        self._tasks: list[Progress] = []
        self._ticker: threading.Thread | None = None

    def begin(self, task: Progress) -> None:
        """Say from now on how far this is."""
        with self._lock:
            self._tasks.append(task)
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="note", daemon=True)
                self._ticker.start()

    def end(self, task: Progress) -> None:
        with self._lock:
            self._tasks.remove(task)

    def _tick(self) -> None:
        """Write until nothing has been done for INTERVAL_S: tasks that follow each other share a thread."""
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
    """A text that a record can hold: names of files may have bytes that UTF-8 does not."""
    return shorten(text.encode(errors="backslashreplace").decode(), limit)


@contextmanager
def noted(program: str, folder: Path | str | None = None) -> Iterator[NoteWriter | None]:
    """A context around a program: its record is there from the beginning, and says afterwards how it ended, unless the
    process was killed. The body tells the exit code by `update(exit_code=...)`; an exception counts as 1. folder: else
    that of the variable."""
    folder = folder or os.environ.get(NOTES_VARIABLE)
    if not folder:
        yield None
        return
    writer = NoteWriter(Path(folder), program)
    writer.update()
    _noted.append(writer)
    try:
        yield writer
        writer.update(tasks=(), exit_code=OK)
    finally:
        writer.update(tasks=(), exit_code=1)  # no effect on one that has ended
        _noted.remove(writer)


def end_records(exit_code: int) -> None:
    """Write in the records of all `noted` programs that they have ended: the process is about to end."""
    for writer in _noted:
        writer.update(tasks=(), exit_code=exit_code)


def is_process(process: int, start: str, host: str) -> bool:
    """Whether this process of this machine is at work, and not another one that was given its id later."""
    return host == socket.gethostname() and bool(start) and find_process_start(process) == start


def find_process_start(process: int) -> str:
    """When a process began, as the system tells it: no other process with the same id has the same. "" where none is at
    work."""
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
