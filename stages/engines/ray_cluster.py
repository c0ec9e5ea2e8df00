"""A Ray cluster: connecting to it, and what an actor takes of it."""

import logging
import os
import signal
import socket
import threading
from contextlib import chdir
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from schemas.config.encoding import MOST_READERS, Encoding
from schemas.errors import USAGE, LatentpressError
from schemas.text_format import shorten
from stages.engines.jobs import Job
from stages.engines.ray_actor import SOURCES

CONNECT_TIMEOUT_S = 20.0


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
            )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(
            f"the Ray cluster at {address!r} can't be used: {shorten(str(error).strip(), 400)}",
            "start one (`ray start --head` on one machine, `ray start --address HOST:PORT` on the others), "
            "or give its HOST:PORT with --address",
        ) from error
    except SystemExit:  # by that handler
        signal.signal(signal.SIGTERM, on_sigterm)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def actor_options(resources: Encoding) -> dict[str, Any]:
    """What an actor takes of a node, and that Ray neither restarts it nor repeats a call."""
    gpus = resources.num_gpus
    if gpus is None:
        wants = resources.device == "cuda" or (resources.device == "auto" and "GPU" in ray.cluster_resources())
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
    return resources.model_copy(update={"workers": 1, "readers": readers})


def describe_room(options: dict[str, Any]) -> str:
    """What an actor needs, and what is free now."""
    needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    needs |= {"memory in GiB": options["memory"] / 2**30} if options["memory"] else {}
    free = ray.available_resources()
    found = {"CPU": free.get("CPU", 0.0), "GPU": free.get("GPU", 0.0), "memory in GiB": free.get("memory", 0) / 2**30}
    return (
        f"A worker needs {', '.join(f'{value:g} {key}' for key, value in needs.items() if value)}; free, on all "
        f"nodes together: {', '.join(f'{found[key]:g} {key}' for key in needs)}"
    )


def describe_death(error: RayError) -> str:
    """The last line, which says why; those before it name the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(lines[-1].rstrip(".") if lines else type(error).__name__, 200)
