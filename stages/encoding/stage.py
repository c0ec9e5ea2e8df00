"""The contract of an encoding stage, and the loop that runs one.

A stage has a kind of unit, a fingerprint, and a `Worker`, which is made once in each process from a `Job`, loads its
model and turns each unit into one shard. The plan lists the units; one listing of shard names shows which are done. So
any number of processes on any number of machines need no lock and no coordination: see unit_queue.py.
"""

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.models.compatibility import pin_revision
from cache.models.parts import check_parts
from cache.runs.training_checks import check_before_stages
from cache.sets import rejects
from cache.sets.plans import Plan, Unit
from cache.sets.set_lookup import current_plan
from cache.shards.shard import find_done_units
from cache.store.damage import DamageError
from cache.store.files import SPACE_ADVICE, find_shortage
from cache.store.store import Store
from schemas.cli.console import Console, Options, Partition, Report
from schemas.cli.interruption import MaxTimeOption, StopHandler
from schemas.config.encoding import CACHE_LIMIT, MOST_PREFETCH, EngineName
from schemas.config.pipeline import Config, Topic
from schemas.config.section import MOST_PROCESSES
from schemas.errors import LatentpressError
from schemas.identity import compute_fingerprint
from schemas.json_records import format_record
from stages.discovery.media_locations import MediaLocations, require_media, select_probed_members
from stages.encoding.item_plans import find_item_plan
from stages.encoding.job_reports import JobReport, JobReporter
from stages.encoding.stage_options import UsageError, choose_engine, choose_resources
from stages.encoding.stage_state import (
    MEMBER_NAMES,
    RejectLimit,
    StageState,
    count_members,
    format_truncated,
    reject_folder,
    report_set_aside,
    wanted_rows,
)
from stages.encoding.unit_queue import (
    FollowedUnits,
    OpenUnits,
    followed_units,
    has_followed_set,
    order_units,
    process_name,
)
from stages.engines.jobs import Job, RoundingError, UnitResult, Worker, load_engine
from stages.planning.items import ItemRequest

_READERS_HELP = "Decoding processes for each worker.  [default: as configured]"
_ENGINE_HELP = "Where workers run: local, this machine, or ray, a Ray cluster.  [default: as configured]"
_ADDRESS_HELP = "Of the Ray cluster's head, or auto; implies --engine ray.  [default: as configured]"
_PREFETCH_HELP = "Members read ahead by each process.  [default: as configured]"


def refuse_partition(options: Options, program: str) -> None:
    """UsageError for --shard: the programs other than the encoding stages and decode are one small job."""
    if options.partition.total > 1:
        raise UsageError(
            f"{program} is one job and can't be divided with --shard",
            f"run `latentpress {program}` once; --shard is for the encoding stages",
        )


@dataclass(frozen=True)
class EncodingStage:
    """One encoding stage. `fingerprint_inputs`: everything beside its inputs that determines its bytes, found without
    torch. `load_worker`: imports the model's library and makes the worker. `item_request`: of an item stage, which
    comes before `bucket` and makes its own plan, what it reads of the media."""

    name: str
    kind: str  # the folder of its shards: text | latents | vision | captions
    fingerprint_inputs: Callable[[Config], dict[str, Any]]
    load_worker: Callable[[Job], Worker]
    unit_kind: str = ""  # the kind of the units that it encodes, where that differs from `kind`
    only_units: frozenset[str] | None = None  # ids of the units to encode, for a repair; None: all of the plan's
    #: The size of a unit's shard, in bytes.
    estimate_bytes: Callable[[Config, Unit], int] = lambda config, unit: unit.estimated_bytes
    item_request: Callable[[Config], ItemRequest] | None = None
    reads_checkpoint: bool = True  # that of the configured model

    @property
    def member_kind(self) -> str:
        """One of "text", "latents", "items"."""
        return "items" if self.item_request else self.unit_kind or self.kind

    def find_plan(
        self, store: Store, config: Config, publish: bool = False, warn: Callable[[str], object] = lambda _: None
    ) -> Plan:
        """The plan that the stage encodes: the current one of `bucket`, or of an item stage its own, as it would be, or
        with publish=True published. Raises LatentpressError where `discover` or `bucket` has to run first."""
        if self.item_request is None:
            return current_plan(store, config)
        return find_item_plan(store, config, self.item_request(config), publish, warn)

    def fingerprint(self, config: Config) -> str:
        return compute_fingerprint(self.fingerprint_inputs(config))

    def load_elsewhere(self, job: Job) -> Worker:
        """The worker, on another machine: its checkpoint must be the one by which the shards are named."""
        fingerprint = self.fingerprint(job.config)
        if fingerprint != job.fingerprint:
            raise LatentpressError(
                f"on {socket.gethostname()} weights or settings of {job.config.model.source} are not those where the "
                f"stage was started: they make {self.kind}/{fingerprint} in place of {self.kind}/{job.fingerprint}",
                "put the same checkpoint there, at the same path",
            )
        return self.load_worker(job)

    def state(self, store: Store, config: Config, plan: Plan, retry: bool = False, merge: bool = False) -> StageState:
        """Compare the plan's units with the existing shards. retry: encode again every unit with members set aside.
        merge: see rejects.read_stage."""
        fingerprint = self.fingerprint(config)
        wanted = plan.active_text_ids if self.member_kind == "text" else plan.active_sample_ids
        units = plan.units(self.member_kind)
        done = find_done_units(store, f"{self.kind}/{fingerprint}", [unit.unit_id for unit in units])
        damaged: dict[str, DamageError] = {}
        folder = reject_folder(self.name, fingerprint)
        rejected = wanted_rows(rejects.read_stage(store, folder, damaged, merge), wanted)
        locations = MediaLocations(config, plan)
        again = {
            unit
            for unit, rows in rejected.items()
            if any(retry or (row["retry"] and locations.all_present(self.member_kind, row["item"])) for row in rows)
        }
        members = pa.array([name for unit in units for name in unit.members], pa.string())
        missing = len(wanted) - (pc.sum(pc.is_in(wanted, value_set=members)).as_py() or 0)
        if missing:
            raise LatentpressError(
                f"plan {plan.name} wants {missing} items that no unit holds: an older plan was removed",
                "run `latentpress bucket`, which plans them again",
            )
        is_wanted = pc.is_in(members, value_set=wanted).to_numpy(zero_copy_only=False)
        wanted_before = np.concatenate([[0], np.cumsum(is_wanted)])  # each member of all units in a row
        counts = np.diff(wanted_before[np.cumsum([0, *(len(unit.members) for unit in units)])]).tolist()
        counts_by_unit = {unit.unit_id: count for unit, count in zip(units, counts, strict=True)}
        again = (again | damaged.keys()) & done.keys()
        units = [unit for unit in units if self.only_units is None or unit.unit_id in self.only_units]
        return StageState(plan, fingerprint, units, wanted, counts_by_unit, done, again, rejected, damaged)

    def run(
        self,
        config: Config,
        options: Options,
        console: Console,
        *,
        retry_set_aside: Annotated[
            bool, typer.Option("--retry-set-aside", help="Try again everything that was set aside.")
        ] = False,
        max_time: MaxTimeOption = None,
        readers: Annotated[int | None, typer.Option(min=1, max=MOST_PROCESSES, metavar="N", help=_READERS_HELP)] = None,
        prefetch: Annotated[
            int | None, typer.Option(min=1, max=MOST_PREFETCH, metavar="N", help=_PREFETCH_HELP)
        ] = None,
        engine: Annotated[EngineName | None, typer.Option(help=_ENGINE_HELP)] = None,
        address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help=_ADDRESS_HELP)] = None,
    ) -> Report:
        """Encode what remains of this process' partition, and report."""
        config = choose_engine(config, engine, address)
        if options.dry_run:
            check_before_stages(config, console.warn)
        load_engine(config.stages.engine)  # or an error, before anything is read
        until = math.inf if max_time is None else time.monotonic() + max_time
        stop_handler, store = StopHandler(), Store(config.root)
        plan = self.find_plan(store, config, not options.dry_run, console.warn)
        if not options.dry_run and self.reads_checkpoint:
            config = config.model_copy(update={"model": pin_revision(config.model, store)})
        if self.reads_checkpoint:
            check_parts(config, ask_hub=not options.dry_run)
        state = self.state(store, config, plan, retry_set_aside, merge=not options.dry_run)
        overrides = {key: value for key, value in (("readers", readers), ("prefetch", prefetch)) if value}
        if config.cache.limit is not None and self.only_units is None and self.item_request is None:
            return self._follow(config, options, console, state, stop_handler, overrides, until)
        remaining, todo = state.remaining_units(options.partition), state.remaining_units()
        report = self._begin_report(config, console, state, remaining, todo)
        if options.dry_run:
            report.remaining = count_members(remaining)
            report_set_aside(store, self, state, report)
            return report
        if state.done:  # though nothing may be left to encode
            self._write_provenance(store, config, state.fingerprint)
        limit = RejectLimit(self, store, config, state)
        if remaining:
            job = self._make_job(config, options, console, state, remaining, overrides, report, until)
            job, part = replace(job, again=frozenset(state.retry_units)), options.partition
            ordered = remaining if part.total > 1 else order_units(remaining, process_name())
            self._run_units(job, state, ordered, iter(ordered), stop_handler, limit, console, report, part)
            state = self.state(store, config, plan, merge=True)
            if stop_handler.reason:
                left = state.remaining_units(options.partition)
                report.details["stopped"] = f"by {stop_handler.reason}; {len(left)} units remain, what is done is kept"
                report.remaining = count_members(left)
                report.next_steps += [f"latentpress {self.name}"] if left else []
        report_set_aside(store, self, state, report)
        return report

    def _begin_report(
        self, config: Config, console: Console, state: StageState, remaining: Sequence[Unit], todo: Sequence[Unit]
    ) -> Report:
        """remaining: units of this process' partition; todo: of all."""
        for damage in state.damaged_lists.values():
            console.warn(f"{damage.message}; its unit is encoded again")
        topics: dict[str, tuple[Topic, ...]] = {"latents": ("masks",), "vision": ("vision",)}
        for message in config.unused_features(*topics.get(self.kind, ())):
            console.warn(message)
        needed = sum(self.estimate_bytes(config, unit) for unit in remaining)
        if shortage := find_shortage(config.root, needed):
            console.warn(f"{shortage}; {SPACE_ADVICE}")
        aside = len(state.set_aside) - sum(len(state.rejects_by_unit.get(unit.unit_id, ())) for unit in todo)
        report = Report(program=self.name, skipped=count_members(state.units) - count_members(todo) - aside)
        report.details = {
            "cache": f"{self.kind}/{state.fingerprint}",
            "units": f"{len(state.units)}, {len(state.units) - len(todo)} done before, {len(remaining)} in this run",
            "to_encode_mib": round(needed / 2**20, 2),
        }
        return report

    def _follow(
        self,
        config: Config,
        options: Options,
        console: Console,
        state: StageState,
        stop_handler: StopHandler,
        overrides: dict[str, int],
        until: float,
    ) -> Report:
        """Encode what training needs, until it has done its steps, with a limited cache."""
        refuse_partition(options, f"{self.name} with {CACHE_LIMIT}")
        store = Store(config.root)
        report = Report(program=self.name, dry_run=options.dry_run)
        report.details = {"cache": f"{self.kind}/{state.fingerprint}", "units": len(state.units)}
        if options.dry_run:
            report.next_steps = [] if has_followed_set(config) else ["latentpress index"]
            report_set_aside(store, self, state, report)
            return report
        with followed_units(self.kind, state.units, config, console) as followed:
            tried = {**dict.fromkeys(followed.before(), ""), **state.done}
            limit = RejectLimit(self, store, config, replace(state, done=tried))
            if followed.is_over:
                report_set_aside(store, self, state, report)
                return report
            followed.drop(state.retry_units)
            cache = config.cache.model_copy(update={"format": followed.format})
            written_as = config.model_copy(update={"cache": cache})
            job = self._make_job(written_as, options, console, state, state.units, overrides, report, until)
            units, part = iter(followed), options.partition
            self._run_units(job, state, state.units, units, stop_handler, limit, console, report, part, followed)
        if stop_handler.reason:
            report.details["stopped"] = f"by {stop_handler.reason}; what is done is kept"
            report.remaining, report.next_steps = 1, [f"latentpress {self.name}"]
        report_set_aside(store, self, self.state(store, config, state.plan), report)
        return report

    def _make_job(
        self, config: Config, options: Options, console: Console, state: StageState, units: Sequence[Unit],
        overrides: dict[str, int], report: Report, until: float,
    ) -> Job:  # fmt: skip
        """The job that encodes `units`, whose media are there, as far as a few of them show."""
        probed = select_probed_members(state.plan, self.kind, state.wanted_members(units))
        require_media(MediaLocations(config, state.plan), self.kind, probed)
        resources, report.details["workers"] = choose_resources(config, options, self.name, overrides, console)
        name, fingerprint = state.plan.name, state.fingerprint
        return Job(config, name, fingerprint, resources, probed_members=probed, stage=self.name, until=until)

    def _write_provenance(self, store: Store, config: Config, fingerprint: str) -> None:
        """Write the settings behind the fingerprint, unless they are there; damaged ones again."""
        path = f"{self.kind}/{fingerprint}/provenance.json"
        data = format_record({"fingerprint": fingerprint, **self.fingerprint_inputs(config)})
        if not store.exists(path) or store.read_bytes(path) != data:
            store.publish_bytes(path, data)

    def _run_units(
        self, job: Job, state: StageState, own_units: list[Unit], units: Iterator[Unit | None],
        stop_handler: StopHandler, limit: RejectLimit, console: Console, report: Report, part: Partition,
        followed: FollowedUnits | None = None,
    ) -> None:  # fmt: skip
        """Encode the units that `units` gives, each of `own_units` once, until they end, the time is up or a stop is
        asked for. followed: what `units` come from, again and again."""
        store, units_by_id = Store(job.config.root), {unit.unit_id: unit for unit in state.units}
        self._write_provenance(store, job.config, job.fingerprint)
        written, finished, smaller_batches, remarks, rounding = 0, 0, 0, Counter[str](), RoundingError()
        rejected_at = reject_folder(self.name, job.fingerprint)
        engine = load_engine(job.config.stages.engine)
        load = self.load_worker if job.config.stages.engine == "local" else self.load_elsewhere

        def stopped_by() -> str:
            is_done = finished == len(own_units) if followed is None else followed.is_over
            return stop_handler.reason or ("" if is_done or time.monotonic() < job.until else "--max-time")

        about = JobReport(
            program=self.name,
            engine=job.config.stages.engine,
            workers=job.resources.worker_count,
            shard=str(part),
            members=count_members(own_units),
            units=len(own_units),
        )
        with (
            stop_handler.stop_on_signals(),
            JobReporter(job.config.root, job.fingerprint, about, stopped_by) as reporter,
            console.progress(about.members, self.name, MEMBER_NAMES[self.member_kind]) as progress,
        ):

            def advance(members: int) -> None:
                stop_handler.check()
                progress.advance(members)
                reporter.advance(members)
                progress.total = max(progress.total or 0, progress.done)  # training may need a unit several times

            def pass_over(unit: Unit) -> None:
                nonlocal finished
                finished += 1
                reporter.add(UnitResult(unit.unit_id, "", elsewhere=True))
                report.skipped += len(unit.members)
                advance(len(unit.members))

            def has_shard(unit: Unit) -> bool:
                return followed is None and job.find_shard(store, self.kind, unit) is not None

            open_units = OpenUnits(units, job.until, stop_handler.check, has_shard, pass_over)
            with closing(engine.run_units(load, job, open_units, advance, console.warn)) as results:
                for result in results:
                    if followed is not None:
                        followed.finish(result)
                    if result.elsewhere:
                        pass_over(units_by_id[result.unit_id])
                        continue
                    finished += 1
                    reporter.add(result)
                    if result.shard_path is None:
                        report.failed.append({"item": result.unit_id, "reason": "failed", "message": result.error})
                        report.remaining += len(units_by_id[result.unit_id].members)
                        continue
                    rejects.write_rejects(store, rejected_at, result.unit_id, list(result.set_aside))
                    report.truncated += format_truncated(state.plan, result.truncated)
                    remarks.update(result.remarks)
                    rounding += result.rounding
                    if result.fitting_batch:
                        console.warn(f"unit {result.unit_id}: out of memory; {result.fitting_batch}")
                        smaller_batches += 1
                    report.done += result.encoded
                    written += result.bytes
                    if followed is None or followed.is_first(result):
                        limit.add({result.unit_id: result.set_aside})
        stop_handler.reason = stopped_by()
        report.details["written_mib"] = round(written / 2**20, 2)
        report.details |= {"units_in_smaller_batches": smaller_batches} if smaller_batches else {}
        if rounding.squares:
            report.details["storage_error"] = rounding.describe()
        if remarks:
            rows = [{"items": count, "of": report.done, "remark": remark} for remark, count in remarks.items()]
            report.details["remarks"] = rows
