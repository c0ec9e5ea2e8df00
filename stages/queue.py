"""queue: executes entries one after the other, each a `latentpress run` with a configuration. If an entry fails, the
next one still runs.

The queue is stored under `output` (cache/runs/run_queue.py) and changed by this program and by the page of
`latentpress ui`. `queue run` executes the entries. If it is killed, the next `queue run` resumes the interrupted entry.
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
ENTRY_VERBS = ("remove", "up", "down", "again")  # verbs that need the numbers of entries
LOCK_WAIT_S = 5.0  # longest wait for another `queue run` that is ending
INTERRUPTED = "interrupted"  # shown instead of "running" if no program executes the queue
POLL_S = 1.0  # seconds between two reads of the queue's file, which other programs may change


class WrongVerb(LatentpressError):
    """Raised for an unknown verb, or for a verb with missing or unexpected entries."""

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
            help="list: show entries; add: append this --config with its --set; remove, up, down: remove or move "
            "entries; again: retry entries; clear: remove finished and failed entries; run: execute the queue; stop: "
            "stop its execution.  [default: list]",
            show_default=False,
        ),
    ] = "list",
    entries: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[ENTRY...]",
            min=1,
            max=10**9,
            show_default=False,
            help="Numbers of entries, for remove, up, down and again.",
        ),
    ] = None,
) -> Report:
    numbers = entries or []
    if verb not in VERBS:
        raise WrongVerb(f"{verb!r} is not a verb of queue", f"choose from: {', '.join(VERBS)}")
    if bool(numbers) != (verb in ENTRY_VERBS):
        usage = "needs the numbers of entries" if verb in ENTRY_VERBS else "does not accept entries"
        raise WrongVerb(f"queue {verb} {usage}", f"write: latentpress queue {verb}{' 1' * (verb in ENTRY_VERBS)}")
    check_folder(config.output)
    queue = RunQueue(Path(config.output))
    report = Report(program="queue", dry_run=options.dry_run, what="runs")
    if verb == "run" and not options.dry_run:
        _run_entries(queue, options, console, report)
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


def _row(entry: QueueEntry, has_worker: bool) -> dict[str, Any]:
    """has_worker: whether a program executes the queue. A program that was killed leaves its entry as running."""
    state = INTERRUPTED if entry.state == "running" and not has_worker else entry.state
    reason = f"{entry.reason}; {entry.advice}" if entry.advice else entry.reason
    row = {"entry": entry.id, "state": state, "run": entry.run, "config": entry.config}
    return row | {"set": " ".join(entry.overrides), "attempts": entry.attempts, "reason": reason}


def _run_entries(queue: RunQueue, options: Options, console: Console, report: Report) -> None:
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
                console.warn(f"entry {entry.id} ({entry.run}) failed: {reason}")
        if stop_handler.reason == "SIGINT":  # pressed by a user; other signals may come from a machine's shutdown
            queue.switch(False)
    if stop_handler.reason:
        report.details["stopped"] = f"by {stop_handler.reason}; finished work is kept"


class CardLock:
    """Locks of cards. Only one queue of a user on a machine can use a card at the same time.

    A card is identified by its number, or by its name in CUDA_VISIBLE_DEVICES. Without a number, the queue locks all
    cards.

    device: value of --device, or None if the configuration chooses the device. descriptors: descriptors of the locked
    files; a program that inherits them also holds the cards until it ends.
    """

    def __init__(self, device: str | None) -> None:
        visible_cards = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        kind, _, number = (device or "").partition(":")
        cards = visible_cards
        if number:
            cards = [visible_cards[int(number)] if int(number) < len(visible_cards) else number]
        names = {"cpu"} if kind == "cpu" else {re.sub(r"[^A-Za-z0-9-]", "_", card) for card in cards}
        folder = Path(tempfile.gettempdir()) / f"latentpress-{os.getuid()}-cards"
        with explained(str(folder)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks = [FileLock(folder / "all.lock", is_shared=bool(names))]
            self._locks += [FileLock(folder / f"{name}.lock") for name in sorted(names)]
        self.descriptors = tuple(lock.descriptor for lock in self._locks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.close()

    def acquire(self) -> bool:
        """Lock the cards. Returns whether all cards are locked; if not, the locked ones stay locked."""
        return all(lock.take() for lock in self._locks)


class _Worker:
    """Runs entries, until a signal or the queue's file stops it. An entry also ends if it is removed from the queue."""

    def __init__(self, queue: RunQueue, options: Options, console: Console) -> None:
        self.is_stopped = False
        self._queue, self._options, self._console = queue, options, console
        self._processes = StageProcesses({})
        self._page_programs = ChildPrograms(queue.folder.parent, [])

    def stop(self) -> None:
        self.is_stopped = True
        self._processes.stop()

    def run(self, entry: QueueEntry) -> tuple[EntryState, str, str]:
        """Run an entry. Returns (new state, reason of a failure, next step)."""
        self._console.log(f"--- entry {entry.id}: {entry.run}, {entry.config} {' '.join(entry.overrides)}".rstrip())
        options = replace(self._options, config=Path(entry.config), overrides=entry.overrides)
        end_event = threading.Event()
        with CardLock(self._options.device) as card:
            processes = self._processes = StageProcesses({}, card.descriptors)
            watcher = threading.Thread(target=self._watch, args=(entry, processes, end_event), daemon=True)
            watcher.start()
            if self.is_stopped:  # stopped before `processes` was made
                processes.stop()
            try:
                is_free = self._wait_until_free(Path(entry.folder), card, end_event)
                code, document = processes.run("run", options) if is_free else (INCOMPLETE, {})
            finally:
                end_event.set()
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
        reason = f"`latentpress run` {describe_exit(code)}"
        return "failed", reason, f"read the log, correct the cause, then: latentpress queue again {entry.id}"

    def _wait_until_free(self, folder: Path, card: CardLock, end_event: threading.Event) -> bool:
        """Wait until no other queue uses the card, no other program uses the run, and the page runs no conflicting
        program. Returns False if the queue is stopped during the wait."""
        is_logged = False
        while not self._processes.is_stopped:
            page_records = (self._page_programs.last_start(name) for name in list_conflicts("queue"))
            records = (ProcessRecord.try_read(folder / LOGS / "run.json"), *page_records)
            is_used = any(record is not None and record.is_running for record in records)
            if card.acquire() and not is_used and not is_running(folder):
                return True
            if not is_logged:
                self._console.log("waiting: another program uses the card or the run")
                is_logged = True
            end_event.wait(POLL_S)
        return False

    def _watch(self, entry: QueueEntry, processes: StageProcesses, end_event: threading.Event) -> None:
        while not end_event.wait(POLL_S):
            with suppress(LatentpressError):  # the error is reported after the entry has ended
                state = self._queue.read()
                self.is_stopped = self.is_stopped or not state.is_on
                if not state.is_on or entry.id not in {row.id for row in state.entries}:
                    processes.stop()
                    return


app = make_app(
    "queue",
    "Run several configurations one after the other. If one fails, the next one still runs.",
    run,
    examples=["add --set train.run=second", "run", "remove 2"],
)

if __name__ == "__main__":
    app()
