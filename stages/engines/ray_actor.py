"""What runs on a node of a Ray cluster: a worker in a thread of its own, beside which the actor answers.

The worker has one thread for everything, since torch's number of threads belongs to the thread that sets it, and bytes
depend on it.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import ray
import xxhash

import schemas
from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.cli.import_path import remove_working_directory
from schemas.cli.progress import announce_by
from schemas.config.pipeline import PACKAGES
from schemas.errors import LatentpressError
from schemas.identity import hash_json
from stages.engines.jobs import Job, Load, UnitResult

SOURCES = Path(schemas.__file__).resolve().parents[1]


class CodeMismatch(LatentpressError):
    """A node has other sources of this project than the program."""


class RootMismatch(LatentpressError):
    """A node does not see the root that the program sees."""


class ActorProgress(NamedTuple):
    """members: of the current unit that are done. announced: from number `first` on."""

    members: int
    first: int
    announced: list[str]


class Stopped(Exception):
    """Ends the worker from within `advance`."""


class UnitActor:
    """Made by stages.engines.ray. Errors for the user are returned, not raised: Ray would wrap them."""

    def __init__(self, load: Load, job: Job) -> None:
        remove_working_directory()  # for the readers, which this process starts
        self._load, self._job = load, job
        self._thread = ThreadPoolExecutor(1, "encode")
        self._units: SimpleQueue[Unit | None] = SimpleQueue()
        self._results: Iterator[UnitResult] = iter(())
        self._counted = 0  # members of the current unit
        self._announced: list[str] = []
        self._stopped = threading.Event()

    def __repr__(self) -> str:
        """In the dashboard and in logs."""
        return f"{self._job.stage} {self._job.process_index}"

    def locate(self) -> str:
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def load(self, code: str, plan: str) -> LatentpressError | None:
        """Check that this node has the program's code and root, and load the model."""
        try:
            if (found := digest_code()) != code:
                raise CodeMismatch(
                    f"the sources of latentpress there ({SOURCES}) are not those of this program",
                    "install the same version, or check out the same commit, on all nodes, and restart Ray there",
                )
            if (found := digest_plan(self._job)) != plan:
                what = "a different" if found else "no"
                raise RootMismatch(
                    f"there is {what} plan {self._job.generation} under {self._job.config.root} there",
                    "the root must be the same place on all nodes: mount it at the same path, or give a URL",
                )
            self._thread.submit(self._start).result()
        except LatentpressError as error:
            return error
        return None

    def run_unit(self, unit: Unit, shown: int) -> tuple[ActorProgress, UnitResult | LatentpressError | None]:
        """The progress, as of `progress`, and the result; None where it was stopped."""
        self._counted = 0
        self._units.put(unit)
        try:
            result: Any = self._thread.submit(next, self._results, None).result()
        except LatentpressError as error:
            result = error
        except Stopped:
            result = None
        return self._progress(shown), result

    @ray.method(concurrency_group="control", enable_task_events=False)
    def progress(self, shown: int) -> ActorProgress:
        """shown: the number of announcements that the program had shown when it asked."""
        return self._progress(shown)

    @ray.method(concurrency_group="control", enable_task_events=False)
    def stop(self) -> None:
        """Drop the current unit and end the worker; returns when its files are removed and its readers have ended."""
        self._stopped.set()
        self._units.put(None)
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    def _start(self) -> None:
        announce_by(self._announced.append)
        self._results = self._load(self._job).run_units(self._take, self._advance)

    def _progress(self, shown: int) -> ActorProgress:
        return ActorProgress(self._counted, shown, self._announced[shown:])

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
            raise Stopped
        self._counted += n


def digest_code() -> str:
    """Of the sources that determine what a worker does."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def digest_plan(job: Job) -> str:
    """Of the job's plan as this machine finds it under the root; "" where it finds none."""
    store, name = Store(job.config.root), f"plans/{job.generation}/plan.json"
    return hash_json(store.read_json(name)) if store.exists(name) else ""
