"""Counts of one run of an encoding stage. They are shown as progress, written to the job's report under jobs/, and
returned in the program's report."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cache.sets import rejects
from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.cli.console import Console, Report
from schemas.cli.options import Partition
from schemas.interruption import StopHandler, check_stop
from stages.encoding.job_reports import JobReport, reported
from stages.encoding.stage_state import (
    MEMBER_NAMES,
    RejectLimit,
    StageState,
    count_members,
    format_truncated,
)
from stages.engines.jobs import Job, RoundingError, UnitResult


class Tally:
    """Counts the units of a run. units: units to encode. report: the program's report, which receives the counts."""

    def __init__(
        self,
        job: Job,
        state: StageState,
        units: list[Unit],
        report: Report,
        console: Console,
        partition: Partition,
        limit: RejectLimit,
    ) -> None:
        self._stage, self._job, self._state, self._console = state.stage, job, state, console
        self._units, self._report, self._limit = units, report, limit
        self._store, self._units_by_id = Store(job.config.root), {unit.unit_id: unit for unit in state.units}
        self._finished = self._bytes = self._smaller_batches = self._rejected = 0
        self._members, self._began = 0, time.monotonic()  # members, including units in progress
        self._first: tuple[float, int] | None = None  # time and members done when the model was loaded
        self._remarks, self._rounding = Counter[str](), RoundingError()
        self._stop_handler = StopHandler()
        self._record = JobReport(
            program=self._stage.name,
            engine=job.config.stages.engine,
            workers=job.resources.worker_count,
            shard=str(partition),
            members=count_members(units),
            units=len(units),
        )

    @property
    def stopped_by(self) -> str:
        """The cause, a signal or --max-time, if the run ended before its last unit; else ""."""
        is_late = self._finished < len(self._units) and time.monotonic() >= self._job.until
        return self._stop_handler.reason or ("--max-time" if is_late else "")

    @contextmanager
    def show_progress(self) -> Iterator[None]:
        """Context in which progress is shown and reported. A signal ends the body."""
        members, member_name = count_members(self._units), MEMBER_NAMES[self._stage.member_kind]
        with (
            self._stop_handler.stop_on_signals(),
            reported(
                self._job.config.root, self._job.fingerprint, self._record, self._measure, lambda: self.stopped_by
            ),
            self._console.progress(members, self._stage.name, member_name) as self._progress,
        ):
            yield

    def open_units(self) -> Iterator[Unit]:
        """Yields the units that have no shard when their turn comes, until the time is up."""
        for unit in self._units:
            check_stop()
            if time.monotonic() >= self._job.until:
                return
            if self._job.find_shard(self._store, self._stage.kind, unit):
                self._skip(unit)
            else:
                yield unit

    def advance(self, members: int) -> None:
        """Count encoded members of units in progress. members: number of members; negative if a unit starts again."""
        self._members += members
        self._first = self._first or (time.monotonic(), self._members)
        self._progress.advance(members)

    def _measure(self) -> dict[str, object]:
        """The counts of the job's report."""
        time_s = time.monotonic()
        began, before = self._first or (time_s, 0)
        failed = len(self._report.failed)
        return {
            "seconds": time_s - self._began,
            "items_per_second": max(0.0, (self._members - before) / (time_s - began)) if time_s > began else None,
            "done": self._members,
            "units_done": self._finished - failed,
            "units_failed": failed,
            "rejected": self._rejected,
        }

    def add(self, result: UnitResult) -> None:
        """Count a finished unit and write its list of rejects. Raises LatentpressError if too many members were
        rejected."""
        unit = self._units_by_id[result.unit_id]
        if result.elsewhere:
            self._skip(unit)
            return
        self._finished += 1
        if result.shard_path is None:
            self._report.failed.append({"item": unit.unit_id, "reason": "failed", "message": result.error})
            self._report.remaining += len(unit.members)
            return
        rejects.write_rejects(self._store, self._state.reject_folder, unit.unit_id, result.rejects)
        self._report.truncated += format_truncated(self._state.plan, result.truncated)
        self._report.done += result.encoded
        self._rejected += len(result.rejects)
        self._bytes += result.bytes
        self._remarks.update(result.remarks)
        self._rounding += result.rounding
        if result.fitting_batch:
            self._console.warn(f"unit {unit.unit_id}: out of memory; {result.fitting_batch}")
            self._smaller_batches += 1
        self._limit.add({unit.unit_id: result.rejects})

    def _skip(self, unit: Unit) -> None:
        """Count a unit that another process has encoded."""
        self._finished += 1
        self._report.skipped += len(unit.members)
        self.advance(len(unit.members))

    def finish(self) -> None:
        """Add the counts to the program's report."""
        details = self._report.details
        details["written_mib"] = round(self._bytes / 2**20, 2)
        if self._smaller_batches:
            details["units_in_smaller_batches"] = self._smaller_batches
        if self._rounding.squares:
            details["storage_error"] = self._rounding.describe()
        if self._remarks:
            rows = [{"items": n, "of": self._report.done, "remark": remark} for remark, n in self._remarks.items()]
            details["remarks"] = rows
