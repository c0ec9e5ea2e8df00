"""Stages killed anywhere, at any moment, and started again: the same files, byte for byte, as if they never were.

A child is forked from this process, which has imported torch already, so that a kill falls into the work and not into
imports; it is killed with SIGKILL, which no handler sees.
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

from cache import shard
from cache.store import Store
from stages import bucket, discover, encode_latents
from stages.media import members
from stages.media.members import Wanted
from tests.stages.conftest import Project


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The children fork from a process that has imported torch; those of the other tests are lighter without it."""
    importlib.import_module("stages.vae.worker")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def of_latents(name: str, wanted: str) -> Callable[[str, str], bool]:
    """Steps called `name` on a latents shard in the making, or on the folder that it has just appeared in."""

    def only(step: str, path: str) -> bool:
        folder = Path(path).parent.name == "latents"
        return step == name and "/latents/" in path and (folder if wanted == "folder" else ".json" not in path)

    return only


#: Named moments of the third shard or so.
POINTS = {
    "during a write": (of_latents("write", "file"), 2),
    "before the sync": (lambda step, path: step == "fsync" and "/latents/" in path and path.endswith(".tmp"), 2),
    "before the rename": (of_latents("rename", "file"), 2),
    "after the rename": (of_latents("fsync", "folder"), 3),
}


@pytest.fixture
def home(project) -> Project:
    """Ten photographs in several buckets and units, planned."""
    made = project("kandinsky5-image-t2i", cache={"unit_mib": 0.01})
    for number in range(10):
        made.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)
    made.run(discover.run)
    made.run(bucket.run)
    return made


def latents(home: Project) -> dict[str, bytes]:
    """All that is listed of them, their rejects included."""
    store = Store(home.root)
    return {name: store.read_bytes(name) for name in store.names("") if "latents" in name}


def whole(home: Project, *overrides: str) -> dict[str, bytes]:
    """What a run that was never interrupted makes; nothing of it stays."""
    assert home.run(encode_latents.run, *overrides).remaining == 0
    made = latents(home)
    forget(home)
    assert sum(name.endswith((".arrow", ".tar")) for name in made) > 3
    return made


def forget(home: Project) -> None:
    for top in ("latents", "rejects"):
        shutil.rmtree(home.root / top, ignore_errors=True)


def check(home: Project, expected: dict[str, bytes], *overrides: str) -> int:
    """What was left, and what the next run makes of it. How many files were missing."""
    left = latents(home)
    kept = {name: data for name, data in left.items() if not name.endswith(".tar.json")}
    assert kept.items() <= expected.items(), "what is not whole stands under its final name"
    assert not any(name.endswith(".tmp") for name in left)
    report = home.run(encode_latents.run, *overrides)
    assert (report.exit_code, report.remaining) == (0, 0)
    assert latents(home) == expected
    return len(expected) - len(left)


@pytest.mark.parametrize("point", POINTS)
def test_at_a_named_point(home, steps, forked, point, often) -> None:
    only, at = POINTS[point]
    formats = ("arrow", "webdataset")
    turn = list(POINTS).index(point) % 2
    for format in formats[turn : turn + 1] if often(1, 2) == 1 else formats:  # the short form takes turns
        chosen = f"cache.format={format}"
        expected = whole(home, chosen)

        def work(chosen: str = chosen) -> None:
            steps.arm(at, die, only)
            home.run(encode_latents.run, chosen)

        assert forked(work) == signal.SIGKILL
        assert check(home, expected, chosen) > 0, "nothing was cut off"
        assert all(
            shard.verify(Store(home.root), name) == [] for name in latents(home) if name.endswith((".arrow", ".tar"))
        )
        forget(home)


class Running:
    """A forked child that encodes; `kill` at any time."""

    def __init__(self, home: Project) -> None:
        import multiprocessing.forkserver

        self.began = time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            multiprocessing.forkserver._forkserver.__init__()
            try:
                home.run(encode_latents.run)
            finally:
                os._exit(0)

    def until(self, seen: Callable[[], bool]) -> bool:
        """Whether `seen` came true before it ended, which kill and wait may no longer be asked of then."""
        limit = time.monotonic() + 60
        while not seen():
            if os.waitpid(self.child, os.WNOHANG)[0]:
                return False
            assert time.monotonic() < limit, "it neither ends nor goes on"
            time.sleep(0.001)
        return True

    def kill(self) -> bool:
        """Whether it was still at work."""
        os.kill(self.child, signal.SIGKILL)
        return self.wait() == signal.SIGKILL

    def wait(self) -> int:
        _, status = os.waitpid(self.child, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


SLOW = "slow.png"


def stuck(wanted: Wanted) -> members.Read:
    """What a reading process does, but never done with the slow picture: half of it is read, and a file says so."""
    path, _ = wanted.files[0]
    if Path(str(path)).name != SLOW:
        return members.read(wanted)
    with open(str(path), "rb") as file:
        file.read(os.path.getsize(str(path)) // 2)
        Path(f"{path}.begun").touch()
        parent = os.getppid()
        while os.getppid() == parent:  # which falls with the program
            time.sleep(0.02)
    raise AssertionError("nobody killed it")


def stuck_reader() -> Callable[[Wanted], members.Read]:
    return stuck


def test_while_a_picture_is_decoded(home, monkeypatch) -> None:
    """One process decodes while this one encodes what came before: the machine loses both at once."""
    home.image(SLOW, (64, 64), "slow", 11)
    home.run(discover.run)
    home.run(bucket.run)
    expected = whole(home)
    with monkeypatch.context() as changed:
        changed.setattr(members, "reader", stuck_reader)  # the readers' processes import it by its name
        running = Running(home)
    assert running.until((home.media / f"{SLOW}.begun").exists)
    assert running.kill()
    (home.media / f"{SLOW}.begun").unlink()
    assert check(home, expected) > 0


def test_at_random_moments(home, often) -> None:
    expected = whole(home)
    uninterrupted = Running(home)
    assert uninterrupted.wait() == 0
    took = time.monotonic() - uninterrupted.began
    assert latents(home) == expected
    draw, cut_off = random.Random(5), 0
    times = often(3, 100)
    for turn in range(times):
        forget(home)
        running = Running(home)
        # Spread over the run, so that no part of it is missed by chance.
        time.sleep(took * (turn + draw.random()) / times)
        running.kill()
        cut_off += check(home, expected) > 0
    assert cut_off >= times // 3, f"only {cut_off} of {times} kills cut work off"


def test_again_and_again(home, often) -> None:
    """Each start is killed a little later than it takes to load; what is done stays done."""
    expected, left = whole(home), 0
    for _ in range(often(2, 12)):
        running, limit = Running(home), time.monotonic() + 60
        before = len(latents(home))
        while len(latents(home)) <= before and time.monotonic() < limit and before < len(expected):
            time.sleep(0.002)
        running.kill()
        found = latents(home)
        assert found.items() <= expected.items() and len(found) >= left
        left = len(found)
    check(home, expected)


# -- before the encoding -------------------------------------------------------------------------------------


def tables(home: Project) -> dict[str, bytes]:
    store = Store(home.root)
    return {name: store.read_bytes(name) for name in store.names("")}


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
            at += often(3, 1)
        assert at > 0
