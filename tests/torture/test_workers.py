"""Several processes at one job, or at one unit: whichever is killed, nothing is lost, and the bytes are the same."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest

from cache.shards import shard, shard_io
from cache.store.store import Store
from stages.engines import local
from stages.engines.jobs import Job
from tests.forms import long
from tests.processes import Child, ForkedWorkers
from tests.torture.conftest import Shards
from tests.torture.kills import Act, die
from tests.torture.programs import AtWork

pytestmark = pytest.mark.slow


class Workers(ForkedWorkers):
    """Each leaves its number, and calls `begin` first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self.begin = folder, lambda: None
        folder.mkdir()
        monkeypatch.setattr(local, "multiprocessing", self.multiprocessing)

    def alone(self, serve: Callable, load: Callable, job: Job, pipe: Connection) -> None:
        (self._folder / str(os.getpid())).touch()
        self.begin()
        super().alone(serve, load, job, pipe)

    @property
    def numbers(self) -> set[int]:
        return {int(path.name) for path in self._folder.iterdir()}


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(tmp_path / "workers", monkeypatch)


# -- one job ---------------------------------------------------------------------------------------------------


def kill_program() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


VICTIMS = ("one worker", "the program", "all")
CASES = [(name, victim) for name in ("encode-latents", "encode-text of edits") for victim in VICTIMS]


@pytest.mark.parametrize(("name", "victim"), [case if case == CASES[0] else long(*case) for case in CASES])
def test_a_process_of_several_is_killed(
    at_work: Callable[[str], AtWork], workers: Workers, draw: Random, tmp_path: Path, name: str, victim: str
) -> None:
    """Without a worker the program has its units done again, and ends as usual. Without the program the workers end by
    themselves, and the next run need not wait for that."""
    work, mark = at_work(name), tmp_path / "killed"

    def kill_all() -> None:
        for number in [*(workers.numbers - {os.getpid()}), os.getppid(), os.getpid()]:
            os.kill(number, signal.SIGKILL)

    acts: dict[str, Act] = {"one worker": die, "the program": kill_program, "all": kill_all}
    at = draw.randrange(len(work.log) // 4)

    def act() -> None:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another worker was first
        acts[victim]()

    workers.begin = lambda: work.steps.arm(at, act)
    running = Child(lambda: work.run(workers=2))
    assert running.wait() == (0 if victim == "one worker" else -signal.SIGKILL)
    assert mark.exists(), f"no worker took {at} steps"
    if victim != "the program":
        assert running.alone()
        work.check_left()
    workers.begin = lambda: None
    assert Child(lambda: work.run(workers=2)).wait() == 0
    assert running.alone(), "a worker continues without its program"
    assert work.files() == work.expected


# -- one unit --------------------------------------------------------------------------------------------------

#: The format and the width of the rows of each writer: on equal hardware all write equal bytes.
EQUAL, UNLIKE = [("arrow", 2000)] * 3, [("webdataset", 500), ("webdataset", 501), ("webdataset", 502)]
BOTH_FORMATS = [("arrow", 2000), ("webdataset", 2000)]


@pytest.mark.long
@pytest.mark.parametrize("writers", [EQUAL, UNLIKE, BOTH_FORMATS], ids=["equal", "unlike", "both formats"])
def test_the_same_unit_at_the_same_time(tmp_path: Path, draw: Random, writers: list[tuple[str, int]]) -> None:
    """With equal bytes, whoever lists or reads sees a whole shard at every moment. In the end it is the shard of one of
    the writers, or none, and then the unit is done again."""
    store, seed = Store(tmp_path / "many"), draw.random()

    def work(number: int) -> None:
        pauses, (format, width) = Random(seed + number), writers[number]
        for _ in range(40):
            time.sleep(pauses.uniform(0, 0.004))
            Shards.write(store, format, width=width)

    def check() -> int:
        found = shard.find_done_units(store, "text/f00d").values()
        assert [damage for rel in found for damage in shard_io.verify(store, rel)] == []
        return len(found)

    seen = list[int]()
    for child in [Child(lambda number=number: work(number)) for number in range(len(writers))]:
        assert not child.until(lambda: seen.append(check()) if writers is EQUAL else None), "it has not ended"
    assert check() or writers is not EQUAL
    assert any(seen) or writers is not EQUAL
    assert not list(store.root.rglob("*.tmp"))
    for rel in shard.find_done_units(store, "text/f00d").values():
        with shard_io.open_reader(store, rel) as reader:
            rows = [reader.read(number) for number in range(4)]
        assert rows in [[Shards.row(number, width) for number in range(4)] for _, width in writers]
