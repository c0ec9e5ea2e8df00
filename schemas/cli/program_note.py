"""What a program says of itself in a small file while it runs, where $LATENTPRESS_NOTES names a folder for it, and
`run` in its folder, too, so that `status` knows of it.

`latentpress ui` sets the variable for the programs that it starts, and they pass it on to those that they start. So a
page that is opened later still knows what runs, how far it is, and how it ended. A note that can't be written stops
nothing.
"""

import os
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.cli.progress import Progress
from schemas.text_format import shorten

NOTES_VARIABLE = "LATENTPRESS_NOTES"
MAX_BYTES = 100_000  # of a note that is read
INTERVAL_S = 1.0
LAST_MOMENT = 253_402_214_400.0  # in the year 9999, where calendars end
Moment = Annotated[float, Field(ge=0, le=LAST_MOMENT, allow_inf_nan=False)]  # seconds since 1970


class TaskNote(BaseModel):
    """What is being done. state: how far it is, in words. total: None where the end is not known."""

    model_config = ConfigDict(frozen=True, str_max_length=2000, allow_inf_nan=False)

    description: str
    state: str
    done: float
    total: float | None = None


class ProgramNote(BaseModel):
    """process_start: of `find_process_start`, so that another process with the same id is not taken for this one.
    began, updated: seconds since 1970."""

    model_config = ConfigDict(frozen=True, str_max_length=2000, allow_inf_nan=False)

    program: str
    process: int = Field(default_factory=os.getpid, gt=0)
    process_start: str
    host: str = Field(default_factory=socket.gethostname)
    began: Moment = Field(default_factory=time.time)
    updated: Moment = 0.0
    tasks: tuple[TaskNote, ...] = ()
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        return self.exit_code is None and is_process(self.process, self.process_start, self.host)


class NoteWriter:
    """Writes a program's note again when it has changed, and every INTERVAL_S while something is being done."""

    def __init__(self, folder: Path, program: str) -> None:
        self._path = folder / f"{program}.json"
        self._note = ProgramNote(program=program, process_start=find_process_start(os.getpid()))
        self._lock = threading.RLock()
        self._tasks: list[Progress] = []
        self._ticker: threading.Thread | None = None

    def begin(self, task: Progress) -> None:
        """From now on the note says how far this is."""
        with self._lock:
            self._tasks.append(task)
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="note", daemon=True)
                self._ticker.start()

    def end(self, task: Progress) -> None:
        with self._lock:
            self._tasks.remove(task)

    def _tick(self) -> None:
        """Until nothing has been done for INTERVAL_S: tasks that follow each other share a thread."""
        while True:
            with self._lock:
                tasks = tuple(_note_task(task) for task in self._tasks)
                if tasks != self._note.tasks:
                    self.update(tasks=tasks)
                elif not tasks:
                    self._ticker = None
                    return
            time.sleep(INTERVAL_S)

    def update(self, **changes: object) -> None:
        with self._lock:
            if self._note.exit_code is not None:
                return
            self._note = self._note.model_copy(update={**changes, "updated": time.time()})
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_text(self._note.model_dump_json(), encoding="utf-8")
                os.replace(temporary, self._path)


def _note_task(task: Progress) -> TaskNote:
    said = shorten(task.description, 1000)
    return TaskNote(description=said, state=shorten(task.state(), 1000), done=task.done, total=task.total)


@contextmanager
def noted(program: str, folder: Path | str | None = None) -> Iterator[NoteWriter | None]:
    """A context around a program: its note is there from the beginning, and says afterwards how it ended, unless the
    process was killed. The body tells the exit code by `update(exit_code=...)`; an exception counts as 1. folder: else
    that of the variable."""
    folder = folder or os.environ.get(NOTES_VARIABLE)
    if not folder:
        yield None
        return
    writer = NoteWriter(Path(folder), program)
    writer.update()
    try:
        yield writer
    except BaseException:
        writer.update(tasks=(), exit_code=1)
        raise
    writer.update(tasks=(), exit_code=0)


def read_notes(folder: Path) -> list[ProgramNote]:
    """Those of a folder; what is no note is left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValidationError), path.open("rb") as file:
            found.append(ProgramNote.model_validate_json(file.read(MAX_BYTES)))
    return found


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
        # Of "1234 (name) S 1 ...", whose name may hold anything, the state and the 22nd value.
        state, *values = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in ("Z", "X") else f"{boot}:{values[18]}"
