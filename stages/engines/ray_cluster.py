"""A Ray cluster: connecting to it, what an actor takes of it, and the actor that runs on a node.

The actor has its worker in a thread of its own, beside which it answers. The worker has one thread for everything, as
torch's number of threads belongs to the thread that sets it, and bytes depend on it.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import ray
import xxhash
from ray.exceptions import RayError
from ray.job_config import JobConfig

import schemas
from cache.sets.plans import Unit
from cache.store.store import Store
from schemas import remove_working_directory
from schemas.activities import announce_by
from schemas.config.encoding import MOST_READERS, Encoding
from schemas.config.pipeline import PACKAGES
from schemas.errors import USAGE, LatentpressError
from schemas.interruption import Stopped
from schemas.text_format import shorten
from stages.engines.jobs import Job, Load, UnitResult

CONNECT_TIMEOUT_S = 20.0
SHARED_ROOT = "the root must be the same place on all nodes: mount it at the same path, or give a URL"


class ClusterError(LatentpressError):
    """The cluster can't be reached, or can't do the work."""


class DeviceNotChoosable(LatentpressError):
    exit_code = USAGE


def connect(job: Job) -> None:
    """Join the cluster as a job of it, which the dashboard shows with the program's command line and with these data.
    Ray puts the working directory on the import path of its workers, where a file could be named like a module: the
    folder of our packages takes its place. Its SIGTERM handler would end the program without a report."""
    settings = job.config.stages.ray
    about = {"job_name": job.stage, "plan": job.generation, "cache": job.fingerprint, "root": job.config.root}
    address = os.environ.get("RAY_ADDRESS", settings.address) if settings.address == "auto" else settings.address
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address != "auto":  # Ray would try for minutes
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
            "start one (`ray start --head` on one machine, `ray start --address HOST:PORT` on the others), "
            "or give its HOST:PORT with --address",
        ) from error
    except SystemExit as error:  # by that handler
        signal.signal(signal.SIGTERM, on_sigterm)
        os.kill(os.getpid(), signal.SIGTERM)
        raise Stopped from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def actor_options(resources: Encoding) -> dict[str, Any]:
    """Return what an actor takes of a node, and that Ray neither restarts it nor repeats a call."""
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
    """An actor's own: a node's cores are not all its own, so the readers are as many as the CPUs it asked for."""
    readers = resources.readers or max(1, min(MOST_READERS, int(_cpus(resources)) - 1))
    return resources.changed(workers=1, readers=readers)


def describe_room(options: dict[str, Any]) -> str:
    """Describe what an actor needs, and what is free now."""
    needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    needs |= {"memory in GiB": options["memory"] / 2**30} if options["memory"] else {}
    free = ray.available_resources()
    room = {"CPU": free.get("CPU", 0.0), "GPU": free.get("GPU", 0.0), "memory in GiB": free.get("memory", 0) / 2**30}
    return (
        f"A worker needs {', '.join(f'{value:g} {key}' for key, value in needs.items() if value)}; free, on all "
        f"nodes together: {', '.join(f'{room[key]:g} {key}' for key in needs)}"
    )


def describe_death(error: RayError) -> str:
    """The last line, which says why; those before it name the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(lines[-1].rstrip(".") if lines else type(error).__name__, 200)


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


class ActorStopped(Exception):
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

    def load(self, code: str) -> LatentpressError | None:
        """Check that this node has the program's code, and load the model, which reads the plan under the root."""
        try:
            if digest_code() != code:
                raise CodeMismatch(
                    f"the sources of latentpress there ({SOURCES}) are not those of this program",
                    "install the same version, or check out the same commit, on all nodes, and restart Ray there",
                )
            if not Store(self._job.config.root).exists(f"plans/{self._job.generation}/plan.json"):
                what = f"there is no plan {self._job.generation} under {self._job.config.root} there"
                raise RootMismatch(what, SHARED_ROOT)
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
        except ActorStopped:
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
            raise ActorStopped
        self._counted += n


def digest_code() -> str:
    """Hash the sources that determine what a worker does."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
