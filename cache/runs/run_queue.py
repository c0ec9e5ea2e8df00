"""A queue of runs in an output folder: the runs to train in turn, and the outcome of each run.

    <output>/.queue/entries.json  the entries in order; each change replaces the file
    <output>/.queue/edit.lock     held while the entries are changed
    <output>/.queue/work.lock     held by the program that processes the queue (stages/queue.py)
    <output>/.queue/queue.json    the record of this program (schemas/cli/process_record.py)

Any number of pages and programs may change the queue at the same time, also while it is processed. If the program is
killed, its entry stays "running". The next program begins with this entry, and `latentpress run` skips finished work.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cache.store.files import FileLock, explained, make_folders
from schemas.cli.process_record import MAX_CHARS, Moment, ProcessRecord, storable_text
from schemas.errors import LatentpressError
from schemas.json_records import Record, RecordError

FOLDER = ".queue"  # a run's name can't begin with a dot
MAX_ENTRIES = 1000
EntryState = Literal["waiting", "running", "finished", "failed"]
UNFINISHED: tuple[EntryState, ...] = ("running", "waiting")


class QueueError(LatentpressError):
    """The queue can't be read, changed or processed."""


class QueueEntry(BaseModel):
    """A run. config: absolute path of its configuration, which is read when the run starts. overrides: values of --set.
    folder: the run's folder when it was added. attempts: number of times the run was started. reason,
    advice: reason and next step of a failed run."""

    model_config = ConfigDict(str_max_length=MAX_CHARS, allow_inf_nan=False)

    id: int = Field(gt=0)
    config: str
    overrides: tuple[str, ...] = ()
    folder: str
    state: EntryState = "waiting"
    began: Moment | None = None
    ended: Moment | None = None
    attempts: int = 0
    reason: str = ""
    advice: str = ""

    @property
    def run(self) -> str:
        return Path(self.folder).name


class QueueState(Record):
    """The state of a queue. entries: in the order of their turns. is_on: whether the queue is to be processed. It
    is on from its start until it is empty or a person stops it, even without a running program, for example after a
    power cut."""

    model_config = ConfigDict(frozen=False)

    entries: list[QueueEntry] = Field(default=[], max_length=MAX_ENTRIES)
    next_id: int = Field(default=1, gt=0)
    is_on: bool = False

    def find(self, number: int) -> QueueEntry:
        """Return the entry with this id. Raises QueueError if it does not exist."""
        for entry in self.entries:
            if entry.id == number:
                return entry
        available = ", ".join(str(entry.id) for entry in self.entries) or "none"
        raise QueueError(f"entry {number} does not exist; the queue has: {available}", "latentpress queue")

    @property
    def unfinished(self) -> list[QueueEntry]:
        """Return the entries that are not finished, in the order of their turns; a running entry comes first."""
        entries = [entry for entry in self.entries if entry.state in UNFINISHED]
        return sorted(entries, key=lambda entry: entry.state != "running")


class RunQueue:
    """The queue of an output folder."""

    def __init__(self, output: Path) -> None:
        self.folder = output / FOLDER
        self._path = self.folder / "entries.json"

    def read(self) -> QueueState:
        """Return the current queue; it is empty if its file does not exist. Raises QueueError if its file is
        damaged."""
        try:
            with explained(str(self._path)):
                return QueueState.read(self._path)
        except FileNotFoundError:
            return QueueState()
        except RecordError as error:
            raise QueueError(str(error), "move the file away, and add the runs again") from error

    def worker(self) -> ProcessRecord | None:
        """Return the record of the program that currently processes the queue, on this or another machine."""
        record = ProcessRecord.try_read(self.folder / "queue.json")
        return record if record is not None and (record.is_running or record.runs_elsewhere) else None

    def runs(self, folder: Path) -> bool:
        """Whether the queue is currently training the run of this folder; False for a queue that can't be read."""
        with suppress(LatentpressError):
            return any(entry.state == "running" and entry.folder == str(folder) for entry in self.read().entries)
        return False

    @contextmanager
    def _editing(self) -> Iterator[QueueState]:
        """Context with the queue, which only the body may change. After an exception, the changes are dropped."""
        with explained(str(self.folder)):
            make_folders(self.folder)
            with FileLock(self.folder / "edit.lock") as edit:
                edit.take(wait_s=math.inf)
                state = self.read()
                yield state
                state.write(self._path)

    def add(self, config: Path, overrides: Sequence[str], folder: Path) -> QueueEntry:
        """Add a run at the end. Raises QueueError if a waiting or running entry has the same folder."""
        with self._editing() as state:
            for entry in state.unfinished:
                if entry.folder == str(folder):
                    message = f"entry {entry.id} ({entry.state}) uses the same folder, {folder}"
                    raise QueueError(message, "give this run a separate folder: --set train.run=NAME")
            if len(state.entries) >= MAX_ENTRIES:
                raise QueueError(f"the queue is full: it has {MAX_ENTRIES} entries", "latentpress queue clear")
            path, words = str(config.absolute()), tuple(overrides)
            entry = QueueEntry(id=state.next_id, config=path, overrides=words, folder=str(folder))
            state.entries.append(entry)
            state.next_id += 1
        return entry

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove entries. If an entry is running, its program stops it and continues with the next entry."""
        with self._editing() as state:
            removed = {state.find(number).id for number in numbers}
            state.entries = [entry for entry in state.entries if entry.id not in removed]

    def clear(self) -> int:
        """Remove the finished and failed entries, and return their number."""
        with self._editing() as state:
            count = len(state.entries)
            state.entries = [entry for entry in state.entries if entry.state in UNFINISHED]
        return count - len(state.entries)

    def move(self, number: int, places: int) -> None:
        """Move an entry by `places`, towards the start of the queue if negative, and at most to the start or end."""
        with self._editing() as state:
            position = state.entries.index(state.find(number))
            state.entries.insert(max(position + places, 0), state.entries.pop(position))

    def retry(self, number: int) -> None:
        """Change a finished or failed entry to waiting, in the same place."""
        with self._editing() as state:
            entry = state.find(number)
            if entry.state in UNFINISHED:
                raise QueueError(f"entry {number} is {entry.state}", "wait until it has ended")
            entry.state, entry.reason, entry.advice, entry.ended = "waiting", "", "", None

    def switch(self, is_on: bool) -> None:
        """Switch the queue on or off. When it is switched off, the program that processes it ends."""
        with self._editing() as state:
            state.is_on = is_on

    def take_next(self) -> QueueEntry | None:
        """Mark the next entry as running, and return it. Returns None if the queue is off or has no unfinished entry,
        and switches it off."""
        with self._editing() as state:
            if not state.is_on or not state.unfinished:
                state.is_on = False
                return None
            entry = state.unfinished[0]
            entry.state, entry.began, entry.ended = "running", time.time(), None
            entry.attempts += 1
            return entry

    def finish(self, number: int, state: EntryState, reason: str = "", advice: str = "") -> None:
        """Record the end of a running entry, unless the entry has been removed. state: "waiting" if it was stopped."""
        with self._editing() as queue:
            for entry in queue.entries:
                if entry.id == number:
                    entry.state, entry.reason, entry.advice = state, storable_text(reason), storable_text(advice)
                    entry.ended = None if state in UNFINISHED else time.time()

    @contextmanager
    def working(self, wait_s: float) -> Iterator[None]:
        """Context in which no other program processes this queue. Raises QueueError if another program still processes
        it after `wait_s` seconds."""
        with explained(str(self.folder)):
            make_folders(self.folder)
            work = FileLock(self.folder / "work.lock")
        with work:
            with explained(str(self.folder)):
                is_alone = work.take(wait_s)
            if not is_alone:
                worker = self.worker()
                holder = f": process {worker.process} on {worker.host}" if worker else ""
                raise QueueError(f"another program is processing this queue{holder}", "latentpress queue")
            yield
