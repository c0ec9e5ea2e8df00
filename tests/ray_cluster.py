"""A Ray cluster of several nodes on this machine, on the loopback address, without dashboard and statistics."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NODE: dict[str, Any] = {
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "node_ip_address": "127.0.0.2",
    "num_gpus": 0,
    "no_monitor": True,
    "include_log_monitor": False,
}


@contextmanager
def ray_cluster(*nodes: int) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster with nodes of so many CPUs, the head first; `add_node(**NODE, num_cpus=n)` adds one.
    All of its processes end with it."""
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        patched.setenv("RAY_TMPDIR", folder)
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.delenv("RAY_ADDRESS", raising=False)
        # How soon a lost node is noticed, and a lost head given up; and that workers yield to no other process.
        settings = {"health_check_period_ms": 500, "gcs_rpc_server_reconnect_timeout_s": 5, "worker_niceness": 0}
        for name, value in settings.items():
            patched.setenv(f"RAY_{name}", str(value))
        from ray.cluster_utils import Cluster

        cluster = Cluster(True, head_node_args={**NODE, "num_cpus": nodes[0]})
        try:
            for cpus in nodes[1:]:
                cluster.add_node(**NODE, num_cpus=cpus)
            yield cluster
        finally:
            cluster.shutdown()
            _end_processes_of(folder)


def _end_processes_of(folder: str) -> None:
    """Those that outlived their node, as a killed head's agents do for a minute; known by their open log files."""
    while left := {path.parts[2] for path in Path("/proc").glob("[0-9]*/fd/*") if _target(path).startswith(folder)}:
        for number in left - {str(os.getpid())}:
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        if left == {str(os.getpid())}:
            return
        time.sleep(0.1)


def _target(link: Path) -> str:
    with suppress(OSError):
        return os.readlink(link)
    return ""
