"""What the tests that kill share: the moments, processes to kill, and what an encoding stage must leave behind.

A child is forked from this process, which has imported torch already, so that a kill falls into the work and not into
imports; it is killed with SIGKILL, which no handler sees.
"""

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from cache.shards import shard_io
from cache.store.store import Store
from tests.processes import forget_forkserver
from tests.project import Project

Only = Callable[[str, str], bool]
FORMATS = ("arrow", "webdataset")
SHARDS = (".arrow", ".tar")
PATIENCE_S = 60.0


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


class Running:
    """A forked child at work, in a session of its own; `kill` it at any time. What it fails of is in `said`."""

    def __init__(self, work: Callable[[], object], said: Path) -> None:
        self.began, self.said = time.monotonic(), said
        self.child = os.fork()
        if self.child == 0:
            code = 1
            try:
                os.setsid()
                forget_forkserver()
                work()
                code = 0
            except BaseException:
                said.write_text(traceback.format_exc())
            finally:
                sys.stdout.flush()
                os._exit(code)

    def until(self, seen: Callable[[], object]) -> bool:
        """Whether `seen` came true before it ended, which kill and wait may no longer be asked of then."""
        limit = time.monotonic() + PATIENCE_S
        while not seen():
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                assert not os.WEXITSTATUS(status), self.said.read_text()
                return False
            assert time.monotonic() < limit, "it neither ends nor goes on"
            time.sleep(0.001)
        return True

    def kill(self) -> bool:
        """Whether it was still at work."""
        os.kill(self.child, signal.SIGKILL)
        return self.wait() == signal.SIGKILL

    def wait(self) -> int:
        """The signal that ended it, or 0."""
        _, status = os.waitpid(self.child, 0)
        if os.WIFSIGNALED(status):
            return os.WTERMSIG(status)
        assert os.WEXITSTATUS(status) == 0, self.said.read_text()
        return 0

    def alone(self) -> bool:
        """Whether every process that it started ended soon after it."""
        limit = time.monotonic() + PATIENCE_S
        while any(session == self.child for _, session in processes()) and time.monotonic() < limit:
            time.sleep(0.01)
        return time.monotonic() < limit


def processes() -> Iterator[tuple[int, int]]:
    """Number and session of every process that has not ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            yield int(folder.name), int(session)


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
