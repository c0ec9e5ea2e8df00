"""Programs that the page starts, stops and finds again: the ones of the command line, as processes of their own.

Each has a session of its own, so it goes on when the page's process ends, and its log and note are files under
<output>/.ui/, so a page that is opened later finds it again. Several pages may share the folder.

    <output>/.ui/lock               held while something is started
    <output>/.ui/starts/<job>.json  the record of the last start (schemas/cli/process_record.py)
    <output>/.ui/logs/<job>-*.log   what each start printed
    <output>/.ui/notes/<job>/       the records of the job's programs, by themselves
"""

import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cache.runs.run_queue import RunQueue
from cache.store.files import explained, make_folders
from cache.store.layout import STAGE_PROGRAMS
from cache.store.locks import FileLock
from schemas.cli.process_record import (
    NOTES_VARIABLE,
    Moment,
    ProcessRecord,
    find_process_start,
    read_notes,
)
from schemas.cli.starting import start_program
from schemas.errors import LatentpressError

FOLDER = ".ui"  # a run's name can't begin with a dot
KEPT_LOGS = 20  # of each job
POLL_S = 0.2
#: What each does, in the order in which they follow each other.
STAGES = {
    "discover": "finds media and captions",
    "features": "compares and measures pictures and clips",
    "caption": "describes what has no caption",
    "masks": "makes masks where there are none",
    "bucket": "plans samples, texts and units",
    "encode-text": "captions to embeddings",
    "encode-latents": "pictures and clips to latents",
    "encode-vision": "pictures and clips to DINOv2 features",
    "index": "joins plan and shards",
    "train": "trains the adapter or model",
    "decode": "decodes the validation latents",
    "score": "scores the decoded samples",
}
#: Jobs that the page can start, by their names in addresses and files: the program of each, and its words.
JOBS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*STAGES, "run", "report", "preview")},
    "preview-plan": ("preview", "--plan"),
    "queue": ("queue", "run"),
    "thumbnails": ("pages.thumbnails",),
    "caption-thumbnails": ("pages.thumbnails",),
}


NEED_OPTIONS = ("caption-thumbnails",)  # jobs that a page of their own starts, as they need to be told what of


def list_conflicts(name: str) -> list[str]:
    """Jobs beside which this one is not started: `run` and the stages that it runs, and the queue, which runs `run`."""
    whole = ("run", "queue")
    if name in whole:
        return [*STAGES, *(other for other in whole if other != name)]
    return [*whole] if name in STAGES else []


class Refused(LatentpressError):
    """Raised where what was asked for can't be done now."""


class Start(ProcessRecord):
    """A start of a job, which is its `program`. log: name of the file. stop_asked: when it was told to stop."""

    log: str
    stop_asked: Moment | None = None


class ChildPrograms:
    """The jobs of one output folder. argv: the options that all of them get. jobs: those that there are."""

    def __init__(self, output: Path, argv: Sequence[str], jobs: Mapping[str, tuple[str, ...]] = JOBS) -> None:
        self._folder, self._argv, self._jobs, self.queue = output / FOLDER, list(argv), jobs, RunQueue(output)
        self._children: dict[str, subprocess.Popen] = {}
        self._restarting: set[str] = set()
        self._lock = threading.RLock()
        self._holds_file = False  # the thread that has the lock has that of the folder, too

    def retry(self, name: str) -> Start:
        """Start a stage so that it tries again what it set aside, also of files that have not changed."""
        return self.start(name, *(["--retry-set-aside"] if name in STAGE_PROGRAMS.values() else []))

    def start(self, name: str, *more: str, report: Path | None = None) -> Start:
        """Start a job. Refused where it, or one that it conflicts with, is at work. more: options. report: the file
        that gets its standard output, which otherwise is in the log, too."""
        program, *words = (*self._jobs[name], *more)
        with self._locked():
            for other in (name, *list_conflicts(name)):
                self._refuse_beside(name, other)
            log = self._new_log(name)
            notes = self._folder / "notes" / name
            shutil.rmtree(notes, ignore_errors=True)
            with log.open("wb") as file, explained(str(log)), (report or log).open("ab") as standard_output:
                child = start_program(
                    program,
                    [*self._argv, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=standard_output if report else file,
                    stderr=file,
                    start_new_session=True,
                    env={**os.environ, NOTES_VARIABLE: str(notes)},
                )
            self._children[name] = child
            started_at = find_process_start(child.pid)
            start = Start(program=name, process=child.pid, process_start=started_at, log=log.name)
            self._write(start)
            return start

    def _refuse_beside(self, name: str, other: str) -> None:
        last: ProcessRecord | None = self.last_start(other)
        if other == "queue" and not (last and last.is_running):  # it may have been started on a command line
            last = self.queue.worker()
        if last is None or not (last.is_running or last.runs_elsewhere):
            return
        where = "" if last.is_running else f" on {last.host}"
        began = time.strftime("%H:%M:%S", time.localtime(last.began))
        what = f"{other} is at work{where} already" if other == name else f"{name} can't start beside {other}{where}"
        step = f"wait for it, or stop {other} first" if not where else f"if it is not, remove {self._path(other)}"
        raise Refused(f"{what}: it was started at {began}, process {last.process}", step)

    def stop(self, name: str) -> None:
        """Send SIGTERM, after which each program ends in its own way, and keeps what is done."""
        with self._locked():
            last = self._require_running(name)
            if last.stop_asked is not None:
                step = "wait until it has kept what is done, or kill it: then it keeps what was kept before"
                raise Refused(f"{name} was told to stop already", step)
            self._signal(last, signal.SIGTERM)
            self._write(last.model_copy(update={"stop_asked": time.time()}))

    def kill(self, name: str) -> None:
        """Kill one that was told to stop and does not."""
        last = self._require_running(name)
        if last.stop_asked is None:
            raise Refused(f"{name} was not told to stop yet", "stop it first")
        self._signal(last, signal.SIGKILL)

    def _require_running(self, name: str) -> Start:
        last = self.last_start(name)
        if last is None or not last.is_running:
            raise Refused(f"{name} is not at work, or was not started from this page", "stop it where it was started")
        return last

    def _signal(self, start: Start, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(start.process, number)

    def restart(self, name: str) -> None:
        """Stop it and start it again when it has ended; start it where it is not at work."""
        last = self.last_start(name)
        if last is None or not last.is_running:
            self.start(name)
            return
        with self._lock:
            if name in self._restarting:
                raise Refused(f"{name} is being restarted already", "wait until it has stopped")
            self._restarting.add(name)
        if last.stop_asked is None:
            self.stop(name)
        threading.Thread(target=self._start_after, args=(last,), name=f"restart {name}", daemon=True).start()

    def _start_after(self, last: Start) -> None:
        try:
            while self._reaped(last).is_running:
                time.sleep(POLL_S)
            with suppress(LatentpressError):  # another page was faster
                self.start(last.program)
        finally:
            self._restarting.discard(last.program)

    def is_restarting(self, name: str) -> bool:
        return name in self._restarting

    def last_start(self, name: str) -> Start | None:
        """Read the record of the last start; None where it was never started from a page."""
        start = Start.try_read(self._path(name))
        return None if start is None else self._reaped(start)

    def may_begin(self, name: str) -> bool:
        """Whether a page may start it without being asked: not where it was stopped or has failed."""
        last = self.last_start(name)
        return last is None or last.exit_code == 0

    def _reaped(self, start: Start) -> Start:
        """Add its exit code, if it has ended: a child of this page's tells it, any other by its note."""
        if start.exit_code is not None or start.is_running:
            return start
        child, code, when = self._children.get(start.program), None, time.time()
        for note in self.notes(start.program):
            if note.process == start.process and note.exit_code is not None:
                code, when = note.exit_code, note.updated
        if child is not None and child.pid == start.process and start.host == socket.gethostname():
            code = child.wait()
        if code is None:
            return start
        ended = start.model_copy(update={"exit_code": code, "updated": when})
        with suppress(LatentpressError), self._locked():
            if Start.try_read(self._path(start.program)) == start:  # it was not started again meanwhile
                self._write(ended)
        return ended

    def notes(self, name: str) -> list[ProcessRecord]:
        """The records of the job's last start, and those of the programs that it started."""
        return read_notes(self._folder / "notes" / name)

    def logs(self, name: str) -> list[Path]:
        """The logs of the job's starts, the newest first."""
        return sorted((self._folder / "logs").glob(f"{name}-[0-9]*.log"), key=lambda path: path.name, reverse=True)

    def _new_log(self, name: str) -> Path:
        folder = self._folder / "logs"
        make_folders(folder)
        for old in self.logs(name)[KEPT_LOGS - 1 :]:
            old.unlink(missing_ok=True)
        return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.log"

    def _path(self, name: str) -> Path:
        return self._folder / "starts" / f"{name}.json"

    def _write(self, start: Start) -> None:
        start.write(self._path(start.program))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """While the body runs, nobody else starts anything in this folder."""
        with self._lock, explained(str(self._folder)):
            if self._holds_file:
                yield
                return
            make_folders(self._folder)
            with FileLock(self._folder / "lock") as lock:
                lock.take(wait_s=math.inf)
                self._holds_file = True
                try:
                    yield
                finally:
                    self._holds_file = False
