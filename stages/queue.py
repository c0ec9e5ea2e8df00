"""queue: runs one after the other, each a `latentpress run` with a configuration; one that fails stops none after it.

The queue is kept under `output` (cache/runs/run_queue.py) and changed by this program and by the page of
`latentpress ui`. `queue run` works it off; when it is killed, the next `queue run` goes on with what was running.
"""

import os
import re
import shlex
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from cache.runs.run_queue import EntryState, QueueEntry, RunQueue
from cache.runs.training_run import is_running, read_failure
from cache.store.files import FileLock, check_folder, explained
from schemas.cli.console import INCOMPLETE, LOGS, OK, USAGE, Console, Options, Report, make_app
from schemas.cli.process_record import ProcessRecord, record_program
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.interruption import StopHandler, hangup_ignored
from schemas.text_format import describe_exit
from stages.engines.stage_processes import StageProcesses
from stages.pages.ui.child_programs import ChildPrograms, list_conflicts

VERBS = ("list", "add", "remove", "up", "down", "again", "clear", "run", "stop")
OF_ENTRIES = ("remove", "up", "down", "again")
LOCK_WAIT_S = 5.0  # for a program that has just worked the queue off
INTERRUPTED = "interrupted"  # shown instead of running, if nobody works the queue off
POLL_S = 1.0  # between two looks at what others made of the queue


class WrongVerb(LatentpressError):
    """Words of the command line that mean nothing."""

    exit_code = USAGE


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    verb: Annotated[
        str,
        typer.Argument(
            metavar="[VERB]",
            help="list; add (this --config with its --set, at the end); remove, up, down, again (of entries); clear "
            "(what is finished or failed); run (work it off); stop (whoever does).",
            show_default=False,
        ),
    ] = "list",
    entries: Annotated[
        list[int] | None, typer.Argument(metavar="[ENTRY...]", min=1, max=10**9, show_default=False)
    ] = None,
) -> Report:
    numbers = entries or []
    if verb not in VERBS:
        raise WrongVerb(f"{verb!r} is not a verb of queue", f"choose from: {', '.join(VERBS)}")
    if bool(numbers) != (verb in OF_ENTRIES):
        wants = "needs the numbers of entries" if verb in OF_ENTRIES else "takes no entries"
        raise WrongVerb(f"queue {verb} {wants}", f"write: latentpress queue {verb}{' 1' * (verb in OF_ENTRIES)}")
    check_folder(config.output)
    queue = RunQueue(Path(config.output))
    report = Report(program="queue", dry_run=options.dry_run, what="runs")
    if verb == "run" and not options.dry_run:
        _work_off(queue, options, console, report)
    elif not options.dry_run:
        _change(queue, verb, numbers, options, config.run_folder)
    state, worker = queue.read(), queue.worker()
    report.details["entries"] = [_row(entry, worker is not None) for entry in state.entries] or "none"
    report.details["worked_off"] = f"by process {worker.process} on {worker.host}" if worker else "no"
    if verb == "run":
        report.remaining = len(state.unfinished)
    if state.unfinished and worker is None:
        report.next_steps = [f"latentpress queue run --config {shlex.quote(str(options.config))}"]
    return report


def _change(queue: RunQueue, verb: str, numbers: Sequence[int], options: Options, run_folder: Path) -> None:
    if verb == "add":
        queue.add(options.config, options.overrides, run_folder)
    elif verb == "remove":
        queue.remove(numbers)
    elif verb == "clear":
        queue.clear()
    elif verb == "stop":
        queue.switch(False)
    for number in numbers:
        if verb == "again":
            queue.retry(number)
        elif verb in ("up", "down"):
            queue.move(number, -1 if verb == "up" else 1)


def _row(entry: QueueEntry, at_work: bool) -> dict[str, Any]:
    """at_work: whether a program works the queue off. One that was killed leaves its entry as running."""
    state = INTERRUPTED if entry.state == "running" and not at_work else entry.state
    reason = f"{entry.reason}; {entry.advice}" if entry.advice else entry.reason
    row = {"entry": entry.id, "state": state, "run": entry.run, "config": entry.config}
    return row | {"set": " ".join(entry.overrides), "attempts": entry.attempts, "reason": reason}


def _work_off(queue: RunQueue, options: Options, console: Console, report: Report) -> None:
    worker = _Worker(queue, options, console)
    stop_handler = StopHandler(None, worker.stop)
    record = record_program("queue", queue.folder)
    with queue.working(LOCK_WAIT_S), record, hangup_ignored(), stop_handler.stop_on_signals():
        queue.switch(True)
        while not worker.is_stopped and (entry := queue.take_next()) is not None:
            state, reason, advice = worker.run(entry)
            queue.finish(entry.id, state, reason, advice)
            report.done += state == "finished"
            if state == "failed":
                report.failed.append({"item": entry.run, "reason": "failed", "message": reason})
                console.warn(f"entry {entry.id}, {entry.run}, failed: {reason}")
        if stop_handler.reason == "SIGINT":  # a person, and not the end of the machine
            queue.switch(False)
    if stop_handler.reason:
        report.details["stopped"] = f"by {stop_handler.reason}; what is done is kept"


class CardLock:
    """The locks of the cards of `device`, as of --device; None: the configuration chooses. Of all queues of a user on a
    machine, whatever their output, one has a card at a time. A card is identified by its number, or by its name in
    CUDA_VISIBLE_DEVICES; without a number the queue takes all cards.

    descriptors: of the locked files. A program that inherits them also holds the cards until it ends.
    """

    def __init__(self, device: str | None) -> None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        kind, _, number = (device or "").partition(":")
        cards = [visible[int(number)] if int(number) < len(visible) else number] if number else visible
        names = {"cpu"} if kind == "cpu" else {re.sub(r"[^A-Za-z0-9-]", "_", card) for card in cards}
        folder = Path(tempfile.gettempdir()) / f"latentpress-{os.getuid()}-cards"
        with explained(str(folder)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks = [FileLock(folder / "all.lock", shared=bool(names))]
            self._locks += [FileLock(folder / f"{name}.lock") for name in sorted(names)]
        self.descriptors = tuple(lock.descriptor for lock in self._locks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.close()

    def acquire(self) -> bool:
        """Whether all cards are locked now. Those that are locked stay locked."""
        return all(lock.take() for lock in self._locks)


class _Worker:
    """Runs an entry at a time, until it is stopped: by a signal, by the queue's file, or as the entry is gone."""

    def __init__(self, queue: RunQueue, options: Options, console: Console) -> None:
        self.is_stopped = False
        self._queue, self._options, self._console = queue, options, console
        self._processes = StageProcesses({})
        self._of_page = ChildPrograms(queue.folder.parent, [])

    def stop(self) -> None:
        self.is_stopped = True
        self._processes.stop()

    def run(self, entry: QueueEntry) -> tuple[EntryState, str, str]:
        """The state of the entry afterwards, with the reason and the next step if it failed."""
        self._console.log(f"--- entry {entry.id}: {entry.run}, {entry.config} {' '.join(entry.overrides)}".rstrip())
        options = replace(self._options, config=Path(entry.config), overrides=entry.overrides)
        ended = threading.Event()
        with CardLock(self._options.device) as card:
            processes = self._processes = StageProcesses({}, card.descriptors)
            watcher = threading.Thread(target=self._watch, args=(entry, processes, ended), daemon=True)
            watcher.start()
            if self.is_stopped:  # before there were these processes
                processes.stop()
            try:
                is_free = self._wait_until_free(Path(entry.folder), card, ended)
                code, document = processes.run("run", options) if is_free else (INCOMPLETE, {})
            finally:
                ended.set()
                watcher.join()
        if code == OK:
            return "finished", "", ""
        if processes.is_stopped:
            return "waiting", "", ""
        error = document.get("error", {})
        failure = read_failure(Path(entry.folder))
        if error.get("message"):
            return "failed", error["message"], error.get("next_step", "")
        if code > 0 and failure is not None:
            return "failed", f"{failure.program}: {failure.reason}", failure.advice
        return "failed", f"it {describe_exit(code)}", "read its log, correct the cause, then: latentpress queue again"

    def _wait_until_free(self, folder: Path, card: CardLock, ended: threading.Event) -> bool:
        """Wait until no other queue has the card, no other program the run, and the page has started none. False if
        the queue was stopped meanwhile."""
        announced = False
        while not self._processes.is_stopped:
            of_page = (self._of_page.last_start(name) for name in list_conflicts("queue"))
            records = (ProcessRecord.try_read(folder / LOGS / "run.json"), *of_page)
            is_taken = any(record is not None and record.is_running for record in records)
            if card.acquire() and not is_taken and not is_running(folder):
                return True
            if not announced:
                self._console.log("waiting: another program has the card, or works on the same run")
                announced = True
            ended.wait(POLL_S)
        return False

    def _watch(self, entry: QueueEntry, processes: StageProcesses, ended: threading.Event) -> None:
        while not ended.wait(POLL_S):
            with suppress(LatentpressError):  # the error is reported when the entry has ended
                state = self._queue.read()
                self.is_stopped = self.is_stopped or not state.is_on
                if not state.is_on or all(other.id != entry.id for other in state.entries):
                    processes.stop()
                    return


app = make_app(
    "queue",
    "Runs one after the other: add them, and work them off; a failed one stops none after it.",
    run,
    examples=["add --set train.run=second", "run", "remove 2"],
)

if __name__ == "__main__":
    app()
