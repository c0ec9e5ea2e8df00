"""Reports of an encoding stage's running jobs: one small file per job under jobs/, which `status` merges.

A job is one run of a stage's program: a single process, a task of a job array, or a pool of processes or actors. The
report contains the machine, the progress and the speed. It is rewritten every INTERVAL_S, so a killed job is recognized
as lost. Only `status` reads reports, and `gc` removes old reports; a job whose report can't be written continues.
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, get_args

from pydantic import Field

from cache.store.layout import is_project_file
from cache.store.store import Store
from schemas.cli.process_record import Moment, ProcessRecord, RecordWriter, State, storable_text
from schemas.errors import INCOMPLETE, INTERRUPTED, OK, LatentpressError

INTERVAL_S = 30.0  # between two writes, the first of which come sooner; on an object store each is one put
FIRST_INTERVAL_S = 2.0  # doubled after each write
LOST_AFTER_S = 180.0  # time without a sign of life; the clocks of machines differ, and a store may be slow
KEPT_S = 24 * 3600.0  # time after the last sign of life in which `status` shows a report
MAX_SHOWN = 30  # jobs that `status` shows
JOB_STATES = get_args(State)  # the most interesting state first
END_TIMEOUT_S = 10.0  # time that the program waits for its last report

USUAL_VALUES: dict[str, object] = {"workers": "1", "shard": "0/1", "rejected": 0}  # columns of jobs on one machine

TableRow = dict[str, Any]


class JobReport(ProcessRecord):
    """Counts of one job. members: number of texts or samples that the job encodes. done: number of finished members,
    including rejected ones. workers: number of processes or actors. shard: partition of the job, like "3/16"."""

    engine: str
    workers: int = Field(ge=0)
    shard: str
    seconds: Moment = 0.0  # limited to the range of a calendar
    members: int = Field(0, ge=0)
    done: int = 0
    units: int = Field(0, ge=0)
    units_done: int = Field(0, ge=0)
    units_failed: int = Field(0, ge=0)
    rejected: int = Field(0, ge=0)
    items_per_second: float | None = Field(None, ge=0)


@contextmanager
def reported(
    root: str,
    fingerprint: str,
    report: JobReport,
    measure: Callable[[], dict[str, object]],
    stopped_by: Callable[[], str],
) -> Iterator[None]:
    """Context for a job's work, in which a thread writes the job's report. report: the constant fields. measure:
    returns the changing fields. stopped_by: returns the cause if the work was ended early, else ""."""
    name = f"jobs/{report.program}/{fingerprint}/{secrets.token_hex(8)}.json"
    final_fields, end_event = dict[str, object](), Event()
    writer = RecordWriter(report, lambda record: Store(root).publish_record(name, record))

    def write_reports() -> None:
        is_last = False
        for number in itertools.count():
            writer.update(**measure(), **(final_fields if is_last else {}))
            if is_last:
                return
            is_last = end_event.wait(min(INTERVAL_S, FIRST_INTERVAL_S * 2 ** min(number, 10)))

    thread = Thread(target=write_reports, name="job-report", daemon=True)
    thread.start()
    code, reason = OK, ""
    try:
        yield
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    except Exception as error:
        code, reason = INCOMPLETE, error.message if isinstance(error, LatentpressError) else repr(error)
        raise
    finally:
        if code != INCOMPLETE and (reason := stopped_by()):
            code = INTERRUPTED
        final_fields |= {"exit_code": code, "reason": storable_text(reason, 200)}
        end_event.set()
        thread.join(END_TIMEOUT_S)


def read_reports(store: Store, fingerprints: Mapping[str, str], current_time: float) -> dict[str, list[JobReport]]:
    """stage -> reports of its jobs in the last KEPT_S, the newest first. fingerprints: stage -> fingerprint of its
    cache. Costs one listing and a small read for each job; files that are not reports are skipped."""
    by_stage: dict[str, list[JobReport]] = {stage: [] for stage in fingerprints}
    folders = {f"{stage}/{fingerprint}": stage for stage, fingerprint in fingerprints.items()}
    listed = [entry for entry in store.list_files("jobs") if is_project_file(f"jobs/{entry.name}")]
    recent = [
        entry._replace(name=f"jobs/{entry.name}")
        for entry in listed
        if entry.name.rpartition("/")[0] in folders and entry.modified >= current_time - KEPT_S
    ]
    for entry, data in store.read_files(recent):
        try:
            report = JobReport.parse(data)
        except ValueError:  # of another version, or not a report
            continue
        if report.state == "running" and entry.modified < current_time - LOST_AFTER_S:
            report = report.model_copy(update={"reason": f"no sign of life for {current_time - entry.modified:.0f} s"})
        by_stage[folders[entry.name.split("/", 1)[1].rpartition("/")[0]]].append(report)
    return {stage: sorted(reports, key=lambda report: -report.began) for stage, reports in by_stage.items()}


def sum_rates(reports: Iterable[JobReport]) -> float:
    """Members per second of all jobs that run now."""
    return sum(report.items_per_second or 0.0 for report in reports if report.state == "running")


def count_states(jobs: Iterable[JobReport]) -> str:
    """Numbers of jobs by state, like "3 running, 1 lost"."""
    counts = Counter(job.state for job in jobs)
    return ", ".join(f"{counts[state]} {state}" for state in JOB_STATES if counts[state])


def list_jobs(jobs: Mapping[str, Sequence[JobReport]], for_people: bool = False) -> TableRow:
    """Tables of the jobs of each stage, the most interesting first. for_people: limit the table to MAX_SHOWN jobs and
    omit columns that have their usual value in every row. Reasons may be long, so they have a separate table."""
    pairs = [(stage, job) for stage, stage_jobs in jobs.items() for job in stage_jobs]
    pairs.sort(key=lambda pair: JOB_STATES.index(pair[1].state))
    listed_pairs = pairs[:MAX_SHOWN] if for_people else pairs
    rows = [_describe_job(stage, job) for stage, job in listed_pairs]
    usual = [name for name, value in USUAL_VALUES.items() if for_people and all(row[name] == value for row in rows)]
    rows = [{name: value for name, value in row.items() if name not in usual} for row in rows]
    details: TableRow = {"jobs": rows} if rows else {}
    if len(pairs) > len(listed_pairs):
        details["more_jobs"] = len(pairs) - len(listed_pairs)
    if reasons := [{"where": _machine(job), "reason": job.reason} for _, job in listed_pairs if job.reason]:
        details["why_jobs_stopped"] = reasons
    return details


def _describe_job(stage: str, job: JobReport) -> TableRow:
    rate = job.items_per_second
    minutes, seconds = divmod(round(job.seconds), 60)
    return {
        "stage": stage,
        "state": job.state,
        "where": _machine(job),
        "workers": f"{job.workers}" + ("" if job.engine == "local" else f" on {job.engine}"),
        "shard": job.shard,
        "done": f"{job.done} of {job.members}",
        "rejected": job.rejected,
        "units": f"{job.units_done} of {job.units}" + (f", {job.units_failed} failed" if job.units_failed else ""),
        "per_second": "" if rate is None else format_rate(rate),
        "took": f"{minutes // 60}:{minutes % 60:02}:{seconds:02}",  # without days
    }


def _machine(job: JobReport) -> str:
    """The machine without its domain, and the process, like "gpu-07, 48213"."""
    return f"{job.host.partition('.')[0]}, {job.process}"


def format_rate(rate: float) -> str:
    return f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"
