"""Programs that the page starts, stops and finds again: the ones of the command line, as processes of their own.

Each has a session of its own, so it goes on when the page's process ends, and its log and note are files under
<output>/.ui/, so a page that is opened later finds it again. Several pages may share the folder.

    <output>/.ui/lock               held while something is started
    <output>/.ui/starts/<job>.json  the last start: process, when it began, log
    <output>/.ui/logs/<job>-*.log   what each start printed
    <output>/.ui/notes/<job>/       what the programs say of themselves (schemas/cli/program_note.py)
"""

import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from cache.store.files import explained, replacing
from schemas.cli.program_note import NOTES_VARIABLE, Moment, ProgramNote, find_process_start, is_process, read_notes
from schemas.errors import LatentpressError
from stages.pages.ui.jobs import JOBS, list_conflicts

FOLDER = ".ui"  # a run's name can't begin with a dot
KEPT_LOGS = 20  # of each job
POLL_S = 0.2


class Refused(LatentpressError):
    """What was asked for can't be done now."""


class Start(BaseModel):
    """A start of a job. process_start: of `find_process_start`. stop_asked: when it was told to stop."""

    model_config = ConfigDict(frozen=True)

    job: str
    process: int
    process_start: str
    host: str
    began: Moment
    log: str
    stop_asked: Moment | None = None
    ended: Moment | None = None
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        return self.exit_code is None and is_process(self.process, self.process_start, self.host)

    @property
    def runs_elsewhere(self) -> bool:
        """Or ran: another machine's processes are not seen from here."""
        return self.exit_code is None and self.host != socket.gethostname()


class ChildPrograms:
    """The jobs of one output folder. argv: the options that all of them get."""

    def __init__(self, output: Path, argv: Sequence[str]) -> None:
        self._folder, self._argv = output / FOLDER, list(argv)
        self._children: dict[str, subprocess.Popen] = {}
        self._restarting: set[str] = set()
        self._lock = threading.RLock()

    def start(self, name: str) -> Start:
        """Refused where it, or one that it conflicts with, is at work."""
        job = JOBS[name]
        with self._locked():
            for other in (name, *list_conflicts(name)):
                self._refuse_beside(name, other)
            log = self._new_log(name)
            notes = self._folder / "notes" / name
            shutil.rmtree(notes, ignore_errors=True)
            command = [sys.executable, "-P", "-m", job.module, *self._argv, *job.words]
            with log.open("wb") as file, explained(str(log)):
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, NOTES_VARIABLE: str(notes)},
                )
            self._children[name] = child
            start = Start(
                job=name,
                process=child.pid,
                process_start=find_process_start(child.pid),
                host=socket.gethostname(),
                began=time.time(),
                log=log.name,
            )
            self._write(start)
            return start

    def _refuse_beside(self, name: str, other: str) -> None:
        last = self.last_start(other)
        if last is None or not (last.is_running or last.runs_elsewhere):
            return
        where = "" if last.is_running else f" on {last.host}"
        began = time.strftime("%H:%M:%S", time.localtime(last.began))
        what = f"{other} is at work{where} already" if other == name else f"{name} can't start beside {other}{where}"
        step = f"wait for it, or stop {other} first" if not where else f"if it is not, remove {self._path(other)}"
        raise Refused(f"{what}: it was started at {began}, process {last.process}", step)

    def stop(self, name: str) -> None:
        """SIGTERM, after which each program ends in its own way, and keeps what is done."""
        last = self._require_running(name)
        if last.stop_asked is not None:
            step = "wait until it has kept what is done, or kill it: then it keeps what was kept before"
            raise Refused(f"{name} was told to stop already", step)
        self._signal(last, signal.SIGTERM)
        self._write(last.model_copy(update={"stop_asked": time.time()}))

    def kill(self, name: str) -> None:
        """For one that was told to stop and does not."""
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
                self.start(last.job)
        finally:
            self._restarting.discard(last.job)

    def is_restarting(self, name: str) -> bool:
        return name in self._restarting

    def last_start(self, name: str) -> Start | None:
        """None where it was never started from a page."""
        try:
            start = Start.model_validate_json(self._path(name).read_bytes())
        except (OSError, ValidationError):
            return None
        return self._reaped(start)

    def _reaped(self, start: Start) -> Start:
        """With its exit code, if it has ended: a child of this page's tells it, any other by its note."""
        if start.exit_code is not None or start.is_running:
            return start
        child, code, when = self._children.get(start.job), None, time.time()
        own = [note for note in self.notes(start.job) if note.process == start.process and note.exit_code is not None]
        if own:
            code, when = own[0].exit_code, own[0].updated
        if child is not None and child.pid == start.process and start.host == socket.gethostname():
            code = child.wait()
        if code is None:
            return start
        ended = start.model_copy(update={"exit_code": code, "ended": when})
        with self._lock, suppress(OSError):
            self._write(ended)
        return ended

    def notes(self, name: str) -> list[ProgramNote]:
        """Of the job's last start, and of the programs that it started."""
        return read_notes(self._folder / "notes" / name)

    def logs(self, name: str) -> list[Path]:
        """The newest first."""
        return sorted((self._folder / "logs").glob(f"{name}-[0-9]*.log"), key=lambda path: path.name, reverse=True)

    def _new_log(self, name: str) -> Path:
        folder = self._folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for old in self.logs(name)[KEPT_LOGS - 1 :]:
            old.unlink(missing_ok=True)
        return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.log"

    def _path(self, name: str) -> Path:
        return self._folder / "starts" / f"{name}.json"

    def _write(self, start: Start) -> None:
        path = self._path(start.job)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(start.model_dump_json(), encoding="utf-8")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else starts anything in this folder meanwhile."""
        with explained(str(self._folder)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock, (self._folder / "lock").open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
