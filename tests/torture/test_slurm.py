"""examples/slurm under a real Slurm: arrays whose tasks are parts, jobs that wait for each other, pre-emption."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import bucket, discover, encode_latents, encode_text, index
from tests import slurm
from tests.project import Project

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not slurm.is_installed(), reason="Slurm is not installed (slurmctld, slurmd, munge)"),
]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.run_cluster(folder, str(Path(sys.executable).parent)) as made:
        yield made


def make_home(project, **settings) -> Project:
    made = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004}, **settings)
    for number in range(6):
        made.image(f"{number}.png", (64, 64), f"picture {number}", number)
    return made


def test_the_whole_pipeline_by_one_command(project, cluster) -> None:
    home = make_home(project, train={"steps": 2, "device": "cpu"}, validation={"steps": 1, "eval_samples": 0})
    home.config()
    cluster.environment["PROCESSES"] = "2"
    printed = cluster.call("bash", EXAMPLES / "submit.sh", home.folder / "pipeline.yaml", "2", "--cpus-per-task=1")
    jobs = [word.strip(",") for word in printed.split() if word.strip(",").isdigit()]
    assert cluster.wait(jobs) == ["COMPLETED"] * 8, cluster.logs()  # two of them arrays of two tasks
    assert len(home.shards("latents")) == 6
    assert list((home.folder / "output").rglob("*.safetensors"))


def test_a_preempted_task_is_queued_again_and_the_shards_are_the_same(project, cluster) -> None:
    home = make_home(project)
    home.run(discover.run)
    home.run(bucket.run)
    shutil.copytree(home.root, home.folder / "alone")
    for stage in (encode_text, encode_latents):
        home.run(stage.run, f"root={home.folder / 'alone'}", device="cpu")
    job = cluster.call(
        "sbatch", "--parsable", "--array=0-1", "--cpus-per-task=1", EXAMPLES / "encode.sbatch",
        *("encode-latents", "--config", home.folder / "pipeline.yaml", "--device", "cpu"),
    )  # fmt: skip
    cluster.wait([job], ["RUNNING", *slurm.ENDED])
    urgent = cluster.call("sbatch", "--parsable", "--partition=high", "--cpus-per-task=2", "--wrap", "sleep 1")
    assert cluster.wait([urgent]) == ["COMPLETED"]
    assert cluster.wait([job]) == ["COMPLETED", "COMPLETED"], cluster.logs()
    shown = cluster.call("scontrol", "--oneliner", "show", "job", job)
    assert "Restarts=0" not in shown, (
        shown + cluster.logs() + cluster.call("tail", "-30", cluster.folder.parent / "daemons.log")
    )
    alone = sorted((home.folder / "alone" / "latents").rglob("*.arrow"))
    assert list(home.shards("latents").values()) == [path.read_bytes() for path in alone]


def test_preempted_training_saves_a_checkpoint_and_goes_on(project, cluster) -> None:
    home = make_home(project, train={"steps": 1000, "device": "cpu"}, validation={"steps": 1, "eval_samples": 0})
    for stage in (discover, bucket, encode_text, encode_latents, index):
        home.run(stage.run, device="cpu")
    words = (EXAMPLES / "train.sbatch", "--config", home.folder / "pipeline.yaml")
    job = cluster.call("sbatch", "--parsable", "--partition=grace", "--cpus-per-task=2", *words)
    cluster.wait_for_line("step 100")
    urgent = cluster.call("sbatch", "--parsable", "--partition=high", "--cpus-per-task=2", "--wrap", "sleep 1")
    assert cluster.wait([urgent]) == ["COMPLETED"]
    cluster.wait_for_line("continuing from")
    cluster.call("scancel", job)
    assert cluster.wait([job]) == ["CANCELLED"]


def test_a_task_out_of_time_is_queued_again(project, cluster) -> None:
    home = make_home(project)
    home.run(discover.run)
    home.run(bucket.run)
    cluster.environment["MAX_SECONDS"] = "1"  # it ends before the first unit, each time
    job = cluster.call(
        "sbatch", "--parsable", "--array=0-0", "--cpus-per-task=1", EXAMPLES / "encode.sbatch",
        *("encode-text", "--config", home.folder / "pipeline.yaml", "--device", "cpu"),
    )  # fmt: skip
    while "Restarts=0" in (shown := cluster.call("scontrol", "--oneliner", "show", "job", job)):
        assert "JobState=FAILED" not in shown, cluster.logs()
    cluster.call("scancel", job)
    assert cluster.wait([job]) == ["CANCELLED"]
