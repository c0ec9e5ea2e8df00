"""A Ray cluster that grows while a stage waits for places, and shrinks when it has ended."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from stages import bucket, discover, encode_latents, encode_text
from tests.ray_cluster import autoscaling_cluster
from tests.torture.kills import Stage

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE_S = 240.0


def nodes() -> int:
    """How many that are alive have room for workers."""
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())


def wait_for(seen: Callable[[], bool], what: str) -> float:
    """The seconds that it took."""
    began = time.monotonic()
    while not seen():
        assert time.monotonic() < began + PATIENCE_S, what
        time.sleep(0.2)
    return time.monotonic() - began


def test_nodes_come_when_a_stage_asks_and_go_when_it_has_ended(project) -> None:
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004})
    for number in range(40):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket):
        home.run(program.run)
    stages = [Stage(home, program) for program in (encode_text, encode_latents)]
    expected = [stage.whole() for stage in stages]
    with autoscaling_cluster(most_nodes=2, idle_s=6.0) as address, ThreadPoolExecutor(1) as thread:
        ray.init(address=address, log_to_driver=False)
        try:
            for stage, shards in zip(stages, expected, strict=True):
                assert nodes() == 0
                working = thread.submit(stage.run, address=address, workers=2)
                came = wait_for(lambda: nodes() == 2, "no node came")
                report = working.result(PATIENCE_S)
                went = wait_for(lambda: nodes() == 0, "the nodes stay")
                print(f"{stage.program.STAGE.name}: both nodes after {came:.0f} s, none {went:.0f} s after its end")
                assert (report.exit_code, report.remaining) == (0, 0)
                assert stage.files() == shards
        finally:
            ray.shutdown()
