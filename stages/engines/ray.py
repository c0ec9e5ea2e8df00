"""Run units on a Ray cluster, in actors that hold the model and have one unit at a time (`stages/engines/pool.py`).

Ray does not restart actors or repeat calls; `WorkerPool` decides about a unit whose actor died. Only units, numbers and
results are sent through Ray. The actors read media and write shards.

Ray places an actor on a node with room for it; the actor loads its model, and gets its first unit when it is ready. So
a stage runs with as many actors as the cluster has room for, and an autoscaler receives the number of waiting actors.
An actor ends when no unit remains. All calls to its worker run in one thread, because torch's number of threads is
valid only in the thread that sets it, and the bytes of a shard depend on this number. The actor answers other calls in
another thread.
"""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray
import xxhash
from ray.exceptions import RayError
from ray.job_config import JobConfig

import schemas
from cache.sets.plans import Unit
from cache.store.store import Store
from schemas import remove_working_directory
from schemas.activities import activity, announce_by
from schemas.config.encoding import MOST_READERS, Encoding
from schemas.config.pipeline import PACKAGES
from schemas.errors import LatentpressError, UsageError
from schemas.interruption import Stopped, end_at_once
from schemas.text_format import shorten
from stages.engines.jobs import Job, Load, UnitResult
from stages.engines.pool import Death, Message, WorkerPool, WorkerProcess

POLL_S = 1.0  # shortest time between two requests for an actor's progress
QUESTIONS_PER_S = 50  # requests to all actors; with 1,000 actors, this program takes 4 ms for an answer
ROOM_WARNING_S = 30.0  # time after which a warning reports that the cluster has no room for an actor
STOP_TIMEOUT_S = 30.0  # an actor that should end is killed after this time
OWNER_DIED = "its owner has died"  # part of Ray's message for the death of an actor whose program has ended
CONNECT_TIMEOUT_S = 20.0
HEAD_TIMEOUT_S = 45  # limit for the time without an answer of the cluster's head; Ray ends programs after 60 s
SOURCES = Path(schemas.__file__).resolve().parents[1]


class ClusterError(LatentpressError):
    """Raised if the cluster can't be reached, or can't run the work."""


def run_units(
    load: Load,
    job: Job,
    units: Iterator[Unit],
    advance: Callable[[int], None],
    warn: Callable[[str], object] = lambda message: None,
) -> Generator[UnitResult, None, None]:
    """Run units on the cluster, see `stages.engines.jobs.Engine`. Raises ClusterError if the cluster can't be reached,
    or does not have room for any actor."""
    if ":" in job.resources.device:
        kind = job.resources.device.partition(":")[0]
        raise UsageError(
            f"Ray chooses the cards of its workers, but the device is {job.resources.device}",
            f"use --device {kind}; num_gpus of the stage sets the number of cards of a worker",
        )
    with _watching_head(job), _connected(job):
        yield from _RayPool(load, job, units, advance, warn).run()


@dataclass(eq=False)
class _Actor(WorkerProcess):
    """One actor. call: its call in progress. poll: the pending request for its progress. since: time at which the
    call began or last made progress. location: process and node; "" until the actor is placed."""

    handle: Any
    call: ray.ObjectRef | None
    poll: ray.ObjectRef | None = None
    location: str = ""

    def __post_init__(self) -> None:
        self.since = self.polled = time.monotonic()

    def __str__(self) -> str:
        return f"worker {self.number} ({self.location or 'not placed yet'})"

    def begin(self, call: ray.ObjectRef | None) -> None:
        self.call = call
        self.since = self.polled = time.monotonic()


class _RayPool(WorkerPool[_Actor]):
    advice = (
        "see its output in Ray's logs on its node (/tmp/ray/session_latest/logs/worker-*); every node needs the same "
        "installation of latentpress, and enough memory for the model"
    )

    def __init__(self, load: Load, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._load, self._settings, self._code = load, self._job.config.stages.ray, digest_code()
        self._options = actor_options(self._job.resources)
        self._last_room = time.monotonic()  # last time at which an actor was placed
        self._has_warned = False

    def _describe_loading(self) -> str:
        placed = sum(bool(actor.location) for actor in self._processes)
        return f"{placed} workers on the Ray cluster load their models" if placed else "waiting for room on the cluster"

    def _start(self, number: int) -> _Actor:
        resources = actor_settings(self._job.resources)
        # An actor has one unit at a time, so only this program needs the time limit; clocks of machines differ.
        job = replace(self._job, process_index=number, resources=resources, until=math.inf)
        remote: Any = ray.remote  # ray.remote's types lack concurrency_groups
        actor = remote(concurrency_groups={"control": 1})(UnitActor).options(**self._options)
        handle = actor.remote(self._load, job)
        return _Actor(number, handle, handle.locate.options(name=f"{self._job.stage} {number}: place").remote())

    def _send(self, actor: _Actor, unit: Unit) -> bool:
        actor.begin(actor.handle.run_unit.options(name=f"{self._job.stage} {unit.unit_id}").remote(unit))
        return True

    def _receive(self) -> Iterator[tuple[_Actor, Message | Death]]:
        calls = self._open_calls()
        finished, _ = ray.wait([*calls], timeout=POLL_S)
        for call in finished:
            actor = calls[call]
            try:
                answer: Any = ray.get(call)
            except RayError as error:
                yield actor, self._explain_death(actor, error)
                continue
            if call == actor.poll:
                actor.poll = None
            elif not actor.location:
                actor.location = answer
                load = actor.handle.load.options(name=f"{self._job.stage} {actor.number}: load")
                actor.begin(load.remote(self._code))
                continue
            else:
                actor.begin(None)
            for message in answer:
                if isinstance(message, int) and message:
                    actor.since = time.monotonic()
                yield actor, message
        yield from self._check_times()

    def _open_calls(self) -> dict[ray.ObjectRef, _Actor]:
        time_now, calls = time.monotonic(), dict[ray.ObjectRef, _Actor]()
        between = max(POLL_S, len(self._processes) / QUESTIONS_PER_S)
        for actor in self._processes:
            if actor.units and actor.poll is None and time_now - actor.polled >= between:
                actor.poll, actor.polled = actor.handle.progress.remote(), time_now
            calls |= {call: actor for call in (actor.call, actor.poll) if call is not None}
        return calls

    def _explain_death(self, actor: _Actor, error: RayError) -> Death:
        """Return the death with its reason. Raises ClusterError if the cluster assumes that this program is dead, which
        happens if Ray ends on this machine: the cluster then creates no more actors for the program."""
        reason = describe_death(error)
        if OWNER_DIED in reason:
            raise ClusterError(
                f"{actor} was lost: {reason}. The cluster assumes that this program has ended",
                "check whether Ray runs on this machine (`ray status`), start it again, and run the same command "
                "again; finished units are kept",
            )
        return Death(reason)

    def _check_times(self) -> Iterator[tuple[_Actor, Death]]:
        """Yield the actors that hang. Warn if the cluster has no room for some actors. Raise ClusterError if it had no
        room for any actor for ready_timeout_s."""
        time_now, settings = time.monotonic(), self._settings
        for actor in list(self._processes):
            if actor.units and time_now - actor.since > settings.stall_timeout_s:
                limit = f"{settings.stall_timeout_s:g} s (stages.ray.stall_timeout_s)"
                yield actor, Death(f"it made no progress for {limit}")
            elif actor.location and not actor.is_ready and time_now - actor.since > settings.ready_timeout_s:
                limit = f"{settings.ready_timeout_s:g} s (stages.ray.ready_timeout_s)"
                yield actor, Death(f"it was not ready after {limit}")
        unplaced = [actor for actor in self._processes if not actor.location]
        if len(unplaced) < len(self._processes):
            self._last_room = time_now
        if not self._has_warned and any(time_now - actor.since > ROOM_WARNING_S for actor in unplaced):
            self._has_warned = True
            problem = f"{len(unplaced)} of {len(self._processes)} workers are not placed yet"
            self._warn(f"{problem}. {describe_room(self._options)}")
        if unplaced and time_now - self._last_room > settings.ready_timeout_s:
            raise ClusterError(
                f"no worker could be placed for {settings.ready_timeout_s:g} s (stages.ray.ready_timeout_s). "
                + describe_room(self._options),
                "add nodes, or lower num_cpus, num_gpus or memory_gib of the stage; finished units are kept",
            )

    def _drop(self, actor: _Actor) -> None:
        ray.kill(actor.handle)

    def _end_all(self) -> None:
        with suppress(RayError):
            stops = [actor.handle.stop.remote() for actor in self._processes if actor.is_ready]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for actor in self._processes:
            ray.kill(actor.handle)


@contextmanager
def _connected(job: Job) -> Iterator[None]:
    """Context in which this program is connected to the cluster."""
    if ray.is_initialized():
        yield
        return
    with activity("connecting to the Ray cluster"):
        _connect(job)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _watching_head(job: Job) -> Iterator[None]:
    """Context in which the cluster's head is polled. If it does not answer for HEAD_TIMEOUT_S, this process ends with
    an error, because any call to Ray may wait forever, including connecting and disconnecting."""
    ended, silent_s = threading.Event(), 0

    def ask() -> None:
        nonlocal silent_s
        while not ended.wait(POLL_S):
            with suppress(RayError, RuntimeError):  # no answer, or the connection has just ended
                if ray.is_initialized():
                    ray.cluster_resources()
                    silent_s = 0

    def watch() -> None:
        nonlocal silent_s
        while not ended.wait(1.0):  # counts seconds, because this program may have been suspended
            silent_s += 1
            if silent_s > HEAD_TIMEOUT_S:
                problem = f"the head of the Ray cluster at {_find_address(job)!r} has not answered for {silent_s} s"
                advice = (
                    "check whether its machine is reachable and its process gcs_server runs (`ray status`), or start "
                    "another cluster; then run the same command again, because finished units are kept"
                )
                end_at_once(ClusterError(problem, advice))

    for target in (ask, watch):
        threading.Thread(target=target, name=f"{target.__name__}-head", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _find_address(job: Job) -> str:
    address = job.config.stages.ray.address
    return os.environ.get("RAY_ADDRESS", address) if address == "auto" else address


def _connect(job: Job) -> None:
    """Connect to the cluster as a job, which the dashboard shows with the program's command line and the data `about`.

    Ray puts the working directory on the import path of its workers, and a file in it could have the name of a module.
    So the folder of our packages is the working directory while Ray connects. The program's SIGTERM handler is restored
    afterwards, because Ray's handler would end the program without a report.
    """
    address = _find_address(job)
    about = {"job_name": job.stage, "plan": job.generation, "cache": job.fingerprint, "root": job.config.root}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address != "auto":  # check that the address answers, because Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        with chdir(SOURCES):
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                job_config=JobConfig(metadata=about),
                runtime_env={"worker_process_setup_hook": "latentpress.add_packages"},
            )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(
            f"the Ray cluster at {address!r} can't be used: {shorten(str(error).strip(), 400)}",
            "start one (`ray start --head` on one machine, `ray start --address HOST:PORT` on each other "
            "machine), or set --address to HOST:PORT",
        ) from error
    except SystemExit as error:  # raised by Ray's SIGTERM handler
        signal.signal(signal.SIGTERM, on_sigterm)
        os.kill(os.getpid(), signal.SIGTERM)
        raise Stopped from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def actor_options(resources: Encoding) -> dict[str, Any]:
    """Return Ray's options for an actor: its resources on a node; no restarts and no repeated calls."""
    gpus = resources.num_gpus
    if gpus is None:
        wants = resources.device != "cpu" and (resources.device != "auto" or "GPU" in ray.cluster_resources())
        gpus = 1.0 if wants else 0.0
    return {
        "num_cpus": _cpus(resources),
        "num_gpus": gpus,
        "memory": None if resources.memory_gib is None else int(resources.memory_gib * 2**30),
        "max_restarts": 0,
        "max_task_retries": 0,
    }


def _cpus(resources: Encoding) -> float:
    return float(resources.threads) if resources.num_cpus is None else resources.num_cpus


def actor_settings(resources: Encoding) -> Encoding:
    """The settings of an actor: one worker and, unless readers are configured, one reader fewer than its CPUs (at least
    1, at most MOST_READERS), because a node's other cores may belong to other actors."""
    readers = resources.readers or max(1, min(MOST_READERS, int(_cpus(resources)) - 1))
    return resources.changed(workers=1, readers=readers)


def describe_room(options: dict[str, Any]) -> str:
    """Return a text with the resources that an actor needs, and the currently free resources."""
    needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    needs |= {"memory in GiB": options["memory"] / 2**30} if options["memory"] else {}
    free = ray.available_resources()
    room = {"CPU": free.get("CPU", 0.0), "GPU": free.get("GPU", 0.0), "memory in GiB": free.get("memory", 0) / 2**30}
    return (
        f"A worker needs {', '.join(f'{value:g} {key}' for key, value in needs.items() if value)}; free on all "
        f"nodes: {', '.join(f'{room[key]:g} {key}' for key in needs)}"
    )


def describe_death(error: RayError) -> str:
    """Return the last line of the error's text, which is the reason; earlier lines name the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(lines[-1].rstrip(".") if lines else type(error).__name__, 200)


class ActorStopped(Exception):
    """Raised in `advance` to end the worker."""


class UnitActor:
    """A worker on a node of the cluster. Errors for the user are returned instead of raised, because Ray would
    wrap them."""

    def __init__(self, load: Load, job: Job) -> None:
        remove_working_directory()  # from the import path, for the readers that this process starts
        self._load, self._job = load, job
        self._thread = ThreadPoolExecutor(1, "encode")
        self._units, self._messages = SimpleQueue[Unit | None](), SimpleQueue[Message]()
        self._results: Iterator[UnitResult] = iter(())
        self._stopped = threading.Event()

    def __repr__(self) -> str:
        """The actor's name in Ray's dashboard and logs."""
        return f"{self._job.stage} {self._job.process_index}"

    def locate(self) -> str:
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def load(self, code: str) -> list[Message]:
        """Check that this node has the program's code and the plan under the root, and load the model. Returns the
        worker's messages, and 0 if it is ready."""
        try:
            if digest_code() != code:
                raise ClusterError(
                    f"the sources of latentpress on this node ({SOURCES}) differ from the program's sources",
                    "install the same version, or check out the same commit, on all nodes, and restart Ray on them",
                )
            if not Store(self._job.config.root).exists(f"plans/{self._job.generation}/plan.json"):
                raise ClusterError(
                    f"the root {self._job.config.root} on this node does not contain plan {self._job.generation}",
                    "the root must be the same place on all nodes: mount it at the same path, or use a URL",
                )
            self._thread.submit(self._start).result()
        except LatentpressError as error:
            return [error]
        return [*self._take_messages(), 0]

    def run_unit(self, unit: Unit) -> list[Message]:
        """Run a unit. Returns the worker's messages; the last message is the result. A stopped worker returns no
        messages."""
        self._units.put(unit)
        try:
            result = self._thread.submit(next, self._results).result()
            return [*self._take_messages(), result]
        except LatentpressError as error:
            return [error]
        except ActorStopped:
            return []

    @ray.method(concurrency_group="control", enable_task_events=False)
    def progress(self) -> list[Message]:
        """The worker's messages since the last call."""
        return self._take_messages()

    @ray.method(concurrency_group="control", enable_task_events=False)
    def stop(self) -> None:
        """Drop the current unit and end the worker. Returns after its files are removed and its readers have ended."""
        self._stopped.set()
        self._units.put(None)
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    def _take_messages(self) -> list[Message]:
        messages = list[Message]()
        with suppress(Empty):
            while True:
                messages.append(self._messages.get(block=False))
        return messages

    def _start(self) -> None:
        announce_by(self._messages.put)
        self._results = self._load(self._job).run_units(self._take, self._advance)

    def _close(self) -> None:
        if hasattr(self._results, "close"):
            self._results.close()

    def _take(self, wait: bool) -> Unit | None:
        try:
            return self._units.get(block=wait)
        except Empty:
            return None

    def _advance(self, n: int) -> None:
        if self._stopped.is_set():
            raise ActorStopped
        self._messages.put(n)


def digest_code() -> str:
    """Return a hash of the sources that a worker runs."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
