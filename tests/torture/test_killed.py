"""Stages killed anywhere, at any moment, and started again: the same files, byte for byte, as if they never were.

Here encode-latents, in one process, and what comes before it; test_killed_stages.py has the other stages.
"""

import importlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.store.store import Store
from stages import bucket, discover, encode_latents
from stages.encoding import member_reader
from stages.encoding.member_reader import ReadRequest
from tests.processes import Child
from tests.project import Project
from tests.torture.kills import FORMATS, POINTS, Stage, die

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The children fork from a process that has imported torch; those of the other tests are lighter without it."""
    importlib.import_module("stages.encoding.vae.worker")


@pytest.fixture
def home(project) -> Project:
    """Ten photographs in several buckets and units, planned."""
    made = project("kandinsky5-image-t2i", cache={"unit_mib": 0.01})
    for number in range(10):
        made.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)
    made.run(discover.run)
    made.run(bucket.run)
    return made


@pytest.fixture
def latents(home) -> Stage:
    return Stage(home, encode_latents)


@pytest.mark.long  # test_killed_stages.py has one of each program in the short form
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("format", FORMATS)
def test_at_a_named_point(latents, steps, forked, point, format) -> None:
    only, at = latents.points[point]
    override = f"cache.format={format}"
    expected = latents.whole(override)

    def work() -> None:
        steps.arm(at, die, only)
        latents.run(override)

    assert forked(work) == signal.SIGKILL
    assert latents.check(expected, override) > 0, "nothing was cut off"
    latents.verify()


SLOW = "slow.png"


def stuck(wanted: ReadRequest) -> member_reader.MemberPixels:
    """What a reading process does, but not done with the slow picture for as long as a file stands there: half of it
    is read, and that file says so."""
    path, _ = wanted.files[0]
    if Path(str(path)).name == SLOW:
        with open(str(path), "rb") as file:
            file.read(os.path.getsize(str(path)) // 2)
        begun = Path(f"{path}.begun")
        begun.touch()
        while begun.exists():
            time.sleep(0.02)
    return member_reader.read_member(wanted)


def stuck_reader() -> Callable[[ReadRequest], member_reader.MemberPixels]:
    return stuck


@pytest.fixture
def start(latents) -> Callable[[], Child]:
    return lambda: Child(latents.run)


@pytest.mark.long
def test_while_a_picture_is_decoded(home, latents, start, monkeypatch) -> None:
    """One process decodes while this one encodes what came before: the machine loses both at once."""
    home.image(SLOW, (64, 64), "slow", 11)
    home.run(discover.run)
    home.run(bucket.run)
    expected = latents.whole()
    with monkeypatch.context() as changed:
        changed.setattr(
            member_reader, "make_member_reader", stuck_reader
        )  # the readers' processes import it by its name
        running = start()
    assert running.until((home.media / f"{SLOW}.begun").exists)
    assert running.kill()
    assert latents.check(expected) > 0
    (home.media / f"{SLOW}.begun").unlink()
    assert running.alone(), "a process that decodes outlives the program and its item"


@pytest.mark.long
def test_at_random_moments(latents, start) -> None:
    expected = latents.whole()
    uninterrupted = start()
    assert uninterrupted.wait() == 0
    took = time.monotonic() - uninterrupted.began
    assert latents.files() == expected
    draw, cut_off, turn = random.Random(5), 0, 0
    times = 100
    while cut_off < max(1, times // 3) or turn < times:
        latents.forget()
        running = start()
        # Spread over the run, so that no part of it is missed by chance.
        time.sleep(took * (turn % times + draw.random()) / times)
        if not running.kill():
            took /= 2  # the machine has become less busy since that was measured
        cut_off += latents.check(expected) > 0
        turn += 1


@pytest.mark.long
def test_again_and_again(latents, start) -> None:
    """Each start is killed a little later than it takes to load; what is done stays done."""
    expected, left = latents.whole(), 0
    for _ in range(12):
        running, limit = start(), time.monotonic() + 60
        before = len(latents.files())
        while len(latents.files()) <= before and time.monotonic() < limit and before < len(expected):
            time.sleep(0.002)
        running.kill()
        found = latents.files()
        assert found.items() <= expected.items() and len(found) >= left
        left = len(found)
    latents.check(expected)


# -- before the encoding -------------------------------------------------------------------------------------


def tables(home: Project) -> dict[str, bytes]:
    store = Store(home.root)
    return {name: store.read_bytes(name) for name in store.list_names("")}


@pytest.mark.long
@pytest.mark.parametrize("program", [discover, bucket])
def test_discover_and_bucket_at_every_rename(project, steps, forked, program, often) -> None:
    home = project("kandinsky5-image-t2i")
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    renames = lambda step, path: step == "rename"  # noqa: E731
    after = lambda step, path: step == "fsync" and not path.endswith(".tmp")  # noqa: E731

    def plan() -> dict[str, bytes]:
        home.run(discover.run)
        home.run(bucket.run)
        return tables(home)

    expected, found = plan(), home.folder / "discovered"
    shutil.rmtree(home.root)
    if program is bucket:
        home.run(discover.run)
        shutil.copytree(home.root, found)
    for only in (renames, after)[: often(1, 2)]:
        at, ended = 0, signal.SIGKILL
        while ended:
            shutil.rmtree(home.root, ignore_errors=True)
            if program is bucket:
                shutil.copytree(found, home.root)

            def work(at: int = at, only=only) -> None:
                steps.arm(at, die, only)
                home.run(program.run)

            ended = forked(work)
            assert plan() == expected
            at += often(4, 1)
        assert at > 0
