"""gc and verify next to programs that write: nothing that is needed or being written is removed, and nothing whole is
reported as damaged. They run at every step that the program takes on the disk, so that no moment is missed by chance.
"""

import os
import threading
from collections.abc import Callable
from random import Random

import pytest

from cache.sets import rejects
from cache.sets.rejects import make_reject
from cache.store.store import Store
from stages import gc, verify
from tests.project import Project
from tests.torture.conftest import Shards
from tests.torture.kills import Steps
from tests.torture.programs import AtWork

pytestmark = [pytest.mark.slow, pytest.mark.long]

UNUSED = "0" * 24  # a fingerprint that nothing uses
PROGRAMS = ("bucket", "encode-text", "encode-latents", "index")


@pytest.fixture
def between(steps: Steps) -> Callable[[Callable[[], object]], None]:
    """between(act): at every step of this process, `act`, whose own steps do not count."""
    turn, acting = threading.RLock(), []  # a stage writes in two threads

    def arm(act: Callable[[], object]) -> None:
        def act_alone() -> None:
            with turn:
                if not acting:
                    acting.append(True)
                    try:
                        act()
                    finally:
                        acting.clear()

        steps.arm(-1, act_alone, at_every_step=True)

    return arm


def leave_unused(home: Project, kind: str, draw: Random) -> None:
    """A shard, and a list of rejected items, that no configuration needs, a year old."""
    unit = f"unit-{draw.randrange(1 << 30)}"
    Shards.write(Store(home.root), "arrow", stem=f"{kind}/{UNUSED}/{unit}")
    rejects.write_rejects(
        Store(home.root), f"encode-{kind}/{UNUSED}", unit, [make_reject("x", "x", "x", "corrupt", "")]
    )
    for path in home.root.rglob(f"{UNUSED}/*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 400 * 86400))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gc_at_every_step(
    at_work: Callable[[str], AtWork], draw: Random, between: Callable, steps: Steps, name: str
) -> None:
    work, removed = at_work(name), list[int]()

    def collect() -> None:
        report = work.home.run(gc.run, f"cache.format={work.program.format}", yes=True, keep_days=0.0)
        assert report.exit_code == 0
        removed.append(report.done)

    work.run()
    collect()
    expected = work.files()
    work.reset()
    for _ in range(3):
        leave_unused(work.home, "text" if name == "encode-text" else "latents", draw)
    between(collect)
    work.run()
    steps.arm(-1, collect)
    assert len(removed) > 8 and removed[1] >= 6, "it removed nothing"
    collect()
    assert work.files() == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_verify_at_every_step(at_work: Callable[[str], AtWork], between: Callable, steps: Steps, name: str) -> None:
    work, seen = at_work(name), list[int]()

    def look() -> None:
        report = work.home.run(verify.run, f"cache.format={work.program.format}")
        assert (report.exit_code, report.damage, report.failed) == (0, [], [])
        seen.append(report.done)

    between(look)
    work.run()
    steps.arm(-1, look)
    assert len(seen) > 8
    assert work.files() == work.expected


def test_verify_while_a_shard_that_a_set_names_is_replaced(
    at_work: Callable[[str], AtWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the removal of the old one and the new one's appearance there is none; verify looks again."""
    work = at_work("index")
    work.run()
    shard = next(work.home.root.glob("latents/*/*.arrow"))
    data = shard.read_bytes()
    shard.unlink()
    with monkeypatch.context() as changed:
        changed.setattr(verify, "sleep", lambda seconds: shard.write_bytes(data))
        report = work.home.run(verify.run)
        assert (report.exit_code, report.damage) == (0, []), "a false alarm"
        assert shard.exists(), "nothing was missing"
        shard.unlink()
        changed.setattr(verify, "sleep", lambda seconds: None)
        assert work.home.run(verify.run).damage
