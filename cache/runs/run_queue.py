"""A queue of runs below an output folder: the runs to train one after the other, and the outcome of each run.

    <output>/.queue/entries.json  the entries in their order, replaced whole
    <output>/.queue/edit.lock     held while they are changed
    <output>/.queue/work.lock     held by the program that works them off (stages/queue.py)
    <output>/.queue/queue.json    that program's record (schemas/cli/process_record.py)

Any number of pages and programs may change it at once, also while it is worked off. An entry that is running stays so
when its program is killed: the next one begins with it, and `latentpress run` skips finished work.
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
MOST_ENTRIES = 1000
EntryState = Literal["waiting", "running", "finished", "failed"]
UNFINISHED: tuple[EntryState, ...] = ("running", "waiting")


class QueueError(LatentpressError):
    """A change of the queue that can't be made."""


class QueueEntry(BaseModel):
    """A run: config is the absolute path of its file, which is read when its turn comes, overrides are the
    values of --set. folder: the run's folder when it was added. attempts: number of times the run was started. reason,
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
    """The state of a queue. entries: in the order of their turns. is_on: whether the queue is to be processed: from its
    start until it is empty or somebody stops it, even if no program is running, for example after a power cut."""

    model_config = ConfigDict(frozen=False)

    entries: list[QueueEntry] = Field(default=[], max_length=MOST_ENTRIES)
    next_id: int = Field(default=1, gt=0)
    is_on: bool = False

    def find(self, number: int) -> QueueEntry:
        """The entry of this id. QueueError if there is none."""
        for entry in self.entries:
            if entry.id == number:
                return entry
        known = ", ".join(str(entry.id) for entry in self.entries) or "none"
        raise QueueError(f"the queue has no entry {number}; it has: {known}", "latentpress queue")

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
        """The queue as it is now; empty if it has no file. QueueError if its file is damaged."""
        try:
            with explained(str(self._path)):
                return QueueState.read(self._path)
        except FileNotFoundError:
            return QueueState()
        except RecordError as error:
            raise QueueError(str(error), "move it away, and add the runs again") from error

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
        """The queue, which the body changes while nobody else does. After an exception it is as before."""
        with explained(str(self.folder)):
            make_folders(self.folder)
            with FileLock(self.folder / "edit.lock") as edit:
                edit.take(wait_s=math.inf)
                state = self.read()
                yield state
                state.write(self._path)

    def add(self, config: Path, overrides: Sequence[str], folder: Path) -> QueueEntry:
        """Add a run at the end. QueueError if an entry that is not finished has its folder."""
        with self._editing() as state:
            for other in state.unfinished:
                if other.folder == str(folder):
                    message = f"entry {other.id}, which is {other.state}, trains in {folder}, too"
                    raise QueueError(message, "give this one a folder of its own: --set train.run=NAME")
            if len(state.entries) >= MOST_ENTRIES:
                raise QueueError(f"the queue has {MOST_ENTRIES} entries", "latentpress queue clear")
            path, words = str(config.absolute()), tuple(overrides)
            entry = QueueEntry(id=state.next_id, config=path, overrides=words, folder=str(folder))
            state.entries.append(entry)
            state.next_id += 1
        return entry

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove entries. The program that runs one of them stops it, and continues with the next."""
        with self._editing() as state:
            removed = {state.find(number).id for number in numbers}
            state.entries = [entry for entry in state.entries if entry.id not in removed]

    def clear(self) -> int:
        """Remove the finished and the failed entries; returns their number."""
        with self._editing() as state:
            count = len(state.entries)
            state.entries = [entry for entry in state.entries if entry.state in UNFINISHED]
        return count - len(state.entries)

    def move(self, number: int, places: int) -> None:
        """Move an entry by so many places, up if they are negative, as far as there are any."""
        with self._editing() as state:
            position = state.entries.index(state.find(number))
            state.entries.insert(max(position + places, 0), state.entries.pop(position))

    def retry(self, number: int) -> None:
        """Let a finished or failed entry wait again, in its place."""
        with self._editing() as state:
            entry = state.find(number)
            if entry.state in UNFINISHED:
                raise QueueError(f"entry {number} is {entry.state}", "wait for its end")
            entry.state, entry.reason, entry.advice, entry.ended = "waiting", "", "", None

    def switch(self, is_on: bool) -> None:
        """Switch the queue on or off. When it is switched off, the program that processes it ends."""
        with self._editing() as state:
            state.is_on = is_on

    def take_next(self) -> QueueEntry | None:
        """Mark the next entry as running, and return it. None if the queue is off or has nothing to do; then it is
        off."""
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
                who = f": process {worker.process} on {worker.host}" if worker else ""
                raise QueueError(f"another program works this queue off{who}", "latentpress queue")
            yield
