"""The jobs as cards: what `status` says of a stage, joined with what its programs say of themselves, and what its
buttons do."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.runs.scores import read_lines
from cache.runs.training_run import RunProgress, read_progress
from cache.runs.validations import list_validations
from cache.store.layout import STAGE_PROGRAMS
from schemas.cli.process_record import ProcessRecord
from schemas.cli.report import Report
from schemas.config.pipeline import Config
from schemas.errors import DAMAGE, INCOMPLETE, INTERRUPTED, LatentpressError
from schemas.text_format import format_duration
from stages.pages.ui.child_programs import NEED_OPTIONS, STAGES, ChildPrograms, Start, list_conflicts

EXIT_WORDS = {0: "finished", INCOMPLETE: "ended, and work remains", DAMAGE: "found damage", INTERRUPTED: "interrupted"}
AT_WORK = ("running", "stopping", "restarting")
WORTH_A_WORD = ("running", "lost", "failed")  # of the states of jobs on all machines


@dataclass
class Card:
    """A job. state: "to do", "running", "stopping", "restarting", "done" or "failed"; remark: more of it.

    done, total: of the bar; total None where the end is not known, both None without a bar. facts: beside it, after
    count, rate and time left. can: what its buttons do. log: the job whose log it has.
    """

    name: str
    what: str
    state: str = "to do"
    remark: str = ""
    done: float | None = None
    total: float | None = None
    count: str = ""
    rate: str = ""
    left: str = ""
    facts: list[str] = field(default_factory=list)
    can: list[str] = field(default_factory=list)
    log: str = ""
    set_aside: int = 0  # items


def build_cards(
    config: Config,
    programs: ChildPrograms,
    status: Report | LatentpressError | None,
    progress: RunProgress | None = None,
) -> list[list[Card]]:
    """Steps in order; stages that need not wait for each other are one step. progress: of the run, if it is known."""
    progress = progress or read_progress(config)
    rows = status.details.get("stages", []) if isinstance(status, Report) else []
    by_stage = {row["stage"]: row for row in rows}
    notes = _notes_by_program(programs, config)
    steps: list[list[Card]] = []
    for name in config.stage_order:
        card = build_job_card(name, STAGES[name], programs)
        for job, note in notes.get(name, ()):
            if card.state not in AT_WORK:  # `run` runs it
                card.state, card.remark, card.can, card.log = "running", f"for {_ago(note.began)}", [], job
        _add_counts(card, config, status, by_stage.get(name), progress)
        _add_notes(card, notes.get(name, ()))
        if name.startswith("encode-") and steps and steps[-1][0].name.startswith("encode-"):
            steps[-1].append(card)
        else:
            steps.append([card])
    return steps


def build_run_card(programs: ChildPrograms, steps: Sequence[Sequence[Card]], is_known: bool) -> Card:
    """The card of `run`, which is done when each of its stages is. is_known: `status` has said what there is."""
    card = build_job_card("run", "every stage in order, skipping what is done", programs)
    if is_known:
        _settle(card, all(stage.state == "done" for step in steps for stage in step))
    return card


def build_job_card(name: str, what: str, programs: ChildPrograms) -> Card:
    """A job's card by its last start."""
    start, card = programs.last_start(name), Card(name, what)
    card.log = name if programs.logs(name) else ""
    at_work = (programs.last_start(other) for other in list_conflicts(name))
    conflict = any(other is not None and other.is_running for other in at_work)
    if programs.is_restarting(name):
        card.state, card.remark, card.can = "restarting", "stopping, to start again", ["kill"]
    elif start is not None and start.is_running:
        since = _ago(start.began)
        card.state, card.remark, card.can = "running", f"for {since}", ["stop", "restart"]
        if start.stop_asked is not None:
            card.state, card.remark, card.can = "stopping", f"for {_ago(start.stop_asked)}", ["kill"]
    else:
        if start is not None and not _is_outdated(start, programs.last_start("run")):
            card.state, card.remark = _describe_end(start)
        card.can = [] if conflict else ["start"]
    if name in NEED_OPTIONS:
        card.can = [verb for verb in card.can if verb in ("stop", "kill")]
    return card


def _is_outdated(start: Start, whole: Start | None) -> bool:
    """Whether `run` has done the stage's work since."""
    return start.program in STAGES and whole is not None and whole.exit_code == 0 and whole.began > start.began


def _describe_end(start: Start) -> tuple[str, str]:
    when = "" if start.exit_code is None else f", {_ago(start.updated)} ago"
    if start.stop_asked is not None and not start.runs_elsewhere:
        return "to do", f"stopped{when}"
    if start.exit_code is None:
        lost = f"runs on {start.host}" if start.runs_elsewhere else "killed: it ended without a word"
        return ("running" if start.runs_elsewhere else "failed"), lost
    if start.exit_code < 0:
        return "failed", f"killed by signal {-start.exit_code}{when}"
    words = EXIT_WORDS.get(start.exit_code, "failed")
    state = "done" if start.exit_code == 0 else "to do" if start.exit_code == INTERRUPTED else "failed"
    return state, f"{words}{when}"


def _ago(moment: float) -> str:
    """Time since, in steps that grow, so that the page has not to be drawn anew each second."""
    seconds = max(0, round(time.time() - moment))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h" if seconds < 48 * 3600 else f"{seconds // 86400} days"


def _add_counts(
    card: Card, config: Config, status: Report | LatentpressError | None, row: Any, progress: RunProgress
) -> None:
    """Add what there is, whoever made it."""
    if card.name == "train":
        return _add_training(card, progress)
    if card.name in ("decode", "score"):
        return _add_pictures(card, config, progress.state == "finished")
    if card.name == "index":
        made = status.details.get("training_set", "") if isinstance(status, Report) else ""
        card.facts += [made.partition(":")[0] if made.startswith("none yet") else made] if made else []
        _settle(card, made.startswith("sets/") and "older" not in made)
        return None
    if row is None:
        return None
    done, remaining = row["done"], row["remaining"]
    card.count = f"{done} {row['what']}"
    if card.name in STAGE_PROGRAMS.values():
        card.done, card.total = done, done + remaining
        card.count = f"{done} of {done + remaining} {row['what']}"
        card.rate = f"{row['items_per_second']} {row['what']}/s" if row.get("items_per_second") else ""
        card.left = f"{row['left']} left" if row.get("left") else ""
        jobs = row.get("jobs", "")
        if any(word in jobs for word in WORTH_A_WORD) and not (jobs == "1 running" and card.state in AT_WORK):
            card.facts.append(f"jobs: {jobs}")
    card.set_aside = row["set_aside"]
    return _settle(card, not remaining and (done or row["set_aside"]) > 0)


def _settle(card: Card, is_done: bool) -> None:
    """Let what there is count more than how the last start ended, unless that failed."""
    if card.state in ("to do", "done"):
        card.state = "done" if is_done else "to do"


def _add_training(card: Card, progress: RunProgress) -> None:
    card.done, card.total, card.count = progress.step, progress.steps, f"step {progress.step} of {progress.steps}"
    card.rate = (
        f"{progress.samples_per_s:.3g} samples/s" if progress.samples_per_s and progress.state == "running" else ""
    )
    if progress.seconds_left is not None:
        card.left = f"{format_duration(progress.seconds_left)} left"
    card.facts += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
    card.facts += [f"eval loss {progress.eval_loss}"] if progress.eval_loss else []
    card.facts += [f"last checkpoint: step {progress.checkpoint}"] if progress.checkpoint is not None else []
    if progress.state == "running" and card.state not in AT_WORK:
        card.state, card.remark = "running", "not started from this page"
    else:
        _settle(card, progress.state == "finished")


def _add_pictures(card: Card, config: Config, is_finished: bool) -> None:
    """Count those that are decoded, or scored. A run that made none has nothing to decode or to score."""
    files = [file for file in list_validations(config.run_folder) if file.latent is not None]
    done, total = sum(file.picture is not None for file in files), len(files)
    if card.name == "score":
        scored = {line.step for line in read_lines(config.run_folder)}
        done = sum(file.picture is not None and file.step in scored for file in files)
    if files:
        card.done, card.total, card.count = done, total, f"{done} of {total} pictures and clips"
    _settle(card, done == total and (total > 0 or is_finished))


def _notes_by_program(programs: ChildPrograms, config: Config) -> dict[str, list[tuple[str, ProcessRecord]]]:
    """The notes of what runs now: program -> (job, note); `run` has those of its stages, and the queue those
    of the run that it is at, if that is the configuration's."""
    notes: dict[str, list[tuple[str, ProcessRecord]]] = {}
    for job in (*STAGES, "run", *(("queue",) if programs.queue.runs(config.run_folder) else ())):
        for note in programs.notes(job):
            if note.is_running:
                notes.setdefault(note.program, []).append((job, note))
    return notes


def _add_notes(card: Card, notes: Sequence[tuple[str, ProcessRecord]]) -> None:
    """Add what the program does now. Its bar replaces the bar of `status`, which is of whole shards, but not the bar of
    training, which is of steps; so do its rate and time left, of which it has none while it loads."""
    for task in [note.tasks[-1] for _, note in notes if note.tasks]:
        card.facts.append(f"{task.description}: {task.state}" if task.state else task.description)
        if card.name != "train":
            card.rate = card.left = ""
            if task.total is not None:
                card.done, card.total = task.done, task.total
