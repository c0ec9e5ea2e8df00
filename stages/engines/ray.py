"""Units on a Ray cluster, by actors that hold the model and have one unit at a time.

Ray restarts no actor and repeats no call: what becomes of a unit whose actor died is decided here. Only units, numbers
and results go through Ray; media are read and shards are written by the actors.

An actor is placed where there is room for it, loads its model, and gets its first unit when it says that it is ready.
So a stage runs with as many as there is room for, and an autoscaler sees those that wait. An actor ends where nothing
is left for it to do.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.activities import activity, announce
from schemas.errors import LatentpressError
from schemas.interruption import check_stop, pause
from stages.engines.jobs import Job, Load, UnitResult
from stages.engines.ray_cluster import (
    SHARED_ROOT,
    ActorProgress,
    ClusterError,
    DeviceNotChoosable,
    RootMismatch,
    UnitActor,
    actor_options,
    actor_settings,
    connect,
    describe_death,
    describe_room,
    digest_code,
)

MAX_UNIT_TRIES = 3  # of a unit whose actors die; a lost node counts, too
MAX_LOAD_TRIES = 3  # in a row, of an actor that dies before it is ready
POLL_S = 1.0  # between two questions to an actor how many members it has done, at least
QUESTIONS_PER_S = 50  # to all of them: an answer takes this program 4 ms where there are 1,000
ROOM_WARNING_S = 30.0  # after which it is said that there is no room for an actor
STOP_TIMEOUT_S = 30.0  # until an actor that should end is killed
OWNER_DIED = "its owner has died"  # in Ray's words for the death of an actor whose program is gone
SHARED_TIMEOUT_S = 10.0  # until a shard that an actor wrote is seen here


def run_units(
    load: Load,
    job: Job,
    units: Iterator[Unit],
    advance: Callable[[int], None],
    warn: Callable[[str], object] = lambda message: None,
) -> Generator[UnitResult, None, None]:
    """See stages.engines.jobs.Engine. ClusterError where the cluster can't be reached or has no room for any actor."""
    if ":" in job.resources.device:
        kind = job.resources.device.partition(":")[0]
        raise DeviceNotChoosable(
            f"Ray chooses the cards of its workers, and the device is {job.resources.device}",
            f"use --device {kind}; num_gpus of the stage says how many cards a worker has",
        )
    begun_here = not ray.is_initialized()
    if begun_here:
        with activity("connecting to the Ray cluster"):
            connect(job)
    try:
        yield from _ActorPool(load, job, units, advance, warn).run()
    finally:
        if begun_here:
            ray.shutdown()


@dataclass(eq=False)
class _Actor:
    """One actor. number: its place among the workers, from 0. call: what it does now. since: when it began that or made
    progress. counted: members of its unit that were counted."""

    number: int
    handle: Any
    call: ray.ObjectRef
    since: float
    state: Literal["starting", "loading", "ready", "encoding"] = "starting"
    location: str = "not placed yet"
    unit: Unit | None = None
    counted: int = 0
    shown: int = 0  # of its announcements
    question: ray.ObjectRef | None = None
    asked: float = 0.0

    def __str__(self) -> str:
        return f"worker {self.number} ({self.location})"

    def begin(self, state: Literal["loading", "ready", "encoding"], call: ray.ObjectRef | None) -> None:
        self.state, self.since, self.question = state, time.monotonic(), None
        self.asked = self.since
        if call is not None:
            self.call = call


class _ActorPool:
    def __init__(
        self, load: Load, job: Job, units: Iterator[Unit], advance: Callable[[int], None], warn: Callable[[str], object]
    ) -> None:
        self._load, self._job, self._advance, self._warn = load, job, advance, warn
        self._settings = job.config.stages.ray
        self._code = digest_code()
        self._options = actor_options(job.resources)
        self._units, self._has_more = units, True
        self._waiting = deque[Unit]()  # for an actor; units of actors that died come first
        self._actors: list[_Actor] = []
        self._numbers = set(range(job.resources.worker_count))  # of actors that may be made
        self._made: Counter[int] = Counter()  # by number
        self._load_failures: Counter[int] = Counter()  # in a row, by number
        self._deaths: Counter[str] = Counter()  # by unit
        self._checked_places: set[str] = set()
        self._last_room = time.monotonic()  # when last an actor was placed
        self._said_no_room = False

    def run(self) -> Iterator[UnitResult]:
        loading = ExitStack()
        shown = loading.enter_context(activity("waiting for room on the Ray cluster"))
        try:
            while True:
                self._hand_out()
                if placed := sum(actor.state != "starting" for actor in self._actors):
                    shown.description = f"{placed} workers on the Ray cluster load their models"
                if any(actor.state in ("ready", "encoding") for actor in self._actors):
                    loading.close()
                if not self._actors:
                    return
                calls = self._open_calls()
                check_stop()
                finished, _ = ray.wait([*calls], timeout=POLL_S)
                for call in finished:  # at most one
                    yield from self._receive(calls[call], call)
                yield from self._check_times()
        finally:
            loading.close()
            self._end_all()

    def _hand_out(self) -> None:
        """Give units to actors that are ready, make actors for units that wait, and end actors that nothing waits for:
        one that is idle has no files and no readers at work."""
        if time.monotonic() >= self._job.until:
            self._waiting.clear()
            self._has_more = False
        while self._has_more and len(self._waiting) + self._busy < len(self._numbers):
            unit = next(self._units, None)
            self._has_more = unit is not None
            self._waiting += [unit] if unit is not None else []
        for actor in [actor for actor in self._actors if actor.state == "ready"][: len(self._waiting)]:
            actor.unit = unit = self._waiting.popleft()
            named = actor.handle.run_unit.options(name=f"{self._job.stage} {unit.unit_id}")
            actor.begin("encoding", named.remote(unit, actor.shown))
        while len(self._actors) < min(len(self._numbers), len(self._waiting) + self._busy):
            self._make_actor(min(self._numbers - {actor.number for actor in self._actors}))
        if not self._waiting:
            for actor in [actor for actor in self._actors if actor.unit is None]:
                self._actors.remove(actor)
                ray.kill(actor.handle)

    @property
    def _busy(self) -> int:
        return sum(actor.unit is not None for actor in self._actors)

    def _make_actor(self, number: int) -> None:
        resources = actor_settings(self._job.resources)
        # An actor has one unit at a time, so the time limit is this program's alone; clocks of machines differ.
        job = replace(self._job, process_index=number, resources=resources, until=math.inf)
        self._made[number] += 1
        name = f"{self._job.stage} {number}" + (f" ({self._made[number]})" if self._made[number] > 1 else "")
        # The namespace is this program's own, so that the names of several do not clash.
        remote: Any = ray.remote  # its types lack the groups
        actor = remote(concurrency_groups={"control": 1})(UnitActor).options(name=name, **self._options)
        made = actor.remote(self._load, job)
        placed = made.locate.options(name=f"{name}: place").remote()
        self._actors.append(_Actor(number, made, placed, time.monotonic()))

    def _open_calls(self) -> dict[ray.ObjectRef, _Actor]:
        now, calls = time.monotonic(), {actor.call: actor for actor in self._actors}
        between = max(POLL_S, len(self._actors) / QUESTIONS_PER_S)
        for actor in self._actors:
            if actor.state != "encoding":
                continue
            if actor.question is None and now - actor.asked >= between:
                actor.question, actor.asked = actor.handle.progress.remote(actor.shown), now
            if actor.question is not None:
                calls[actor.question] = actor
        return calls

    def _receive(self, actor: _Actor, call: ray.ObjectRef) -> Iterator[UnitResult]:
        """Handle the answer to a call, or the actor's death."""
        try:
            answer: Any = ray.get(call)
        except RayError as error:
            yield from self._lose(actor, describe_death(error))
            return
        if call == actor.question:
            actor.question = None
            self._show(actor, answer)
        elif actor.state == "starting":
            actor.location = answer
            load = actor.handle.load.options(name=f"{self._job.stage} {actor.number}: load")
            actor.begin("loading", load.remote(self._code))
        elif actor.state == "loading":
            if answer is not None:
                raise self._place_error(answer, actor)
            self._load_failures.pop(actor.number, None)
            self._advance(0)
            actor.begin("ready", None)
        else:
            progress, result = answer
            self._show(actor, progress)
            if isinstance(result, LatentpressError):
                raise self._place_error(result, actor)
            actor.unit, actor.counted = None, 0
            actor.begin("ready", None)
            self._require_shared_root(actor, result)
            yield result

    def _show(self, actor: _Actor, progress: ActorProgress) -> None:
        for message in progress.announced[actor.shown - progress.first :]:
            announce(f"{actor}: {message}")
            actor.shown += 1
        if progress.members != actor.counted:
            self._advance(progress.members - actor.counted)
            actor.counted, actor.since = progress.members, time.monotonic()

    def _place_error(self, error: LatentpressError, actor: _Actor) -> LatentpressError:
        error.message = f"{actor}: {error.message}"
        return error

    def _require_shared_root(self, actor: _Actor, result: UnitResult) -> None:
        """The first shard that each actor writes must appear here."""
        if result.shard_path is None or actor.location in self._checked_places:
            return
        store, end = Store(self._job.config.root), time.monotonic() + SHARED_TIMEOUT_S
        while not store.exists(result.shard_path):
            if time.monotonic() > end:
                raise RootMismatch(
                    f"{actor} wrote {result.shard_path} under {self._job.config.root}, and it is not seen here",
                    SHARED_ROOT,
                )
            pause(0.5)
        self._checked_places.add(actor.location)

    def _lose(self, actor: _Actor, reason: str) -> Iterator[UnitResult]:
        """An actor that died, or hangs and is killed here: its unit is done again by another, a few times. ClusterError
        if the cluster took this program for dead, as it does when Ray ends on this machine: it makes no actor then."""
        if OWNER_DIED in reason:
            raise ClusterError(
                f"{actor} was lost: {reason}. The cluster takes this program for dead",
                "look whether Ray runs on this machine (`ray status`), start it there again, and run the same command "
                "again; what is done is kept",
            )
        self._actors.remove(actor)
        ray.kill(actor.handle)
        self._advance(-actor.counted)
        if actor.unit is None:
            self._lose_unready(actor, reason)
            return
        name = actor.unit.unit_id
        self._deaths[name] += 1
        if self._deaths[name] < MAX_UNIT_TRIES:
            self._warn(f"{actor} was lost: {reason}. Its unit {name} is done again by another")
            self._waiting.appendleft(actor.unit)  # next: at the end the other actors would wait for it
        else:
            self._warn(f"{actor} was lost: {reason}. Its unit {name} is left")
            yield UnitResult(name, None, error=f"{MAX_UNIT_TRIES} workers were lost with it; the last: {reason}")

    def _lose_unready(self, actor: _Actor, reason: str) -> None:
        self._load_failures[actor.number] += 1
        problem = f"{actor} was lost before it was ready: {reason}"
        if self._load_failures[actor.number] < MAX_LOAD_TRIES:
            self._warn(f"{problem}. Another takes its place")
            return
        self._numbers.discard(actor.number)
        if not self._numbers:
            raise ClusterError(
                f"{problem}; so were all others, {MAX_LOAD_TRIES} times in a row each",
                "Ray's logs on that node have its output (/tmp/ray/session_latest/logs/worker-*); every node needs the "
                "same installation of latentpress, and room in memory for the model",
            )
        self._warn(f"{problem}, {MAX_LOAD_TRIES} times in a row: it is given up. {len(self._numbers)} others go on")

    def _check_times(self) -> Iterator[UnitResult]:
        """Replace actors that hang; say where there is no room, and end where there never was."""
        now, settings = time.monotonic(), self._settings
        for actor in list(self._actors):
            if actor.state == "encoding" and now - actor.since > settings.stall_timeout_s:
                yield from self._lose(
                    actor, f"it made no progress for {settings.stall_timeout_s:g} s (stages.ray.stall_timeout_s)"
                )
            elif actor.state == "loading" and now - actor.since > settings.ready_timeout_s:
                yield from self._lose(
                    actor, f"it was not ready after {settings.ready_timeout_s:g} s (stages.ray.ready_timeout_s)"
                )
        unplaced = [actor for actor in self._actors if actor.state == "starting"]
        if len(unplaced) < len(self._actors):
            self._last_room = now
        for actor in unplaced:
            if now - actor.since > ROOM_WARNING_S and not self._said_no_room:
                self._said_no_room = True
                what = f"{len(unplaced)} of {len(self._actors)} workers are not placed yet"
                self._warn(f"{what}. {describe_room(self._options)}")
        if unplaced and now - self._last_room > settings.ready_timeout_s:
            raise ClusterError(
                f"no worker could be placed for {settings.ready_timeout_s:g} s (stages.ray.ready_timeout_s). "
                + describe_room(self._options),
                "add nodes, or lower num_cpus, num_gpus or memory_gib of the stage; what is done is kept",
            )

    def _end_all(self) -> None:
        with suppress(RayError):
            stops = [actor.handle.stop.remote() for actor in self._actors if actor.state in ("ready", "encoding")]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor.handle)
