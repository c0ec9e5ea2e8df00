"""Two hosts in network namespaces that see each other's network and an object store, and nothing else of the other.
Training is started by the lines of docs/machines.md, with one process on each host.
"""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cache.runs.training_run import read_metrics
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, index
from tests.background import until
from tests.network_hosts import ROOT, Host, hosts_of
from tests.project import Project
from tests.s3_server import BUCKET, serve_s3
from trainer.__main__ import run as train

pytestmark = [pytest.mark.slow, pytest.mark.long]
SCRIPTS = Path(sysconfig.get_path("scripts"))
LIMIT_S = 240
STAGES = (discover, bucket, encode_text, encode_latents, index)
TRAIN = {
    **{"device": "cpu", "steps": 3, "batch_size": 2, "accumulate": 1, "threads": 1, "run": "r", "shuffle_shards": 4},
    **{"checkpoint_every": 2, "optimizer": {"lr": 2e-3, "warmup": 2}},
}


@dataclass
class Cluster:
    """Two hosts. The root is on the store, the output folder is mounted on both; each has its own pipeline.yaml, at the
    same place."""

    hosts: list[Host]
    home: Project
    place: Path  # where each host has its own folder
    shared: Path  # the output folder of both

    def train(self, commands: list[list[str]], meanwhile: Callable[[], object] = lambda: None) -> list[tuple[int, str]]:
        """Start a command on each host; returns their exit codes and logs."""
        running = []
        for host, command in zip(self.hosts, commands, strict=True):
            log = host.folder / "log"
            running.append((host.start([*command, "--config", self.place / "pipeline.yaml"], log), log))
        try:
            meanwhile()
            return [(process.wait(LIMIT_S), log.read_text()) for process, log in running]
        except BaseException:
            print(*(log.read_text() for _, log in running), sep="\n--- the other host\n")
            raise

    def configure(self, **changes: Any) -> None:
        """Give each host its configuration, with these settings of `train`."""
        for host in self.hosts:
            settings = json.loads(json.dumps(self.home.settings))
            settings["train"] |= changes
            (host.folder / "pipeline.yaml").write_text(json.dumps(settings))

    def encode(self) -> None:
        for program in STAGES:
            assert self.home.run(program.run).exit_code == 0

    def check_as_one_process(self, *overrides: str, tolerance: float = 1e-5, steps: int) -> Path:
        """One process of the same global batches has these losses; returns its folder."""
        self.home.run(train, "train.accumulate=2", f"train.steps={steps}", *overrides)
        alone = self.home.folder / "output" / "r"
        assert losses(self.shared / "r") == pytest.approx(losses(alone), rel=tolerance) and len(losses(alone)) == steps
        return alone


def losses(folder: Path, key: str = "loss") -> dict[int, float]:
    return {line["step"]: line[key] for line in read_metrics(folder / "metrics.jsonl") if key in line}


@pytest.fixture
def cluster(project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    home = project(root=f"s3://{BUCKET}/work", train=TRAIN, cache={"unit_mib": 0.05})
    prompts = [{"name": name, "prompt": f"a {name}"} for name in ("tree", "house", "boat")]
    home.settings["validation"] = {"prompts": prompts, "every": 3, "steps": 1, "eval_samples": 2, "eval_sigmas": [0.5]}
    for number in range(8):
        home.image(f"{number}.png", (64, 48) if number % 2 else (48, 64), f"picture {number}", number)
    with ExitStack() as stack:
        folders = {name: tmp_path / f"host-{name}" for name in ("first", "second")}
        for folder in folders.values():
            (folder / "output").mkdir(parents=True)
        hosts, address = stack.enter_context(hosts_of(folders))
        server = stack.enter_context(serve_s3(address))
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "NO_PROXY": "*"}
        for name, value in {"AWS_ENDPOINT_URL": server.url, **keys}.items():
            monkeypatch.setenv(name, value)
        server.make_bucket(BUCKET)
        stack.callback(server.clear)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lphome", dir="/tmp")))
        (shared := tmp_path / "shared").mkdir()
        for host in hosts:
            host.store = server.url
            host.hidden.append(home.folder)
            host.mounts = {place: host.folder, place / "output": shared}
        yield Cluster(hosts, home, place, shared)


def test_two_hosts_share_only_the_store(cluster: Cluster) -> None:
    """Their media lie at different places. The shards are those of one host with a root on its disk."""
    first, second = cluster.hosts
    cluster.configure(steps=2)
    for number, host in enumerate(cluster.hosts):
        settings = json.loads((host.folder / "pipeline.yaml").read_text())
        settings["datasets"][0] |= {"instance_data_dir": "media-0"} | ({"media_root": "media-1"} if number else {})
        (host.folder / "pipeline.yaml").write_text(json.dumps(settings))
        shutil.copytree(cluster.home.media, host.folder / f"media-{number}")
    for program in ("discover", "bucket"):
        first.run(program)
    second.run("encode-text")
    parts = [host.run("encode-latents", "--shard", f"{n}/2") for n, host in enumerate(cluster.hosts)]
    assert all(part["done"] for part in parts)
    assert first.run("index")["done"] == 8
    assert first.run("train")["done"] == 2
    assert second.run("verify")["damage"] == []
    local = Project(first.folder, json.loads((first.folder / "pipeline.yaml").read_text()) | {"root": "work"})
    for program in STAGES:
        local.run(program.run)
    made = []
    for store in (Store(f"s3://{BUCKET}/work"), Store(first.folder / "work")):
        names = [name for name in store.list_names() if name.startswith(("text/", "latents/"))]
        made.append({name: store.read_bytes(name) for name in names})
    assert made[0] == made[1] and len(made[0]) > 3


# -- training --------------------------------------------------------------------------------------------------


def documented(first_word: str, *words: str) -> list[str]:
    """The command of docs/machines.md for several machines that begins with this word and has the other words."""
    block = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "machines.md").read_text(), re.DOTALL)
    lines = "\n".join(block).replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith(first_word) and all(word in line for word in words)]
    assert len(found) == 1, found
    return shlex.split(found[0], comments=True)


def changed(command: list[str], **values: str) -> list[str]:
    """With other values of these options."""
    command = [*command]
    for option, value in values.items():
        spelled = [name for name in (f"--{option}", f"--{option.replace('_', '-')}") if name in command]
        command[command.index(spelled[0]) + 1] = value
    command[0] = sys.executable if command[0] == "python" else command[0]
    return [str(SCRIPTS / word) if (SCRIPTS / word).is_file() else word for word in command]


def in_order(option: str, *words: str, **values: str) -> list[list[str]]:
    """For hosts that are numbered by an option."""
    return [changed(documented(*words), **{option: str(number)}, **values) for number in (0, 1)]


LAUNCHES = {
    "c10d": [changed(documented("torchrun", "--nnodes 2", "c10d"), nproc_per_node="1")] * 2,
    "static": in_order("node_rank", "torchrun", "--nnodes 2", "--node-rank", nproc_per_node="1"),
    "accelerate": in_order("machine_rank", "accelerate", "--num_machines 2", num_processes="2"),
}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_losses_are_those_of_one_process(cluster: Cluster, launcher: str) -> None:
    """The same global batches. A run of c10d is also resumed on both machines and on one; nothing is left to do once it
    has finished."""
    cluster.encode()
    cluster.configure()
    for code, said in cluster.train(LAUNCHES[launcher]):
        assert code == 0, said
    alone = cluster.check_as_one_process(steps=3)
    assert losses(cluster.shared / "r", "eval_loss") == pytest.approx(losses(alone, "eval_loss"), rel=1e-4)
    samples = [path.relative_to(alone) for path in (alone / "validation").rglob("*.safetensors")]
    assert len(samples) == 6
    for sample in samples:
        found, expected = (load_file(folder / sample)["latent"] for folder in (cluster.shared / "r", alone))
        assert (found - expected).abs().max() < 1e-3
    if launcher != "c10d":
        return
    cluster.configure(steps=5)
    for code, said in cluster.train(LAUNCHES[launcher]):
        assert code == 0, said
    cluster.check_as_one_process(steps=5, tolerance=1e-4)
    (code, said), (other, _) = cluster.train(LAUNCHES[launcher])
    assert (code, other) == (0, 0) and "0 done, 5 skipped" in said
    cluster.home.run(train, "train.accumulate=2", "train.steps=6", f"output={cluster.shared}")
    cluster.check_as_one_process(steps=6, tolerance=1e-4)


def test_machines_need_one_output_folder(cluster: Cluster) -> None:
    cluster.encode()
    cluster.configure(parallel={"strategy": "fsdp2"})
    for host in cluster.hosts:
        del host.mounts[cluster.place / "output"]
    (code, said), (other, _) = cluster.train(LAUNCHES["static"])
    assert code and other and "second can't access" in said and "loading the transformer" not in said


@pytest.mark.parametrize("lost", [1, 0])
def test_a_host_that_is_lost_is_named(cluster: Cluster, lost: int) -> None:
    cluster.encode()
    cluster.configure(steps=100_000, parallel={"timeout": 15}, checkpoint_every=10)
    lost_at: list[float] = []

    def meanwhile() -> None:
        until(lambda: len(losses(cluster.shared / "r")) > 12)
        cluster.hosts[lost].lose()
        lost_at.append(time.monotonic())

    ended = cluster.train(LAUNCHES["static"], meanwhile)
    assert time.monotonic() - lost_at[0] < 90
    if lost:
        assert "rank 1 (process " in ended[0][1] and "on second" in ended[0][1]
    else:
        assert "rank 0" in ended[1][1]
    assert not cluster.hosts[1 - lost].processes()


@contextmanager
def ray_nodes(cluster: Cluster) -> Iterator[None]:
    """A Ray node on each host, the head on the first, with room for one process each."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as place:
        common = ["--block", "--num-cpus", "1", "--num-gpus", "0", "--object-store-memory", str(80 << 20)]
        head = ["--head", "--port", "6379", "--temp-dir", place, "--include-dashboard", "false"]
        for host, how in zip(cluster.hosts, (head, ["--address", "first:6379"]), strict=True):
            (host.folder / "ray").mkdir()
            host.mounts[Path(place)] = host.folder / "ray"
            # Ray looks for other clusters among the machine's processes, and gives its workers a low priority.
            host.environment = {"RAY_ADDRESS": "first:6379", "RAY_worker_niceness": "0"}
            host.environment["RAY_USAGE_STATS_ENABLED"] = "0"
            address, log = ["--node-ip-address", host.names[host.hostname]], host.folder / "ray-log"
            host.start([SCRIPTS / "ray", "start", *how, *address, *common], log)
            until(lambda log=log: "Ray runtime started" in log.read_text())
        yield


def test_ray_train(cluster: Cluster) -> None:
    """Two Ray nodes. A rank that is killed ends the job, which is started again and continues."""
    cluster.encode()
    cluster.configure(steps=8)
    command = changed(documented("python examples/ray_train.py"), workers="2", gpus="0")
    command[command.index("--config") + 1] = str(cluster.place / "pipeline.yaml")
    command = [*command[: command.index("--")], "--retries", "1", *command[command.index("--") :]]
    with ray_nodes(cluster):
        log = cluster.hosts[0].folder / "log"
        process = cluster.hosts[0].start(command, log)
        until(lambda: len(losses(cluster.shared / "r")) > 3 or process.poll() is not None)
        commands = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in cluster.hosts[1].processes()}
        os.kill(next(number for number, words in commands.items() if b"-m\0trainer" in words), signal.SIGKILL)
        code = process.wait(LIMIT_S)
        assert code == 0, log.read_text()
    cluster.check_as_one_process(steps=8, tolerance=1e-4)
    rows = (cluster.shared / "r" / "metrics.jsonl").read_text()
    assert rows.count('"resumed"') == 1, "it continued from a checkpoint"
