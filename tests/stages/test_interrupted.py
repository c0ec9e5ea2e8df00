"""Killed anywhere, at any moment, and started again: the same shards, byte for byte.

A child is forked from this process, which has imported torch already, so that a kill falls into the work and not
into imports; it is killed with SIGKILL, which no handler sees.
"""

import multiprocessing.forkserver
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # noqa: F401  (the children fork from a process that has it)

import cache.arrow
import cache.store
import cache.wds
from stages import bucket, discover, encode_latents, encode_text, loading  # noqa: F401

POINTS = ("after decode", "during a write", "before the rename", "after the rename")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, occurrence: int, format: str) -> None:
    """In the child: die at the `occurrence`-th passage of a named point."""
    passed = 0

    def count() -> bool:
        nonlocal passed
        passed += 1
        return passed == occurrence

    if point == "after decode":
        from stages.vae.worker import LatentsWorker

        original = LatentsWorker.read

        def read(self: LatentsWorker, name: str) -> object:
            pixels = original(self, name)
            if count():
                die()
            return pixels

        LatentsWorker.read = read
    elif point == "during a write":
        twin = cache.arrow if format == "arrow" else cache.wds
        original_add = twin.ShardWriter.add

        def add(self: object, row: object) -> None:
            original_add(self, row)
            if count():
                die()

        twin.ShardWriter.add = add
    else:
        original_replace = cache.store.replace

        def replace(source: str, target: str) -> None:
            shard = target.endswith((".arrow", ".tar")) and "/latents/" in target
            hit = shard and count()
            if hit and point == "before the rename":
                die()
            original_replace(source, target)
            if hit:
                die()

        cache.store.replace = replace


def in_child(work: Callable[[], object]) -> tuple[int, Callable[[], int]]:
    """Fork and do `work`; (process id, a function that waits for its end and gives the signal that ended it)."""
    child = os.fork()
    if child == 0:
        multiprocessing.forkserver._forkserver.__init__()  # the parent's server can't be this process's
        try:
            work()
        finally:
            os._exit(0)

    def wait() -> int:
        _, status = os.waitpid(child, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    return child, wait


@pytest.fixture
def clips(project):
    """Six clips and four images in several buckets and units, planned, with their texts and latents to be made."""
    home = project("kandinsky5-video-i2v")
    for number in range(6):
        size = (64, 48) if number % 2 else (48, 64)
        home.video(f"{number}.mp4", frames=20, size=size, caption=f"clip number {number}")
    home.run(discover.run)
    home.run(bucket.run)
    return home


def whole(home, *overrides: str) -> dict[str, bytes]:
    """The shards of a run that was never interrupted, made under another root."""
    other = ("root=whole", *overrides)
    home.run(discover.run, *other)
    home.run(bucket.run, *other)
    home.run(encode_latents.run, *other)
    folder = home.folder / "whole" / "latents"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.suffix in (".arrow", ".tar")}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["arrow", "webdataset"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_named_point(clips, point: str, format: str) -> None:
    chosen = f"cache.format={format}"
    expected = whole(clips, chosen)
    assert len(expected) > 3

    def work() -> None:
        arm(point, 3, format)
        clips.run(encode_latents.run, chosen)

    _, wait = in_child(work)
    assert wait() == signal.SIGKILL
    left = clips.shards("latents")
    assert len(left) < len(expected), "nothing was cut off"
    assert left.items() <= expected.items(), "a shard that is not whole stands under its final name"
    report = clips.run(encode_latents.run, chosen)
    assert report.exit_code == 0
    assert clips.shards("latents") == expected


@pytest.mark.slow
def test_killed_at_ten_moments_after_the_first_shard(clips) -> None:
    expected = whole(clips)
    draw = random.Random(5)
    cut_off = 0
    folder = clips.root / "latents"
    for _ in range(10):
        for path in folder.rglob("*.arrow"):
            path.unlink()
        child, wait = in_child(lambda: clips.run(encode_latents.run))
        wait_for_shard(folder)
        time.sleep(draw.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        wait()
        left = clips.shards("latents")
        assert left.items() <= expected.items()
        cut_off += len(left) < len(expected)
        clips.run(encode_latents.run)
        assert clips.shards("latents") == expected
    assert cut_off >= 5, f"only {cut_off} of 10 kills cut work off"


def wait_for_shard(folder: Path) -> None:
    limit = time.monotonic() + 60
    while not any(folder.rglob("*.arrow")):
        assert time.monotonic() < limit, "no shard appeared"
        time.sleep(0.002)


def test_what_a_killed_process_leaves_is_never_listed(clips) -> None:
    def work() -> None:
        arm("before the rename", 1, "arrow")
        clips.run(encode_latents.run)

    _, wait = in_child(work)
    assert wait() == signal.SIGKILL
    leftovers = [path.name for path in (clips.root / "latents").rglob("*") if path.is_file()]
    assert any(name.endswith(".tmp") for name in leftovers)
    assert clips.shards("latents") == {}
    assert clips.run(encode_latents.run).remaining == 0


def tables(home) -> dict[str, bytes]:
    """Everything under the root but what killed processes left."""
    files = [path for path in home.root.rglob("*") if path.is_file() and not path.name.endswith(".tmp")]
    return {str(path.relative_to(home.root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "program"), [("media.arrow", discover), ("samples.arrow", bucket), ("plan.json", bucket)]
)
def test_discover_and_bucket_killed_at_a_rename_end_as_if_they_were_not(project, name: str, program, when: str) -> None:
    home = project("kandinsky5-image-t2i")
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)

    def plan() -> dict[str, bytes]:
        home.run(discover.run)
        home.run(bucket.run)
        return tables(home)

    expected = plan()
    shutil.rmtree(home.root)
    if program is bucket:
        home.run(discover.run)

    def work() -> None:
        original = cache.store.replace

        def replace(source: str, target: str) -> None:
            if target.endswith(name) and when == "before":
                die()
            original(source, target)
            if target.endswith(name):
                die()

        cache.store.replace = replace
        home.run(program.run)

    _, wait = in_child(work)
    assert wait() == signal.SIGKILL
    assert plan() == expected
