"""Several processes at one job, or at one unit: whichever is killed, nothing is lost, and the bytes are the same."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest

from cache.sets.plans import Unit
from cache.shards import shard, shard_io
from cache.store.store import Store
from stages.engines import local
from stages.engines.jobs import Job, UnitResult
from tests.background import until
from tests.forms import long
from tests.processes import Child, ForkedWorkers
from tests.stages.engines.engine_workers import make_job
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
CASES = [(name, victim) for name in ("encode-text of edits", "encode-latents") for victim in VICTIMS]


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


class Orphan:
    """A worker that kills its program, at the moment that the name of its folder says, and leaves a mark when it has
    cleaned up."""

    def __init__(self, job: Job) -> None:
        self.folder = Path(job.config.root)

    def run_units(self, take: Callable[[bool], Unit | None], advance: Callable[[int], None]) -> Iterator[UnitResult]:
        unit = take(True)
        assert unit is not None
        reader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        reader.start()
        try:
            if self.folder.name == "within-a-unit":
                kill_program()
                while True:
                    advance(1)
                    time.sleep(0.001)
            yield Deadly(unit.unit_id, unit.unit_id)
        except BaseException:
            (self.folder / "cleaning").touch()
            until_s = time.monotonic() + 1
            while time.monotonic() < until_s:
                time.sleep(0.01)
            reader.kill()
            (self.folder / "cleaned").touch()
            raise


class Deadly(UnitResult):
    """Kills the program right before it is sent to it."""

    def __reduce__(self):
        program = os.getppid()
        kill_program()
        until(lambda: os.getppid() != program)
        return UnitResult, (self.unit_id, self.shard_path)


@pytest.mark.parametrize("moment", ["within-a-unit", "between-units"])
def test_a_worker_without_its_program_cleans_up_undisturbed(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its broken pipe ends it, and so does a signal, which must not cut off the cleaning that the pipe began: readers
    that were left would keep it from ending."""
    root = tmp_path / moment
    root.mkdir()

    def work() -> None:
        units = iter([Unit("u0", "latents", "8x8@1", ("a",), 1)])
        list(local.run_units(Orphan, make_job(root, 2), units, lambda n: None))

    def late(number: int, sent: int) -> None:
        """The signal comes in the middle of the cleaning."""
        if moment == "within-a-unit" and sent == signal.SIGTERM:
            until((root / "cleaning").exists)
        os.kill(number, sent)

    patched = type("Patched", (), {"getpid": staticmethod(os.getpid), "kill": staticmethod(late)})
    monkeypatch.setattr(local, "os", patched)
    running = Child(work)
    assert running.wait() == -signal.SIGKILL
    assert running.alone(), "it continues without its program"
    assert (root / "cleaned").exists(), "its cleaning was cut off, or never began"


# -- one unit --------------------------------------------------------------------------------------------------

WRITERS = 3


@pytest.mark.long
@pytest.mark.parametrize(("format", "widths"), [("arrow", (2000,) * 3), ("webdataset", (500, 501, 502))])
def test_the_same_unit_at_the_same_time(
    tmp_path: Path, shards, draw: Random, format: str, widths: tuple[int, ...]
) -> None:
    """On equal hardware, which writes equal bytes, whoever lists or reads sees a whole shard at every moment. In the
    end it is the shard of one of the writers; or none, which is done again, on unlike hardware."""
    store, seed = Store(tmp_path / "many"), draw.random()

    def work(number: int) -> None:
        pauses = Random(seed + number)
        for _ in range(60):
            time.sleep(pauses.uniform(0, 0.004))
            shards.write(store, format, width=widths[number])

    children = [Child(lambda number=number: work(number)) for number in range(WRITERS)]
    seen = 0
    while children:
        for rel in shard.find_done_units(store, "text/f00d").values() if len({*widths}) == 1 else ():
            assert shard_io.verify(store, rel) == []
            seen += 1
        time.sleep(0.002)
        for child in list(children):
            ended, status = os.waitpid(child.pid, os.WNOHANG)
            if ended:
                children.remove(child)
                assert status == 0
    assert seen > 0 or len({*widths}) > 1
    assert not list(store.root.rglob("*.tmp"))
    for rel in shard.find_done_units(store, "text/f00d").values():
        assert shard_io.verify(store, rel) == []
        with shard_io.open_reader(store, rel) as reader:
            rows = [reader.read(number) for number in range(4)]
        assert rows in [[shards.row(number, width) for number in range(4)] for width in widths]


@pytest.mark.long
def test_the_same_unit_in_both_formats(tmp_path: Path, shards) -> None:
    """As by a machine with another cache.format: one of the two is taken, and is whole."""
    store = Store(tmp_path)
    children = [Child(lambda f=f: shards.write(store, f, width=2000)) for f in ("arrow", "webdataset")]
    assert [child.wait() for child in children] == [0, 0]
    for rel in shard.find_done_units(store, "text/f00d").values():
        assert shard_io.verify(store, rel) == []
