"""A Ray cluster of several nodes: workers, nodes, the program and the head are lost, hang, and come."""

import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.engines import ray as engine
from stages.engines.jobs import Job, UnitResult
from tests.background import until
from tests.ray_cluster import NODE, ray_cluster
from tests.stages.engines.engine_workers import Echo, make_job, make_units
from tests.torture import programs
from tests.torture.programs import AtWork

LATENTPRESS = str(Path(sysconfig.get_path("scripts")) / "latentpress")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
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
        self.said, self.counted = list[str](), list[int]()

    def work(self) -> dict[str, UnitResult]:
        found = engine.run_units(self.load, self.job, iter(self.units), self.counted.append, self.said.append)
        return {result.unit_id: result for result in found}

    def check_all_done(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(self.work)
            try:
                meanwhile()
            finally:
                (self.folder / "go-on").touch()  # so that it ends, whatever failed
            results = working.result()
        assert {name for name, result in results.items() if result.shard_path} == {unit.unit_id for unit in self.units}
        assert sum(self.counted) == 2 * len(self.units)

    def tries(self, name: str) -> list[str]:
        path = self.folder / f"tried-{name}"
        return path.read_text().splitlines() if path.exists() else []


def test_a_node_is_killed_and_another_joins(tmp_path: Path) -> None:
    """With two nodes, one, and two again, each of one worker."""
    with ray_cluster(0, 1, 1) as cluster:
        run = Run(cluster, tmp_path, "slow-0", "slow-1", "slow-2", "u3", workers=3)

        def meanwhile() -> None:
            until(lambda: run.tries("slow-0") and run.tries("slow-1"))
            cluster.remove_node(sorted(cluster.worker_nodes, key=id)[0], allow_graceful=False)
            until(lambda: any("was lost" in line for line in run.said))
            cluster.add_node(**NODE, num_cpus=1)
            until(lambda: run.tries("slow-2") or max(len(run.tries(name)) for name in ("slow-0", "slow-1")) == 2)

        run.check_all_done(meanwhile)
        assert sum("was lost" in line and "slow-" in line for line in run.said) == 1
        assert sorted(len(run.tries(name)) for name in ("slow-0", "slow-1", "slow-2")) == [1, 1, 2]


def test_a_worker_that_hangs_is_replaced(cluster: Any, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, "u0", "hang-once", "u1", stall_timeout_s=3.0)
    run.check_all_done()
    assert len(run.tries("hang-once")) == 2
    (line,) = run.said
    assert "no progress for 3 s" in line and "hang-once" in line


def load_slowly(job: Job) -> Echo:
    """The first never gets ready."""
    with (Path(job.config.root) / "loads").open("a") as file:
        file.write("x")
    while (Path(job.config.root) / "loads").stat().st_size == 1:
        time.sleep(0.1)
    return Echo(job)


def test_a_worker_that_never_gets_ready_is_replaced_and_no_unit_blamed(cluster: Any, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, "u0", "u1", load=load_slowly, workers=1, ready_timeout_s=45.0)
    run.check_all_done()
    (line,) = [line for line in run.said if "not placed yet" not in line]  # a busy machine may take long to place it
    assert "not ready after 45 s" in line and [len(run.tries(name)) for name in ("u0", "u1")] == [1, 1]


def test_a_cluster_without_room_is_reported(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROOM_WARNING_S", 1.0)
    run = Run(cluster, tmp_path, "u0", "u1", resources={"num_gpus": 1.0, "memory_gib": 0.1}, ready_timeout_s=4.0)
    with pytest.raises(engine.ClusterError, match=r"needs 1 CPU, 1 GPU, 0\.1 memory in GiB; free.*: 2 CPU, 0 GPU"):
        run.work()
    (line,) = run.said
    assert "2 of 2 workers are not placed yet" in line


# -- the stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encode-text of edits", "caption"])
def test_the_stages_make_the_same_shards_as_local_ones(
    at_work: Callable[[str], AtWork], cluster: Any, name: str
) -> None:
    work = at_work(name)
    work.run_alone(shard="1/3")
    work.check_left()
    assert len(work.files()) < len(work.expected)
    work.finish(address=cluster.address, workers=2)


@contextmanager
def program(work: AtWork, cluster: Any) -> Iterator[subprocess.Popen]:
    """Started where files are called like modules: neither it nor a worker imports one."""
    work.home.config(f"cache.format={work.program.format}")
    here, notes = work.home.folder / "here", work.home.folder / "notes"
    here.mkdir(exist_ok=True)
    for name in ("stages", "schemas", "numpy", "torch", "transformers", "xxhash", "pydantic", "pebble"):
        (here / f"{name}.py").write_text(f"open({str(notes)!r}, 'a').write(__file__)\nraise SystemExit('MINE')\n")
    command = [LATENTPRESS, "encode-latents", "--address", cluster.address, "--workers", "2"]
    command += ["--config", str(work.home.folder / "pipeline.yaml"), "--set", f"cache.format={work.program.format}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=here) as started:
        try:
            yield started
        finally:
            started.kill()
    assert not notes.exists(), notes.read_text()


def wait_for_shards(work: AtWork, started: subprocess.Popen) -> None:
    """Wait for more than there are."""
    before = len(work.home.shards("latents"))
    until(lambda: len(work.home.shards("latents")) > before or started.poll() is not None)
    assert started.poll() is None, started.stderr and started.stderr.read()


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


def test_the_program_is_killed_and_then_the_head(
    at_work: Callable[[str], AtWork], cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next program continues, also on another cluster."""
    monkeypatch.setattr(programs, "PICTURES", 60)  # so that work is left
    work = at_work("encode-latents")
    with program(work, cluster) as started:
        wait_for_shards(work, started)
        started.kill()
    work.check_left()
    with ray_cluster(0, 1, 1) as lost, program(work, lost) as started:
        wait_for_shards(work, started)
        with stopped_workers(lost):
            lost.remove_node(lost.head_node, allow_graceful=False)
            assert started.wait(400) != 0
    work.check_left()
    assert len(work.files()) < len(work.expected)
    with program(work, cluster) as started:
        assert started.wait(400) == 0
    assert work.files() == work.expected
