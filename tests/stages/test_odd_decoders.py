"""Decoders that die, hang or eat memory while a unit is encoded: what they read is set aside, and nothing else."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cache.store import Store
from schemas.cli.console import Report
from stages import bucket, discover, encode_latents, encode_text, index
from stages.planning.plan_lookup import current_plan
from tests.stages import odd


def below(process: str) -> Iterator[str]:
    """The processes that a process started, and those that they did."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in children.read_text().split():
            yield child
            yield from below(child)


def reading(name: str) -> int | None:
    """A process below this one that has a file of this name open."""
    with suppress(OSError):  # one that ends meanwhile
        for process in below(str(os.getpid())):
            handles = Path(f"/proc/{process}/fd").iterdir()
            if any(os.readlink(handle).endswith(f"/{name}") for handle in handles):
                return int(process)
    return None


def struck(name: str, number: int, action: Callable[[], Report]) -> Report:
    """Do `action` while whoever has read a file of this name for a while gets the signal, once."""
    over, hit = threading.Event(), []

    def strike() -> None:
        seen: dict[int | None, float] = {}
        while not over.wait(0.02) and not hit:
            process = reading(name)
            if process and time.monotonic() - seen.setdefault(process, time.monotonic()) > 0.15:
                os.kill(process, number)
                hit.append(process)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        return action()
    finally:
        over.set()
        thread.join()
        assert hit, "nobody read the file"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_decoder_that_dies_or_hangs_costs_its_item_and_a_retry_mends_it(project) -> None:
    home = project("kandinsky5-video-t2v", cache={"unit_mib": 1})
    home.settings["stages"]["max_reject_fraction"] = 1.0
    home.settings["datasets"][0]["video"] |= {"clip": "middle", "num_frames": 5}
    home.settings["stages"]["item_memory_mib"] = 256
    odd.repeated(home.media / "long.mp4", odd.clip(20), 4000)
    odd.repeated(home.media / "heavy.mp4", odd.clip(1, size=(5120, 3072)), 6)
    for number in range(3):
        odd.video(home.media / f"short-{number}.mp4", odd.clip(6 + number))
    for path in list(home.media.iterdir()):
        path.with_suffix(".txt").write_text("a scene")
    for program in (discover.run, bucket.run):
        assert home.run(program).set_aside == []
    config = home.config()
    [unit] = current_plan(Store(config.root), config).units("latents")
    assert len(unit.members) == 5

    def reasons(report: Report) -> dict[str, str]:
        assert report.exit_code == 0 and report.done + len(report.set_aside) == 5
        return home.rejects(report)

    hung = struck("long.mp4", signal.SIGSTOP, partial(home.run, encode_latents.run, "stages.item_timeout_s=4"))
    found = reasons(hung)  # on a busy machine the heavy one may be too slow as well
    assert found["long.mp4"] == "timed-out" and found.keys() == {"long.mp4", "heavy.mp4"}
    assert home.run(encode_latents.run).done == 0  # listed, and not tried again by itself

    died = struck("long.mp4", signal.SIGSEGV, partial(home.run, encode_latents.run, retry_set_aside=True))
    assert reasons(died) == {"long.mp4": "decoder-died", "heavy.mp4": "out-of-memory"}
    said = {Path(row["path"]).name: row["message"] for row in died.set_aside}
    assert "SIGSEGV" in said["long.mp4"] and "256 MiB" in said["heavy.mp4"]
    assert "raise stages.item_memory_mib" in said["heavy.mp4"]
    home.settings["stages"]["item_memory_mib"] = 4096
    mended = home.run(encode_latents.run, retry_set_aside=True)
    assert (mended.set_aside, mended.exit_code) == ([], 0)
    home.run(encode_text.run)
    assert home.run(index.run).details["samples"] == 5
