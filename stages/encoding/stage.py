"""An encoding stage, and the run of one.

A stage has a kind of unit, a fingerprint, and a `Worker`, which is made once in each process from a `Job`, loads its
model and turns each unit into one shard. The plan lists the units; one listing of shard names shows which units are
done. A process without --shard takes all remaining units in a random order, and checks before each unit whether the
unit's shard exists by then. So any number of processes on any number of machines need no lock and no coordination: they
are started with the same command and share the work. A process does not see which units other processes are encoding,
so a few units are encoded twice, to the same bytes: benchmarks/results/sharing.md.
"""

import json
import math
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer

from cache.models.compatibility import check_parts, pin_revision
from cache.sets.plans import Plan, Unit
from cache.sets.set_lookup import current_plan
from cache.sets.table_checks import Provenance
from cache.sets.training_checks import check_before_stages
from cache.store.files import SPACE_ADVICE, find_shortage
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.console import Console, Options, Report
from schemas.config.encoding import MOST_PREFETCH, Encoding, EngineName
from schemas.config.loading import load_config
from schemas.config.pipeline import Config, Topic
from schemas.config.section import MOST_PROCESSES
from schemas.errors import LatentpressError, UsageError
from schemas.identity import compute_fingerprint
from schemas.interruption import MaxTimeOption
from stages.discovery.media_locations import MediaLocations, require_media, select_probed_members
from stages.encoding.item_plans import find_item_plan
from stages.encoding.stage_state import RejectLimit, StageNames, StageState, count_members, find_state, report_rejects
from stages.encoding.tally import Tally
from stages.engines.jobs import Job, Worker, load_engine
from stages.planning.items import ItemRequest

_READERS_HELP = "Decoding processes for each worker.  [default: as configured]"
_ENGINE_HELP = "Where workers run: local, this machine, or ray, a Ray cluster.  [default: as configured]"
_ADDRESS_HELP = "Address of the Ray cluster's head, or auto; implies --engine ray.  [default: as configured]"
_PREFETCH_HELP = "Members read ahead by each process.  [default: as configured]"


@dataclass(frozen=True)
class EncodingStage:
    """One encoding stage. `fingerprint_inputs`: function that returns the settings and weights that determine the
    shards' bytes, without torch. `load_worker`: function that imports the model's library and makes the worker.
    `item_request`: function that returns the media to read, for an item stage, which comes before `bucket` and makes
    its own plan."""

    name: str
    kind: str  # the folder of its shards: text | latents | vision | captions
    fingerprint_inputs: Callable[[Config], dict[str, Any]]
    load_worker: Callable[[Job], Worker]
    unit_kind: str = ""  # the kind of the encoded units, if it differs from `kind`
    only_units: frozenset[str] | None = None  # ids of the units to encode, for a repair; None: all units of the plan
    #: The size of a unit's shard, in bytes.
    estimate_bytes: Callable[[Config, Unit], int] = lambda config, unit: unit.estimated_bytes
    item_request: Callable[[Config], ItemRequest] | None = None
    reads_checkpoint: bool = True  # whether it reads the configured model

    @property
    def member_kind(self) -> str:
        """One of "text", "latents", "items"."""
        return "items" if self.item_request else self.unit_kind or self.kind

    def run(
        self,
        config: Config,
        options: Options,
        console: Console,
        *,
        retry_set_aside: Annotated[
            bool, typer.Option("--retry-set-aside", help="Encode rejected items again.")
        ] = False,
        max_time: MaxTimeOption = None,
        readers: Annotated[int | None, typer.Option(min=1, max=MOST_PROCESSES, metavar="N", help=_READERS_HELP)] = None,
        prefetch: Annotated[
            int | None, typer.Option(min=1, max=MOST_PREFETCH, metavar="N", help=_PREFETCH_HELP)
        ] = None,
        engine: Annotated[EngineName | None, typer.Option(help=_ENGINE_HELP)] = None,
        address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help=_ADDRESS_HELP)] = None,
    ) -> Report:
        """Encode the remaining units of this process' partition, and report."""
        until = math.inf if max_time is None else time.monotonic() + max_time
        config, store = choose_engine(config, options, engine, address), Store(config.root)
        run_units = load_engine(config.stages.engine).run_units  # raises before anything is read
        if options.dry_run:
            check_before_stages(config, console.warn)
        plan = self.find_plan(store, config, not options.dry_run, console.warn)
        if self.reads_checkpoint:
            if not options.dry_run:
                config = config.changed(model=pin_revision(config.model, store))
            check_parts(config, ask_hub=not options.dry_run)
        state = self.state(store, config, plan, retry_set_aside)
        remaining = state.remaining_units(options.partition)
        report = self._begin_report(config, console, state, remaining)
        if options.dry_run:
            report.remaining = count_members(remaining)
            report_rejects(store, state, report)
            return report
        if state.shard_paths:  # even if no unit is left to encode
            self._write_provenance(store, config, state.fingerprint)
        limit = RejectLimit(store, config.stages.max_reject_fraction, state)
        if remaining:
            changes = {key: value for key, value in (("readers", readers), ("prefetch", prefetch)) if value}
            resources = cast(Encoding, options.resources(config, self.name).changed(**changes))
            workers, reason = choose_workers(config.stages.engine, resources)
            report.details["workers"] = f"{workers}, {reason}"
            if resources.workers is None:
                console.log(f"workers: {workers}, {reason}")
            probed = select_probed_members(plan, self.kind, state.wanted_members(remaining))
            require_media(MediaLocations(config, plan), self.kind, probed)
            self._write_provenance(store, config, state.fingerprint)
            resources, retry_units = resources.changed(workers=workers), frozenset(state.retry_units)
            job = Job(config, plan.name, state.fingerprint, resources, 0, probed, self.name, retry_units, until)
            units = remaining if options.partition.total > 1 else order_units(remaining)
            tally = Tally(job, state, units, report, console, options.partition, limit)
            load = self.load_worker if config.stages.engine == "local" else self.load_remote_worker
            tasks = run_units(load, job, tally.open_units(), tally.advance, console.warn)
            with tally.show_progress(), closing(tasks) as results:
                for result in results:  # a worker has written the shard, which marks the unit as done
                    tally.add(result)
            tally.finish()
            state = self.state(store, config, plan)
            if tally.stopped_by:
                unfinished = state.remaining_units(options.partition)
                report.details["stopped"] = (
                    f"by {tally.stopped_by}; {len(unfinished)} units remain, finished units are kept"
                )
                report.remaining = count_members(unfinished)
                report.next_steps += [f"latentpress {self.name}"] if unfinished else []
        report_rejects(store, state, report)
        return report

    def find_plan(
        self, store: Store, config: Config, publish: bool = False, warn: Callable[[str], object] = lambda _: None
    ) -> Plan:
        """The plan that the stage encodes: the current plan of `bucket`, or an item stage's own plan. publish: whether
        to publish an item stage's plan. Raises LatentpressError if `discover` or `bucket` has to run first."""
        if self.item_request is None:
            return current_plan(store, config)
        return find_item_plan(store, config, self.item_request(config), publish, warn)

    def fingerprint(self, config: Config) -> str:
        return compute_fingerprint(self.fingerprint_inputs(config))

    def state(self, store: Store, config: Config, plan: Plan, retry: bool = False) -> StageState:
        """Compare the plan's units with the existing shards: see `find_state`."""
        names = StageNames(self.name, self.kind, self.member_kind)
        locations = MediaLocations(config, plan)
        return find_state(names, self.fingerprint(config), plan, locations, retry, self.only_units)

    def load_remote_worker(self, job: Job) -> Worker:
        """Make the worker on another machine. Raises LatentpressError if its checkpoint gives a different
        fingerprint."""
        fingerprint = self.fingerprint(job.config)
        if fingerprint != job.fingerprint:
            raise LatentpressError(
                f"the weights or settings of {job.config.model.source} on {socket.gethostname()} give "
                f"{self.kind}/{fingerprint}, but {self.kind}/{job.fingerprint} on the machine that started the stage",
                "put the same checkpoint on both machines, at the same path",
            )
        return self.load_worker(job)

    def _begin_report(self, config: Config, console: Console, state: StageState, remaining: Sequence[Unit]) -> Report:
        """remaining: remaining units of this process's partition."""
        for damage in state.damaged_lists.values():
            console.warn(f"{damage.message}; its unit is encoded again")
        topics: dict[str, tuple[Topic, ...]] = {"latents": ("masks",), "vision": ("vision",)}
        for message in config.unused_features(*topics.get(self.kind, ())):
            console.warn(message)
        needed = sum(self.estimate_bytes(config, unit) for unit in remaining)
        if shortage := find_shortage(config.root, needed):
            console.warn(f"{shortage}; {SPACE_ADVICE}")
        todo = state.remaining_units()
        rejected = len(state.rejected_members) - sum(len(state.rejects_by_unit.get(unit.unit_id, ())) for unit in todo)
        report = Report(program=self.name, skipped=count_members(state.units) - count_members(todo) - rejected)
        report.details = {
            "cache": f"{self.kind}/{state.fingerprint}",
            "units": f"{len(state.units)}, {len(state.units) - len(todo)} done before, {len(remaining)} in this run",
            "to_encode_mib": round(needed / 2**20, 2),
        }
        return report

    def _write_provenance(self, store: Store, config: Config, fingerprint: str) -> None:
        """Write provenance.json, the settings behind the fingerprint, unless an intact file exists."""
        path = f"{self.kind}/{fingerprint}/provenance.json"
        data = Provenance.model_validate({"fingerprint": fingerprint, **self.fingerprint_inputs(config)}).format()
        if not store.exists(path) or store.read_bytes(path) != data:
            store.publish_bytes(path, data)


def order_units(units: Sequence[Unit]) -> list[Unit]:
    """The units in a random order, so that processes rarely encode the same unit."""
    return random.SystemRandom().sample(units, len(units))


def choose_engine(config: Config, options: Options, engine: EngineName | None, address: str | None) -> Config:
    """The configuration with --engine and --address. Raises UsageError if the options contradict each other."""
    if address is not None and engine == "local":
        raise UsageError("--address needs a Ray cluster, and --engine is local", "remove one of the two options")
    if engine is None and address is None:
        return config
    overrides = [f"stages.engine={engine or 'ray'}"]
    overrides += [f"stages.ray.address={json.dumps(address)}"] if address is not None else []
    return load_config(options.config, (*options.overrides, *overrides))


def choose_workers(engine: EngineName, resources: Encoding) -> tuple[int, str]:
    """The number of workers and the reason for it. Several workers on this machine use one card each: see
    `model_loading.select_device`."""
    if resources.workers is not None:
        return resources.workers, "as configured"
    if engine == "ray":
        return 1, "the default on a Ray cluster; see --workers"
    if resources.device == "cpu" or ":" in resources.device:
        return 1, f"because the device is {resources.device}"
    with activity("loading torch to count the cards", at_once=True):
        import torch
    # torch counts cards with NVML, so this process makes no CUDA context, which would take a worker's memory on the
    # card.
    cards = torch.accelerator.device_count()
    return (cards, "one for each accelerator") if cards else (1, "because torch finds no accelerator")
