"""The jobs as cards: the row that `latentpress status` reports for a stage, joined with the process records of its
programs, and the actions of the card's buttons."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache.runs.scores import read_lines
from cache.runs.training_run import RunProgress, may_be_running, read_failure, read_progress
from cache.runs.validations import list_validations
from cache.store.layout import STAGE_PROGRAMS
from schemas.cli.console import LOGS
from schemas.cli.process_record import ProcessRecord, read_notes
from schemas.cli.report import Report
from schemas.config.pipeline import Config
from schemas.errors import DAMAGE, INCOMPLETE, INTERRUPTED, LatentpressError
from schemas.text_format import format_duration
from stages.pages.ui.child_programs import NEED_OPTIONS, STAGES, ChildPrograms, Start, list_conflicts

EXIT_WORDS = {0: "finished", INCOMPLETE: "ended, and work remains", DAMAGE: "found damage", INTERRUPTED: "interrupted"}
ACTIVE_STATES = ("running", "stopping", "restarting")
REPORTED_STATES = ("running", "lost", "failed")  # states of jobs on all machines that a card mentions
TERMINAL = "in a terminal"  # remark of jobs that were not started from the page


@dataclass
class Card:
    """The card of a job. state: "to do", "running", "stopping", "restarting", "done" or "failed"; remark: details of
    the state.

    progress, total: value and maximum of the progress bar; total is None if the maximum is not known, both are None
    without a bar. facts: texts after count, rate and time left. actions: actions of the card's buttons ("start",
    "stop", ...). log: the job whose log the card links to, "" for none.
    """

    name: str
    description: str
    state: str = "to do"
    remark: str = ""
    progress: float | None = None
    total: float | None = None
    count: str = ""
    rate: str = ""
    time_left: str = ""
    facts: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    log: str = ""
    rejects: int = 0  # items


def build_cards(
    config: Config,
    programs: ChildPrograms,
    status: Report | LatentpressError | None,
    progress: RunProgress | None = None,
) -> list[list[Card]]:
    """Make the cards of a project, in steps; the encoding stages, which do not wait for each other, share a step.
    progress: progress of the run, read from its folder if it is None."""
    progress = progress or read_progress(config)
    rows = status.details.get("stages", []) if isinstance(status, Report) else []
    by_stage = {row["stage"]: row for row in rows}
    notes = _notes_by_program(programs, config)
    steps: list[list[Card]] = []
    for name in config.stage_order:
        card = build_job_card(name, STAGES[name], programs)
        for job, note in notes.get(name, ()):
            if card.state not in ACTIVE_STATES:  # `run` or the queue started the program
                since = f"for {_ago(note.began)}" if job else f"for {_ago(note.began)}, {TERMINAL}"
                card.state, card.remark, card.actions, card.log = "running", since, [], job
        _add_counts(card, config, status, by_stage.get(name), progress)
        _add_notes(card, notes.get(name, ()))
        if name.startswith("encode-") and steps and steps[-1][0].name.startswith("encode-"):
            steps[-1].append(card)
        else:
            steps.append([card])
    return steps


def build_run_card(
    programs: ChildPrograms, steps: Sequence[Sequence[Card]], is_known: bool, config: Config | None = None
) -> Card:
    """The card of `run`, which is done when each of its stages is done. is_known: whether the status has been read.
    config: configuration of a run that may have been started in a terminal."""
    card = build_job_card("run", "prepares the pictures and captions, and trains; finished work is skipped", programs)
    note = ProcessRecord.try_read(config.run_folder / LOGS / "run.json") if config is not None else None
    if note is not None and note.is_running and card.state not in ACTIVE_STATES:
        card.state, card.remark, card.actions = "running", f"for {_ago(note.began)}, {TERMINAL}", []
    if is_known:
        _settle(card, all(stage.state == "done" for step in steps for stage in step))
    return card


class Failure(NamedTuple):
    """What ended with an error: a program, on the page or in a terminal; the error and its next step."""

    program: str
    message: str
    next_step: str


def find_failure(config: Config, programs: ChildPrograms) -> Failure | None:
    """Find the failure of the last attempt; None if the attempt succeeded, was stopped, or is running."""
    record = read_failure(config.run_folder)
    if record is None:
        jobs = {job: start for job in ("run", *STAGES) if (start := programs.last_start(job)) is not None}
        last = max(jobs, key=lambda job: jobs[job].began, default="")
        record = next((note for note in programs.notes(last) if note.state == "failed" and note.reason), None)
    elif record.is_running or may_be_running(config.run_folder, elsewhere=True):
        return None
    return None if record is None else Failure(record.program, record.reason, record.advice)


def build_job_card(name: str, description: str, programs: ChildPrograms) -> Card:
    """Make a job's card from the record of its last start."""
    start, card = programs.last_start(name), Card(name, description)
    card.log = name if programs.logs(name) else ""
    at_work = (programs.last_start(job) for job in list_conflicts(name))
    conflict = any(job is not None and job.is_running for job in at_work)
    if programs.is_restarting(name):
        card.state, card.remark, card.actions = "restarting", "stopping, to start again", ["kill"]
    elif start is not None and start.is_running:
        since = _ago(start.began)
        card.state, card.remark, card.actions = "running", f"for {since}", ["stop", "restart"]
        if start.stop_asked is not None:
            card.state, card.remark, card.actions = "stopping", f"for {_ago(start.stop_asked)}", ["kill"]
    else:
        if start is not None and not _is_outdated(start, programs.last_start("run")):
            card.state, card.remark = _describe_end(start)
        card.actions = [] if conflict else ["start"]
    if name in NEED_OPTIONS:
        card.actions = [verb for verb in card.actions if verb in ("stop", "kill")]
    return card


def _is_outdated(start: Start, run_start: Start | None) -> bool:
    """Whether `run` was started after this start of a stage, and finished without an error. run_start: last start of
    `run`."""
    return (
        start.program in STAGES and run_start is not None and run_start.exit_code == 0 and run_start.began > start.began
    )


def _describe_end(start: Start) -> tuple[str, str]:
    when = "" if start.exit_code is None else f", {_ago(start.updated)} ago"
    if start.stop_asked is not None and not start.runs_elsewhere:
        return "to do", f"stopped{when}"
    if start.exit_code is None:
        remark = f"runs on {start.host}" if start.runs_elsewhere else "killed: it ended without an exit code"
        return ("running" if start.runs_elsewhere else "failed"), remark
    if start.exit_code < 0:
        return "failed", f"killed by signal {-start.exit_code}{when}"
    if start.exit_code == INCOMPLETE and start.program.endswith("thumbnails"):
        return "done", f"some files can't be shown{when}"
    words = EXIT_WORDS.get(start.exit_code, "failed")
    state = "done" if start.exit_code == 0 else "to do" if start.exit_code == INTERRUPTED else "failed"
    return state, f"{words}{when}"


def _ago(moment: float) -> str:
    """The time since a moment, rounded more the longer it is, so that the page is not drawn again every second."""
    seconds = max(0, round(time.time() - moment))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h" if seconds < 48 * 3600 else f"{seconds // 86400} days"


def _add_counts(
    card: Card, config: Config, status: Report | LatentpressError | None, row: Any, progress: RunProgress
) -> None:
    """Add the counts of existing results to a card, whichever program made them. row: the stage's row of `status`, or
    None."""
    if card.name == "train":
        return _add_training(card, progress)
    if card.name in ("decode", "score"):
        return _add_pictures(card, config, progress.state == "finished")
    if card.name == "index":
        training_set = status.details.get("training_set", "") if isinstance(status, Report) else ""
        is_absent = training_set.startswith("none yet")
        card.facts += [training_set.partition(":")[0] if is_absent else training_set] if training_set else []
        _settle(card, training_set.startswith("sets/") and "older" not in training_set)
        return None
    if row is None:
        return None
    finished, remaining = row["done"], row["remaining"]
    card.count = f"{finished} {row['what']}"
    if card.name in STAGE_PROGRAMS.values():
        card.progress, card.total = finished, finished + remaining
        card.count = f"{finished} of {finished + remaining} {row['what']}"
        card.rate = f"{row['items_per_second']} {row['what']}/s" if row.get("items_per_second") else ""
        card.time_left = f"{row['left']} left" if row.get("left") else ""
        jobs = row.get("jobs", "")
        if any(word in jobs for word in REPORTED_STATES) and not (jobs == "1 running" and card.state in ACTIVE_STATES):
            card.facts.append(f"jobs: {jobs}")
            if "running" in jobs and card.state not in ACTIVE_STATES:
                card.state, card.remark = "running", TERMINAL
    card.rejects = row["rejected"]
    return _settle(card, not remaining and (finished or row["rejected"]) > 0)


def _settle(card: Card, is_done: bool) -> None:
    """Set the state by the existing results instead of the end of the last start, unless the last start failed or the
    job is running."""
    if card.state in ("to do", "done"):
        card.state = "done" if is_done else "to do"


def _add_training(card: Card, progress: RunProgress) -> None:
    card.progress, card.total, card.count = progress.step, progress.steps, f"step {progress.step} of {progress.steps}"
    if progress.samples_per_s and progress.state == "running":
        card.rate = f"{progress.samples_per_s:.3g} samples/s"
    if progress.seconds_left is not None:
        card.time_left = f"{format_duration(progress.seconds_left)} left"
    card.facts += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
    card.facts += [f"eval loss {progress.eval_loss}"] if progress.eval_loss else []
    card.facts += [f"last checkpoint: step {progress.checkpoint}"] if progress.checkpoint is not None else []
    if progress.state == "running" and card.state not in ACTIVE_STATES:
        card.state, card.remark, card.actions = "running", TERMINAL, []
    else:
        _settle(card, progress.state == "finished")


def _add_pictures(card: Card, config: Config, is_finished: bool) -> None:
    """Count the validation samples that are decoded, or scored. If a run has finished without validation samples, the
    stage is done."""
    files = [file for file in list_validations(config.run_folder) if file.latent is not None]
    count, total = sum(file.picture is not None for file in files), len(files)
    if card.name == "score":
        scored = {line.step for line in read_lines(config.run_folder)}
        count = sum(file.picture is not None and file.step in scored for file in files)
    if files:
        card.progress, card.total, card.count = count, total, f"{count} of {total} pictures and clips"
    _settle(card, count == total and (total > 0 or is_finished))


def _notes_by_program(programs: ChildPrograms, config: Config) -> dict[str, list[tuple[str, ProcessRecord]]]:
    """The records of running programs: program -> [(job that started it, record)]. The job `run` has the records of its
    stages, and the queue has the records of its current run, if this is the configuration's run. The job "" is a
    terminal."""
    notes: dict[str, list[tuple[str, ProcessRecord]]] = {}
    for job in (*STAGES, "run", *(("queue",) if programs.queue.runs(config.run_folder) else ())):
        for note in programs.notes(job):
            if note.is_running:
                notes.setdefault(note.program, []).append((job, note))
    for note in read_notes(config.run_folder / LOGS):
        if note.is_running and note.program not in notes:
            notes[note.program] = [("", note)]
    return notes


def _add_notes(card: Card, notes: Sequence[tuple[str, ProcessRecord]]) -> None:
    """Add a running program's current task to its card. The program's bar replaces the bar from `status`, which counts
    whole shards, but not training's bar, which counts steps. Rate and time left are cleared, except for training."""
    for task in [note.tasks[-1] for _, note in notes if note.tasks]:
        card.facts.append(f"{task.description}: {task.state}" if task.state else task.description)
        if card.name != "train":
            card.rate = card.time_left = ""
            if task.total is not None:
                card.progress, card.total = task.done, task.total
