"""One worker, a job array and a Ray cluster work on one plan at the same time."""

import subprocess
import sysconfig
import time
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

from cache.store.store import Store
from stages import bucket, discover, encode_latents, index, status, verify
from stages.encoding.job_reports import read_reports
from tests.ray_cluster import ray_cluster
from tests.torture.kills import Stage

LATENTPRESS = str(Path(sysconfig.get_path("scripts")) / "latentpress")

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_all_ways_to_run_a_stage_at_the_same_time_make_the_same_shards(project) -> None:
    """All start at one moment, and all of them have units left when the last has begun to encode."""
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.25})
    home.settings["datasets"][0]["resolution"] = 512
    for number in range(150):
        home.image(f"{number}.png", (512, 512) if number % 2 else (512, 384), f"picture {number}", number)
    for program in (discover, bucket):
        home.run(program.run)
    stage = Stage(home, encode_latents)
    began = time.monotonic()
    expected = stage.whole()
    print(f"one worker: {time.monotonic() - began:.0f} s for {len(home.shards('latents')) or len(expected)} files")
    home.config()
    with ray_cluster(0, 1, 1) as cluster, ExitStack() as ended:
        ways = {
            "one": ["--workers", "1"],
            "0/2": ["--shard", "0/2"],
            "1/2": ["--shard", "1/2"],
            "ray": ["--address", cluster.address, "--workers", "2"],
        }
        running = {}
        for name, options in ways.items():
            command = [LATENTPRESS, "encode-latents", *options, "--config", str(home.folder / "pipeline.yaml")]
            running[name] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            ended.callback(running[name].kill)
        said = {name: started.communicate(timeout=420)[1] for name, started in running.items()}
    assert {name: started.returncode for name, started in running.items()} == dict.fromkeys(ways, 0), said
    assert stage.files() == expected, "other shards than those of one worker, or more, or fewer"
    store, fingerprint = Store(home.root), encode_latents.STAGE.fingerprint(home.config())
    jobs = read_reports(store, {"encode-latents": fingerprint}, time.time())["encode-latents"]
    jobs = [job for job in jobs if job.process in {started.pid for started in running.values()}]
    assert {(job.engine, job.shard) for job in jobs} == {
        ("local", "0/1"),
        ("local", "0/2"),
        ("local", "1/2"),
        ("ray", "0/1"),
    }
    for job in jobs:
        assert (job.state, job.units_done, job.units_failed) == ("ended", job.units, 0)
        print(f"{job.engine} {job.shard}: {job.units} units, {job.seconds:.0f} s, {job.items_per_second:.2f} a second")
    for one, other in combinations(jobs, 2):
        assert max(one.began, other.began) < min(one.began + one.seconds, other.began + other.seconds)
    (row,) = [row for row in home.run(status.run).details["stages"] if row["stage"] == "encode-latents"]
    assert row["remaining"] == 0 and row["jobs"].endswith("ended")
    assert home.run(verify.run).damage == [] and home.run(index.run).exit_code == 3  # texts are not encoded
