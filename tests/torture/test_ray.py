"""A Ray cluster of several nodes: workers, nodes, the program and the head are lost, hang, and come."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages import bucket, caption, discover, encode_latents, encode_text
from stages.engines import ray as engine
from stages.engines.jobs import Job, UnitResult
from tests.project import Project
from tests.ray_cluster import NODE, ray_cluster
from tests.stages.describing import describing
from tests.stages.engines.engine_workers import Echo, make_job, make_units
from tests.torture.kills import Stage, wait_for

LATENTPRESS = str(Path(sysconfig.get_path("scripts")) / "latentpress")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """The head has no room for workers, two nodes have room for one each."""
    with ray_cluster(0, 1, 1) as made:
        yield made


class Run:
    """The engine at work in another thread, while `meanwhile` happens in this one, as starting a node must."""

    def __init__(self, cluster: Any, folder: Path, *names: str, load: Any = Echo, **settings: Any) -> None:
        resources, workers = settings.pop("resources", None), settings.pop("workers", 2)
        ray = {"address": cluster.address, **settings}
        self.job = make_job(folder, workers, resources, engine="ray", ray=ray, item_timeout_s=1.0)
        self.folder, self.load, self.units = folder, load, make_units(*names)
        self.said: list[str] = []
        self.counted: list[int] = []

    def results(self, meanwhile: Callable[[], object] = lambda: None) -> dict[str, UnitResult]:
        def work() -> dict[str, UnitResult]:
            found = engine.run_units(self.load, self.job, iter(self.units), self.counted.append, self.said.append)
            return {result.unit_id: result for result in found}

        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(work)
            try:
                meanwhile()
            finally:
                if sys.exc_info()[0]:
                    self.go_on()
            return working.result()

    def tries(self, name: str) -> list[str]:
        path = self.folder / f"tried-{name}"
        return path.read_text().splitlines() if path.exists() else []

    def go_on(self) -> None:
        (self.folder / "go-on").touch()

    def check_all_done(self, results: dict[str, UnitResult]) -> None:
        assert {name for name, result in results.items() if result.shard_path} == {unit.unit_id for unit in self.units}
        assert sum(self.counted) == 2 * len(self.units)


def test_a_node_is_killed_and_the_cluster_is_smaller_than_the_pool_from_then_on(cluster, tmp_path) -> None:
    run = Run(cluster, tmp_path, "slow-0", "slow-1", "u2", "u3")

    def meanwhile() -> None:
        wait_for(lambda: run.tries("slow-0") and run.tries("slow-1"))
        cluster.remove_node(sorted(cluster.worker_nodes, key=id)[0], allow_graceful=False)
        wait_for(lambda: run.said)
        run.go_on()

    run.check_all_done(run.results(meanwhile))
    lost = [line for line in run.said if "retried separately: slow-" in line]
    assert len(lost) == 1
    assert sorted(len(run.tries(name)) for name in ("slow-0", "slow-1")) == [1, 2]


def test_a_node_that_joins_is_used(cluster, tmp_path) -> None:
    run = Run(cluster, tmp_path, "slow-0", "slow-1", "slow-2", workers=3)

    def meanwhile() -> None:
        wait_for(lambda: run.tries("slow-0") and run.tries("slow-1"))
        cluster.add_node(**NODE, num_cpus=1)
        wait_for(lambda: run.tries("slow-2"))
        run.go_on()

    run.check_all_done(run.results(meanwhile))
    assert len({line for name in ("slow-0", "slow-1", "slow-2") for line in run.tries(name)}) == 3
    assert not any("was lost" in line for line in run.said)  # that the third waits for room may be said


def test_a_worker_that_hangs_is_replaced(cluster, tmp_path) -> None:
    run = Run(cluster, tmp_path, "u0", "hang-once", "u1", stall_timeout_s=3.0)
    run.check_all_done(run.results())
    assert len(run.tries("hang-once")) == 2
    (line,) = run.said
    assert "no progress for 3 s" in line and "hang-once" in line


def load_slowly(job: Job, sleeps: bool = True) -> Echo:
    """The first never gets ready."""
    with (Path(job.config.root) / "loads").open("a") as file:
        file.write("x")
    while (Path(job.config.root) / "loads").stat().st_size == 1:
        time.sleep(0.1)
        if not sleeps:
            os.kill(os.getpid(), signal.SIGKILL)
    return Echo(job)


@pytest.mark.parametrize(
    ("sleeps", "timeout", "said"), [(True, 45.0, "not ready after 45 s"), (False, 120.0, "before it was ready")]
)
def test_a_worker_that_never_gets_ready_is_replaced_and_no_unit_blamed(
    cluster, tmp_path, sleeps, timeout, said
) -> None:
    load = partial(load_slowly, sleeps=sleeps)
    run = Run(cluster, tmp_path, "u0", "u1", load=load, workers=1, ready_timeout_s=timeout)
    run.check_all_done(run.results())
    (line,) = [line for line in run.said if "not placed yet" not in line]  # as a busy machine may take long to place it
    assert said in line and [len(run.tries(name)) for name in ("u0", "u1")] == [1, 1]


def test_where_there_is_no_room_for_a_worker_it_is_said(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(engine, "ROOM_WARNING_S", 1.0)
    run = Run(cluster, tmp_path, "u0", "u1", resources={"num_gpus": 1.0, "memory_gib": 0.1}, ready_timeout_s=4.0)
    with pytest.raises(engine.ClusterError, match=r"needs 1 CPU, 1 GPU, 0\.1 memory in GiB; free.*: 2 CPU, 0 GPU"):
        run.results()
    (line,) = run.said
    assert "2 of 2 workers are not placed yet" in line


# -- the stages ----------------------------------------------------------------------------------------------


@pytest.fixture
def home(project) -> Project:
    """Photographs, each a unit of its own, and so its caption; planned."""
    made = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004})
    made.settings["stages"] = {name: {"threads": 1} for name in ("encode-text", "encode-latents")}
    plan_pictures(made, range(60))
    return made


def plan_pictures(home: Project, numbers: range, captions: bool = True) -> None:
    for number in numbers:
        text: Any = f"picture {number}" if captions else None
        home.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), text, number)
    home.run(discover.run)
    if captions:
        home.run(bucket.run)


def test_the_stages_make_the_same_shards_as_local_ones(home, project, tiny, cluster) -> None:
    undescribed = describing(project, tiny)
    undescribed.settings["cache"]["unit_mib"] = 0.01
    plan_pictures(undescribed, range(12), captions=False)
    for stage in (Stage(home, encode_text), Stage(home, encode_latents), Stage(undescribed, caption)):
        expected = stage.whole()
        stage.run(shard="1/3")
        assert 0 < stage.left(expected) < len(expected)
        report = stage.run(address=cluster.address, workers=2)
        assert (report.exit_code, report.remaining) == (0, 0)
        assert stage.files() == expected


@contextmanager
def program(stage: Stage, cluster: Any, *options: str) -> Iterator[subprocess.Popen]:
    """Started where files are called like modules: neither it nor a worker imports one."""
    stage.home.config()
    here, notes = stage.home.folder / "here", stage.home.folder / "notes"
    here.mkdir(exist_ok=True)
    for name in ("stages", "schemas", "numpy", "torch", "transformers", "xxhash", "pydantic", "pebble"):
        (here / f"{name}.py").write_text(f"open({str(notes)!r}, 'a').write(__file__)\nraise SystemExit('MINE')\n")
    command = [LATENTPRESS, stage.program.STAGE.name, "--address", cluster.address, "--workers", "2", *options]
    command += ["--config", str(stage.home.folder / "pipeline.yaml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=here) as started:
        try:
            yield started
        finally:
            started.kill()
    assert not notes.exists(), notes.read_text()


def wait_for_shards(stage: Stage, started: subprocess.Popen) -> None:
    """The program and its workers start, which import torch."""
    end = time.monotonic() + 300
    while not (stage.home.root / stage.kind).is_dir() or not stage.home.shards(stage.kind):
        assert started.poll() is None, started.stderr and started.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def stopped_workers(cluster: Any) -> Iterator[None]:
    """In the body the processes that encode stand still, so that the stage can't end before what happens to it."""
    stopped = list[psutil.Process]()
    for node in (cluster.head_node, *cluster.worker_nodes):
        [raylet] = node.all_processes["raylet"]
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if title.startswith("ray::") and "IDLE" not in title:
                    process.suspend()
                    stopped.append(process)
    assert stopped
    try:
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def test_the_program_is_killed_and_the_next_goes_on(home, cluster) -> None:
    stage = Stage(home, encode_latents)
    expected = stage.whole()
    with program(stage, cluster) as started:
        wait_for_shards(stage, started)
        started.kill()
    left = stage.left(expected)
    assert left > 0
    with program(stage, cluster) as started:
        assert started.wait(400) == 0
    assert stage.files() == expected


def test_the_head_is_lost_and_another_cluster_goes_on(home) -> None:
    stage = Stage(home, encode_latents)
    expected = stage.whole()
    with ray_cluster(0, 1, 1) as first, program(stage, first) as started:
        wait_for_shards(stage, started)
        with stopped_workers(first):
            first.remove_node(first.head_node, allow_graceful=False)
            assert started.wait(400) != 0
    assert stage.left(expected) > 0
    with ray_cluster(0, 1) as second, program(stage, second) as started:
        assert started.wait(400) == 0
    assert stage.files() == expected
