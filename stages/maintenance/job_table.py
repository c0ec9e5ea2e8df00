"""The jobs of the encoding stages, as `status` shows them: the running first, then the lost and failed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from schemas.cli.process_record import State
from schemas.text_format import format_duration
from stages.encoding.job_reports import JobReport

MAX_SHOWN = 30
JOB_STATES = get_args(State)  # in the order of interest

TableRow = dict[str, Any]


def count_states(jobs: Iterable[JobReport]) -> str:
    """Count them, like "3 running, 1 lost"."""
    counts = Counter(job.state for job in jobs)
    return ", ".join(f"{counts[state]} {state}" for state in JOB_STATES if counts[state])


def list_jobs(jobs: Mapping[str, Sequence[JobReport]]) -> TableRow:
    """List for other programs: a row for each job of each stage."""
    rows = [
        {
            "stage": stage,
            "state": job.state + (f": {job.reason}" if job.reason else ""),
            "where": f"{job.host}, process {job.process}",
            "engine": f"{job.engine}, {job.workers} worker{'s' if job.workers != 1 else ''}",
            "shard": job.shard,
            "done": f"{job.done} of {job.members}",
            "set_aside": job.set_aside,
            "units": _units(job),
            "items_per_second": "" if job.items_per_second is None else f"{job.items_per_second:.3g}",
            "took": format_duration(job.seconds),
        }
        for stage, job in _rank(jobs)
    ]
    return {"jobs": rows} if rows else {}


def describe_jobs(jobs: Mapping[str, Sequence[JobReport]]) -> TableRow:
    """Describe for people, as narrow as it can be. A column that says the same of every usual job is left out, machines
    have their short names, and reasons, which may be long, have lines of their own."""
    ranked = _rank(jobs)
    shown = ranked[:MAX_SHOWN]
    rows: list[TableRow] = []
    for stage, job in shown:
        row: TableRow = {"stage": stage, "state": job.state, "where": _machine(job)}
        if any(other.engine != "local" or other.workers != 1 for _, other in shown):
            row["workers"] = f"{job.workers}" + ("" if job.engine == "local" else f" on {job.engine}")
        if any(other.shard != "0/1" for _, other in shown):
            row["shard"] = job.shard
        row["done"] = f"{job.done} of {job.members}"
        if any(other.set_aside for _, other in shown):
            row["set_aside"] = job.set_aside
        row["units"] = _units(job)
        rate = job.items_per_second
        row["per_second"] = "" if rate is None else f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"
        minutes, seconds = divmod(round(job.seconds), 60)
        rows.append(row | {"took": f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"})  # without days
    details: TableRow = {"jobs": rows} if rows else {}
    if len(ranked) > len(shown):
        details["more_jobs"] = len(ranked) - len(shown)
    if reasons := [{"where": _machine(job), "reason": job.reason} for _, job in shown if job.reason]:
        details["why_jobs_stopped"] = reasons
    return details


def _rank(jobs: Mapping[str, Sequence[JobReport]]) -> list[tuple[str, JobReport]]:
    pairs = [(stage, job) for stage, of_stage in jobs.items() for job in of_stage]
    return sorted(pairs, key=lambda pair: JOB_STATES.index(pair[1].state))


def _machine(job: JobReport) -> str:
    """The machine without its domain, and the process, like "gpu-07, 48213"."""
    return f"{job.host.partition('.')[0]}, {job.process}"


def _units(job: JobReport) -> str:
    return f"{job.units_done} of {job.units}" + (f", {job.units_failed} failed" if job.units_failed else "")
