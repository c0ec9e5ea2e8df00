"""Training over two hosts in network namespaces that see each other's network and the store, and nothing else: started
by the lines of docs/machines.md, with one process on each."""

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
from stages import bucket, discover, encode_latents, encode_text, index
from tests.network_hosts import ROOT, Host, hosts_of
from tests.project import Project
from tests.s3_server import BUCKET, serve_s3
from tests.torture.kills import wait_for
from trainer.__main__ import run as train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
]
SCRIPTS = Path(sysconfig.get_path("scripts"))
LIMIT_S = 240
PROMPTS = [{"name": name, "prompt": f"a {name}"} for name in ("tree", "house", "boat")]


def documented(first_word: str, *words: str) -> list[str]:
    """The command of docs/machines.md for several machines that begins so and has these words."""
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


@dataclass
class Cluster:
    """Two hosts. The root is on the store, the output folder is mounted on both; each has its own pipeline.yaml, at the
    same place."""

    hosts: list[Host]
    home: Project
    place: Path  # where each host has its own folder
    shared: Path  # the output folder of both

    def train(self, commands: list[list[str]], meanwhile: Callable[[], object] = lambda: None) -> list[tuple[int, str]]:
        """Start a command on each host; their exit codes and what they said."""
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

    @property
    def output(self) -> Path:
        return self.shared / "r"


def losses(folder: Path, key: str = "loss") -> dict[int, float]:
    return {line["step"]: line[key] for line in read_metrics(folder / "metrics.jsonl") if key in line}


@pytest.fixture
def cluster(project: Callable[..., Project], tmp_path: Path, monkeypatch) -> Iterator[Cluster]:
    settings = {
        "device": "cpu",
        "steps": 3,
        "batch_size": 2,
        "accumulate": 1,
        "threads": 1,
        "run": "r",
        "shuffle_shards": 4,
    }
    settings |= {"checkpoint_every": 2, "optimizer": {"lr": 2e-3, "warmup": 2}}
    home = project(root=f"s3://{BUCKET}/work", train=settings)
    home.settings["cache"]["unit_mib"] = 0.05
    home.settings["validation"] = {"prompts": PROMPTS, "every": 3, "steps": 1, "eval_samples": 2, "eval_sigmas": [0.5]}
    for number in range(8):
        home.image(f"{number}.png", (64, 48) if number % 2 else (48, 64), f"picture {number}", number)
    with ExitStack() as stack:
        folders = {name: tmp_path / f"host-{name}" for name in ("first", "second")}
        for folder in folders.values():
            folder.mkdir()
        made = stack.enter_context(hosts_of(folders, joined=True))
        server = stack.enter_context(serve_s3(made[0][1]))
        for host, _ in made:
            host.store = server.url
            host.hidden.append(home.folder)
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "NO_PROXY": "*",
        }.items():
            monkeypatch.setenv(name, value)
        server.make_bucket(BUCKET)
        for program in (discover, bucket, encode_text, encode_latents, index):
            assert home.run(program.run).exit_code == 0
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lphome", dir="/tmp")))
        (shared := tmp_path / "shared").mkdir()
        for host, _ in made:
            host.mounts[place] = host.folder
            (host.folder / "output").mkdir()
            host.mounts[place / "output"] = shared
        yield Cluster([host for host, _ in made], home, place, shared)
        server.clear()


TORCHRUN = ("torchrun", "--nnodes 2")


def on_both(*words: str, **values: str) -> list[list[str]]:
    command = changed(documented(*words), **values)
    return [command, command]


def in_order(option: str, *words: str, **values: str) -> list[list[str]]:
    """For hosts that are numbered by an option."""
    return [changed(documented(*words), **{option: str(number)}, **values) for number in (0, 1)]


LAUNCHES = {
    "c10d": on_both(*TORCHRUN, "c10d", nproc_per_node="1"),
    "static": in_order("node_rank", *TORCHRUN, "--node-rank", nproc_per_node="1"),
    "accelerate": in_order("machine_rank", "accelerate", "--num_machines 2", num_processes="2"),
}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_losses_are_those_of_one_process(cluster: Cluster, launcher: str) -> None:
    """The same global batches. The run is resumed on both machines and on one; nothing is left to do once it has
    finished."""
    alone = cluster.home.folder / "output" / "r"
    cluster.configure()
    for code, said in cluster.train(LAUNCHES[launcher]):
        assert code == 0, said
    cluster.home.run(train, "train.accumulate=2")
    assert losses(cluster.output) == pytest.approx(losses(alone), rel=1e-5) and len(losses(alone)) == 3
    assert losses(cluster.output, "eval_loss") == pytest.approx(losses(alone, "eval_loss"), rel=1e-4)
    for step in ("step-000000", "step-000003"):
        for name in ("tree", "house", "boat"):
            found, expected = (
                load_file(f / "validation" / step / f"{name}.safetensors") for f in (cluster.output, alone)
            )
            assert (found["latent"] - expected["latent"]).abs().max() < 1e-3
    if launcher == "accelerate":
        return
    cluster.configure(steps=5)
    for code, said in cluster.train(LAUNCHES[launcher]):
        assert code == 0, said
    cluster.home.run(train, "train.accumulate=2", "train.steps=5")
    assert losses(cluster.output) == pytest.approx(losses(alone), rel=1e-4) and len(losses(alone)) == 5
    (code, said), (other, _) = cluster.train(LAUNCHES[launcher])
    assert (code, other) == (0, 0) and "0 done, 5 skipped" in said
    output = f"output={cluster.output.parent}"
    cluster.home.run(train, "train.accumulate=2", "train.steps=6", output)
    cluster.home.run(train, "train.accumulate=2", "train.steps=6")
    assert losses(cluster.output) == pytest.approx(losses(alone), rel=1e-4) and len(losses(alone)) == 6


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_machines_need_one_output_folder(cluster: Cluster, strategy: str) -> None:
    alone = cluster.home.folder / "output" / "r"
    cluster.configure(parallel={"strategy": strategy})
    mounts = [host.mounts.pop(cluster.place / "output") for host in cluster.hosts]
    (code, said), (other, _) = cluster.train(LAUNCHES["static"])
    assert code and other and "second can't access" in said and "loading the transformer" not in said
    for host, mount in zip(cluster.hosts, mounts, strict=True):
        shutil.rmtree(host.folder / "output")
        (host.folder / "output").mkdir()
        host.mounts[cluster.place / "output"] = mount
    if strategy == "fsdp2":
        for code, said in cluster.train(LAUNCHES["static"]):
            assert code == 0, said
        cluster.home.run(train, "train.accumulate=2")
        assert losses(cluster.output) == pytest.approx(losses(alone), rel=1e-5) and len(losses(alone)) == 3


@pytest.mark.parametrize("lost", [1, 0])
def test_a_host_that_is_lost_is_named(cluster: Cluster, lost: int) -> None:
    cluster.configure(steps=100_000, parallel={"timeout": 15}, checkpoint_every=10)
    lost_at: list[float] = []

    def meanwhile() -> None:
        wait_for(lambda: len(losses(cluster.output)) > 12)
        cluster.hosts[lost].lose()
        lost_at.append(time.monotonic())

    ended = cluster.train(LAUNCHES["static"], meanwhile)
    print(time.monotonic() - lost_at[0], ended[1 - lost])
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
            wait_for(lambda log=log: "Ray runtime started" in log.read_text())
        yield


def test_ray_train(cluster: Cluster, tmp_path: Path) -> None:
    """Two Ray nodes. A rank that is killed ends the job, which is started again and goes on."""
    alone = cluster.home.folder / "output" / "r"
    cluster.configure(steps=8)
    command = changed(documented("python examples/ray_train.py"), workers="2", gpus="0")
    command[command.index("--config") + 1] = str(cluster.place / "pipeline.yaml")
    command = [*command[: command.index("--")], "--retries", "1", *command[command.index("--") :]]
    with ray_nodes(cluster):
        log = cluster.hosts[0].folder / "log"
        process = cluster.hosts[0].start(command, log)
        wait_for(lambda: len(losses(cluster.output)) > 3 or process.poll() is not None)
        trainers = [
            number
            for number in cluster.hosts[1].processes()
            if b"-m\0trainer" in Path(f"/proc/{number}/cmdline").read_bytes()
        ]
        os.kill(trainers[0], signal.SIGKILL)
        code = process.wait(LIMIT_S)
        assert code == 0, log.read_text()
    cluster.home.run(train, "train.accumulate=2", "train.steps=8")
    assert losses(cluster.output) == pytest.approx(losses(alone), rel=1e-4) and len(losses(alone)) == 8
    rows = (cluster.output / "metrics.jsonl").read_text()
    assert rows.count('"resumed"') == 1, "it went on from a checkpoint"
