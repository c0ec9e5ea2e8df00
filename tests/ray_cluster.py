"""A Ray cluster of several nodes on this machine, on the loopback address, without dashboard and statistics."""

import json
import os
import signal
import socket
import subprocess
import sys
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


@contextmanager
def autoscaling_cluster(most_nodes: int, idle_s: float) -> Iterator[str]:
    """A head without room for workers, and Ray's autoscaler (v2), which starts up to `most_nodes` nodes of one CPU on
    this machine while something waits for a place and ends those that were idle for so long. Gives the address.

    As ray.cluster_utils.AutoscalingCluster, which can't be used: the wheel lacks a file that it reads, and it ends all
    Ray processes of the machine, also other people's.
    """
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{probe.getsockname()[1]}"
        probe.close()
        head = "f" * 51 + "00000"  # as Ray's provider of such nodes calls it
        module = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
        provider = {"type": "external", "module": module, "gcs_address": address, "head_node_id": head}
        provider |= {"disable_node_updaters": True, "launch_multiple": True}
        node = {"resources": {"CPU": 1, "object_store_memory": 80 << 20}, "node_config": {}, "min_workers": 0}
        steps = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        config = {
            **{f"{name}_commands": [] for name in steps},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            "file_mounts": {},
            "cluster_name": "test",
            "max_workers": most_nodes,
            "idle_timeout_minutes": idle_s / 60,
            "provider": provider,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
                "worker": node | {"max_workers": most_nodes},
            },
        }
        path = Path(folder, "autoscaler.json")
        path.write_text(json.dumps(config))
        environment = {
            **os.environ,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": head,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nodes have the loopback address
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus=0", "--num-gpus=0"]
        command += [f"--port={address.partition(':')[2]}", "--node-ip-address=127.0.0.2", f"--temp-dir={folder}"]
        command += ["--object-store-memory=80000000", f"--autoscaling-config={path}", "--include-dashboard=false"]
        try:
            subprocess.run(command, env=environment, check=True, capture_output=True)
            yield address
        finally:
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
