"""Programs that the page starts, stops and finds again: the command line's programs, as separate processes.

Each program has its own session, so it continues when the page's process ends. Its log and records are files under
<output>/.ui/, so a page that is opened later finds it again. Several pages may share the folder.

    <output>/.ui/lock               held while a program is started or stopped
    <output>/.ui/starts/<job>.json  the record of the last start (schemas/cli/process_record.py)
    <output>/.ui/logs/<job>-*.log   output of each start
    <output>/.ui/notes/<job>/       the records that the job's programs write
"""

import math
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from cache.runs.run_queue import RunQueue
from cache.store.files import FileLock, explained, make_folders
from cache.store.layout import STAGE_PROGRAMS
from schemas.cli.process_record import NOTES_VARIABLE, Moment, ProcessRecord, find_process_start, read_notes
from schemas.cli.starting import start_program
from schemas.errors import LatentpressError

FOLDER = ".ui"  # a run's name can't begin with a dot
KEPT_LOGS = 20  # logs per job
POLL_S = 0.2
#: Stage -> its description, in the order in which the stages run.
STAGES = {
    "discover": "finds media and captions",
    "features": "compares and measures pictures and clips",
    "caption": "makes captions for items without a caption",
    "masks": "makes masks for items without a mask",
    "bucket": "plans samples, texts and units",
    "encode-text": "encodes captions to embeddings",
    "encode-latents": "encodes pictures and clips to latents",
    "encode-vision": "encodes pictures and clips to DINOv2 features",
    "index": "joins plan and shards",
    "train": "trains the adapter or model",
    "decode": "decodes the validation latents",
    "score": "scores the decoded samples",
}
#: Jobs that the page can start: name in addresses and files -> program and its arguments.
JOBS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*STAGES, "run", "report", "preview")},
    "preview-plan": ("preview", "--plan"),
    "queue": ("queue", "run"),
    "thumbnails": ("pages.thumbnails",),
    "caption-thumbnails": ("pages.thumbnails",),
}


NEED_OPTIONS = ("caption-thumbnails",)  # jobs that need options (the items), so that only their own page can start them


def list_conflicts(name: str) -> list[str]:
    """Jobs that must not run at the same time as this job: `run` conflicts with its stages, and the queue, which starts
    `run`, conflicts with `run` and the stages."""
    runners = ("run", "queue")
    if name in runners:
        return [*STAGES, *(job for job in runners if job != name)]
    return [*runners] if name in STAGES else []


class Refused(LatentpressError):
    """Raised if the requested action is not possible now."""


class Start(ProcessRecord):
    """A start of a job; `program` is the job's name. log: name of the log file. stop_asked: time at which the page sent
    SIGTERM, None if it did not."""

    log: str
    stop_asked: Moment | None = None


class ChildPrograms:
    """The jobs of one output folder. argv: options that all jobs get."""

    def __init__(self, output: Path, argv: Sequence[str]) -> None:
        self._folder, self._argv, self.queue = output / FOLDER, list(argv), RunQueue(output)
        self._children: dict[str, subprocess.Popen] = {}
        self._restarting: set[str] = set()

    def retry(self, name: str) -> Start:
        """Start a stage so that it tries rejected items again, even if their files have not changed."""
        return self.start(name, *(["--retry-rejects"] if name in STAGE_PROGRAMS.values() else []))

    def start(self, name: str, *more: str) -> Start:
        """Start a job. Raises Refused if the job, or a job that it conflicts with, is running. more: further
        options."""
        program, *words = (*JOBS[name], *more)
        with self._locked():
            for conflicting_job in (name, *list_conflicts(name)):
                self._refuse_conflict(name, conflicting_job)
            log, notes = self._new_log(name), self._folder / "notes" / name
            shutil.rmtree(notes, ignore_errors=True)
            environment = {**os.environ, NOTES_VARIABLE: str(notes)}
            with log.open("wb") as file:
                child = start_detached(program, [*self._argv, *words], file, file, environment)
            self._children[name] = child
            started_at = find_process_start(child.pid)
            start = Start(program=name, process=child.pid, process_start=started_at, log=log.name)
            start.write(self._path(name))
            return start

    def _refuse_conflict(self, name: str, running_job: str) -> None:
        last: ProcessRecord | None = self.last_start(running_job)
        if running_job == "queue" and not (last and last.is_running):
            last = self.queue.worker()  # the queue may have been started on a command line
        if last is None or not (last.is_running or last.runs_elsewhere):
            return
        place = "" if last.is_running else f" on {last.host}"
        began = time.strftime("%H:%M:%S", time.localtime(last.began))
        problem = f"{name} is already running{place}"
        if running_job != name:
            problem = f"{name} can't start while {running_job} is running{place}"
        step = f"wait until it has ended, or stop {running_job} first"
        if place:
            step = f"if it is not running any more, remove {self._path(running_job)}"
        raise Refused(f"{problem}: it was started at {began}, process {last.process}", step)

    def stop(self, name: str) -> None:
        """Send SIGTERM to a job. Its program then ends in its own way, and keeps the work that is done."""
        with self._locked():
            last = self._require_running(name)
            if last.stop_asked is not None:
                step = "wait until it has saved its work, or kill it, which loses the work since the last save"
                raise Refused(f"{name} is already stopping", step)
            with suppress(ProcessLookupError):  # the process has just ended
                os.kill(last.process, signal.SIGTERM)
            last.model_copy(update={"stop_asked": time.time()}).write(self._path(name))

    def kill(self, name: str) -> None:
        """Send SIGKILL to a job that `stop` did not end. Raises Refused if `stop` was not called before."""
        last = self._require_running(name)
        if last.stop_asked is None:
            raise Refused(f"{name} can only be killed after it was stopped", "stop it first")
        with suppress(ProcessLookupError):
            os.kill(last.process, signal.SIGKILL)

    def _require_running(self, name: str) -> Start:
        last = self.last_start(name)
        if last is None or not last.is_running:
            raise Refused(f"{name} is not running, or was not started from this page", "stop it in its own terminal")
        return last

    def restart(self, name: str) -> None:
        """Stop a job and start it again when it has ended. A job that is not running is started at once."""
        last = self.last_start(name)
        if last is None or not last.is_running:
            self.start(name)
            return
        if name in self._restarting:
            raise Refused(f"{name} is already being restarted", "wait until it has stopped")
        if last.stop_asked is None:
            self.stop(name)
        self._restarting.add(name)
        threading.Thread(target=self._start_after, args=(last,), name=f"restart {name}", daemon=True).start()

    def _start_after(self, last: Start) -> None:
        try:
            while last.is_running:
                time.sleep(POLL_S)
            with suppress(LatentpressError):  # another page was faster
                self.start(last.program)
        finally:
            self._restarting.discard(last.program)

    def is_restarting(self, name: str) -> bool:
        return name in self._restarting

    def last_start(self, name: str) -> Start | None:
        """The record of a job's last start, with the exit code once the job has ended. The exit code comes from the
        program's own record or, if the program was killed, from this page's child process. None if the job was never
        started from a page."""
        start = Start.try_read(self._path(name))
        if start is None or start.is_running:
            return start
        for note in self.notes(name):
            if note.process == start.process and note.exit_code is not None:
                return start.model_copy(update={"exit_code": note.exit_code, "updated": note.updated})
        child = self._children.get(name)
        if child is None or child.pid != start.process:
            return start
        log = self._folder / "logs" / start.log
        end_time = log.stat().st_mtime if log.exists() else start.began
        return start.model_copy(update={"exit_code": child.wait(), "updated": end_time})

    def may_begin(self, name: str) -> bool:
        """Whether a page may start a job without a click of the user: False if the job was stopped, has failed or is
        running."""
        last = self.last_start(name)
        return last is None or last.exit_code == 0

    def notes(self, name: str) -> list[ProcessRecord]:
        """The records of the job's last start, and of the programs that this start has started."""
        return read_notes(self._folder / "notes" / name)

    def logs(self, name: str) -> list[Path]:
        """The logs of the job's starts, newest first."""
        return sorted((self._folder / "logs").glob(f"{name}-[0-9]*.log"), key=lambda path: path.name, reverse=True)

    def _new_log(self, name: str) -> Path:
        folder = self._folder / "logs"
        make_folders(folder)
        for old_log in self.logs(name)[KEPT_LOGS - 1 :]:
            old_log.unlink(missing_ok=True)
        return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.log"

    def _path(self, name: str) -> Path:
        return self._folder / "starts" / f"{name}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Context in which no other process starts or stops a job of this folder."""
        with explained(str(self._folder)):
            make_folders(self._folder)
            with FileLock(self._folder / "lock") as lock:
                lock.take(wait_s=math.inf)
                yield


def start_detached(
    program: str, words: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen:
    """Start a program in its own session, so that signals of the page's terminal do not reach it."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    return start_program(program, words, start_new_session=True, env=environment, **streams)
