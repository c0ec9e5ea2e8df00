"""What the tests that kill share: the moments, and what an encoding stage must leave behind.

A child is forked from this process, which has imported torch already, so that a kill falls into the work and not into
imports; it is killed with SIGKILL, which no handler sees.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from cache.shards import shard_io
from cache.store.store import Store
from tests.processes import PATIENCE_S
from tests.project import Project

Only = Callable[[str, str], bool]
FORMATS = ("arrow", "webdataset")
SHARDS = (".arrow", ".tar")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def points(kind: str) -> dict[str, tuple[Only, int]]:
    """Named moments of about the third shard of a kind: which steps count, and which of them it is."""
    inside = f"/{kind}/"

    def step(name: str, wanted: Callable[[str], bool]) -> Only:
        return lambda taken, path: taken == name and inside in path and wanted(path)

    return {
        "during a write": (step("write", lambda path: ".json" not in path), 2),
        "before the sync": (step("fsync", lambda path: path.endswith(".tmp")), 2),
        "before the rename": (step("rename", lambda path: ".json" not in path), 2),
        "after the rename": (step("fsync", lambda path: Path(path).parent.name == kind), 3),
    }


POINTS = tuple(points(""))


class Stage:
    """An encoding stage in a project that is planned: its files, listed rejects included, and what they should be."""

    def __init__(self, home: Project, program: ModuleType) -> None:
        self.home, self.program, self.kind = home, program, program.STAGE.kind

    @property
    def points(self) -> dict[str, tuple[Only, int]]:
        return points(self.kind)

    def run(self, *overrides: str, **options: object):
        return self.home.run(self.program.run, *overrides, **options)

    def files(self) -> dict[str, bytes]:
        """All that is listed of it."""
        store = Store(self.home.root)
        tops = (f"{self.kind}/", f"rejects/{self.program.STAGE.name}/")
        return {name: store.read_bytes(name) for name in store.list_names("") if name.startswith(tops)}

    def forget(self) -> None:
        for top in (self.kind, "rejects"):
            shutil.rmtree(self.home.root / top, ignore_errors=True)

    def whole(self, *overrides: str) -> dict[str, bytes]:
        """What a run that was never interrupted makes; nothing of it stays."""
        report = self.run(*overrides)
        assert (report.exit_code, report.remaining) == (0, 0)
        made = self.files()
        self.forget()
        assert sum(name.endswith(SHARDS) for name in made) > 3
        return made

    def left(self, expected: dict[str, bytes]) -> int:
        """How many files are missing. What is there must be whole, under its final name."""
        left = self.files()
        kept = {name: data for name, data in left.items() if not name.endswith(".tar.json")}
        assert kept.items() <= expected.items(), "what is not whole stands under its final name"
        assert not any(name.endswith(".tmp") for name in left)
        return len(expected) - len(left)

    def check(self, expected: dict[str, bytes], *overrides: str) -> int:
        """What was left, and what the next run makes of it. How many files were missing."""
        missing = self.left(expected)
        report = self.run(*overrides)
        assert (report.exit_code, report.remaining) == (0, 0)
        assert self.files() == expected
        return missing

    def verify(self) -> None:
        store = Store(self.home.root)
        assert [shard_io.verify(store, name) for name in self.files() if name.endswith(SHARDS) and self.kind in name]


def once(mark: Path) -> bool:
    """True for one caller alone, of all processes."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for(seen: Callable[[], object]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < limit, "what was waited for did not happen"
        time.sleep(0.002)
