"""Several processes at one job. One, or the program, or all are killed: nothing is lost, and the bytes are the same."""

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cache.sets.plans import Unit
from schemas.config.encoding import Encoding
from schemas.config.pipeline import Config
from schemas.errors import INCOMPLETE
from stages import bucket, discover, encode_latents, encode_text
from stages.encoding.text.worker import TextWorker
from stages.engines import local
from stages.engines.jobs import Job, UnitResult
from tests.forms import long
from tests.processes import Child, ForkedWorkers, processes
from tests.project import Project
from tests.torture.kills import FORMATS, POINTS, Stage, die, once, wait_for

pytestmark = pytest.mark.slow

PROGRAMS = {"encode-text": encode_text, "encode-latents": encode_latents}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The children fork from a process that has imported torch."""
    for stage in ("text", "vae"):
        importlib.import_module(f"stages.encoding.{stage}.worker")


@pytest.fixture
def home(project) -> Project:
    """Ten photographs, each a unit of its own, and so its caption; planned."""
    made = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004})
    for number in range(10):
        made.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)
    made.run(discover.run)
    made.run(bucket.run)
    return made


class Workers(ForkedWorkers):
    """Each leaves its number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def alone(self, serve: Callable, load: Callable, job: Job, pipe: Connection) -> None:
        (self._folder / str(os.getpid())).touch()
        super().alone(serve, load, job, pipe)

    @property
    def numbers(self) -> set[int]:
        return {int(path.name) for path in self._folder.iterdir()}

    @property
    def alive(self) -> set[int]:
        return self.numbers & {number for number, *_ in processes()}

    def kill_all(self) -> None:
        """In one of them: all others, the program, and this one."""
        for number in [*(self.numbers - {os.getpid()}), os.getppid(), os.getpid()]:
            os.kill(number, signal.SIGKILL)


@pytest.fixture
def workers(tmp_path, monkeypatch) -> Workers:
    made = Workers(tmp_path / "workers")
    monkeypatch.setattr(local, "multiprocessing", made.multiprocessing)
    return made


CASES = [*product(PROGRAMS, POINTS, FORMATS)]
SHORT = ("encode-text", "before the rename", "webdataset")  # texts, which no other process reads


@pytest.fixture(params=[case if case == SHORT else long(case) for case in CASES], ids=lambda case: ", ".join(case))
def at_work(request, home, steps) -> Iterator[tuple]:
    """A stage, arm(act) for its point, and what its options are."""
    name, point, format = request.param
    stage = Stage(home, PROGRAMS[name])
    only, at = stage.points[point]
    yield stage, lambda act: steps.arm(at, act, only), f"cache.format={format}"


@pytest.mark.long
def test_all_are_killed_at_once(at_work, workers) -> None:
    stage, arm, override = at_work
    expected = stage.whole(override)

    def work() -> None:
        arm(workers.kill_all)
        stage.run(override, workers=2)

    running = Child(work)
    assert running.wait() == -signal.SIGKILL
    assert len(workers.numbers) == 2 and running.alone()
    assert 0 < stage.left(expected) < len(expected)
    again = Child(lambda: stage.run(override, workers=2))
    assert again.wait() == 0
    assert stage.check(expected, override) == 0


@pytest.mark.long
def test_the_program_alone_is_killed(at_work, workers, tmp_path) -> None:
    """Its workers end by themselves; the next run need not wait for that."""
    stage, arm, override = at_work
    expected = stage.whole(override)

    def act() -> None:
        if once(tmp_path / "killed"):
            os.kill(os.getppid(), signal.SIGKILL)

    def work() -> None:
        arm(act)
        stage.run(override, workers=2)

    running = Child(work)
    assert running.wait() == -signal.SIGKILL
    assert stage.check(expected, override) > 0
    assert running.alone() and len(workers.numbers) == 2, "a worker goes on without its program"
    assert stage.files() == expected


def test_one_worker_is_killed(at_work, workers, tmp_path) -> None:
    """The program has its units done again, and ends as if nothing had been."""
    stage, arm, override = at_work
    expected = stage.whole(override)

    def act() -> None:
        if once(tmp_path / "killed"):
            die()

    def work() -> None:
        arm(act)
        report = stage.run(override, workers=2)
        assert (report.exit_code, report.remaining, report.failed) == (0, 0, [])

    running = Child(work)
    assert running.wait() == 0
    assert (tmp_path / "killed").exists(), "nobody was killed"
    assert running.alone() and stage.files() == expected


@pytest.mark.long
def test_a_text_that_always_kills_its_worker_is_named_and_the_rest_is_done(
    home, workers, tmp_path, monkeypatch
) -> None:
    stage = Stage(home, encode_text)
    expected = stage.whole()
    encode = TextWorker.encode

    def deadly(self, names, *batch):
        if any("picture 3" in self.plan.texts[name]["text"] for name in names):
            die()
        return encode(self, names, *batch)

    def work() -> None:
        monkeypatch.setattr(TextWorker, "encode", deadly)
        report = stage.run(workers=2)
        # Skipped: published by a worker that died before it had said so.
        assert (report.exit_code, report.remaining, report.done + report.skipped) == (INCOMPLETE, 1, 10)
        (failed,) = report.failed
        assert "workers were lost while" in failed["message"]
        lost = [name for name in expected if failed["item"] in name]
        assert stage.files().items() == {name: expected[name] for name in expected if name not in lost}.items()

    running = Child(work)
    assert running.wait() == 0 and running.alone()
    assert stage.check(expected) == 1


# -- the engine by itself ------------------------------------------------------------------------------------


def job_of(folder: Path) -> Job:
    config = Config.model_validate(
        {"root": str(folder), "model": {"family": "sana"}, "datasets": [{"id": "a", "instance_data_dir": "a"}]}
    )
    return Job(config, "generation", "fingerprint", Encoding(workers=2))


class Orphan:
    """A worker that kills its program, where its folder's name says, and leaves a mark when it has cleaned up."""

    def __init__(self, job: Job) -> None:
        self.folder = Path(job.config.root)

    def run_units(self, take: Callable[[bool], Unit | None], advance: Callable[[int], None]) -> Iterator[UnitResult]:
        unit = take(True)
        assert unit is not None
        reader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        reader.start()
        try:
            if self.folder.name == "within-a-unit":
                os.kill(os.getppid(), signal.SIGKILL)
                while True:
                    advance(1)
                    time.sleep(0.001)
            yield Deadly(unit.unit_id, unit.unit_id)
        except BaseException:
            (self.folder / "cleaning").touch()
            until = time.monotonic() + 1
            while time.monotonic() < until:
                time.sleep(0.01)
            reader.kill()
            (self.folder / "cleaned").touch()
            raise


class Deadly(UnitResult):
    """Kills the program right before it is sent there."""

    def __reduce__(self):
        program = os.getppid()
        os.kill(program, signal.SIGKILL)
        wait_for(lambda: os.getppid() != program)
        return UnitResult, (self.unit_id, self.shard_path)


@pytest.mark.parametrize("where", ["within-a-unit", "between-units"])
def test_a_worker_without_its_program_cleans_up_undisturbed(tmp_path, workers, monkeypatch, where) -> None:
    """It is told to end by its broken pipe and by a signal; the second must not cut off what the first began. Readers
    that were left behind would keep it from ending."""
    root = tmp_path / where
    root.mkdir()

    def work() -> None:
        list(local.run_units(Orphan, job_of(root), iter([Unit("u0", "latents", "8x8@1", ("a",), 1)]), lambda n: None))

    def late(number: int, sent: int) -> None:
        """The signal comes in the middle of the cleaning up."""
        if where == "within-a-unit" and sent == signal.SIGTERM:
            wait_for((root / "cleaning").exists)
        os.kill(number, sent)

    patched = type("Patched", (), {"getpid": staticmethod(os.getpid), "kill": staticmethod(late)})
    monkeypatch.setattr(local, "os", patched)
    running = Child(work)
    assert running.wait() == -signal.SIGKILL
    assert running.alone(), "it goes on without its program"
    assert (root / "cleaned").exists(), "its cleaning up was cut off, or never begun"


# -- parts of the work ---------------------------------------------------------------------------------------
