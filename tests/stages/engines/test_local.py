"""The local engine: units in this process or in several, and what becomes of a unit whose process dies."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from schemas.errors import LatentpressError
from stages.engines import local
from stages.engines.jobs import Job
from stages.engines.local import run_units
from tests.processes import ForkedWorkers
from tests.stages.engines.engine_workers import Echo
from tests.stages.engines.engine_workers import make_job as job
from tests.stages.engines.engine_workers import make_units as units


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "multiprocessing", ForkedWorkers().multiprocessing)


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_unit_is_done_and_counted(tmp_path: Path, workers: int) -> None:
    counted: list[int] = []
    names = [f"u{number}" for number in range(6)]
    outcomes = list(run_units(Echo, job(tmp_path, workers), iter(units(*names)), counted.append))
    assert sorted(outcome.unit_id for outcome in outcomes) == names
    assert sum(counted) == 12
    processes = {(tmp_path / name).read_text() for name in names}
    assert len(processes) <= workers
    assert (str(os.getpid()) in processes) == (workers == 1)


class Numbered(Echo):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        (self.folder / f"process-{job.process_index}-{os.getpid()}").touch()


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_takes_its_unit_alone_which_is_tried_again(tmp_path: Path) -> None:
    """By a new one, which takes the number of the dead."""
    names, said = ("u0", "die-once", "u1", "u2", "u3"), []
    found = run_units(Numbered, job(tmp_path, 2), iter(units(*names)), lambda n: None, said.append)
    outcomes = {outcome.unit_id: outcome for outcome in found}
    assert set(outcomes) == set(names)
    (warning,) = said
    assert "exit code -9" in warning and "die-once" in warning
    assert all(outcome.shard_path for outcome in outcomes.values())
    numbers = [path.name.split("-")[1] for path in tmp_path.glob("process-*")]
    assert len(numbers) in (3, 4) and set(numbers) == {"0", "1"}  # one that is idle meanwhile ends


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_meant_for_the_user_reaches_the_caller(tmp_path: Path, workers: int) -> None:
    with pytest.raises(LatentpressError, match="no more room"):
        list(run_units(Echo, job(tmp_path, workers), iter(units("error", "u1")), lambda n: None))


def dies_loading(job: Job, times: int) -> Echo:
    """Dies while it loads, the first few times; the file has a letter for each load."""
    loads = Path(job.config.root) / "loads"
    with open(loads, "a") as file:
        file.write("x")
    if loads.stat().st_size <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return Echo(job)


@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_while_it_loads_is_started_again_and_no_unit_is_blamed(tmp_path: Path) -> None:
    names, said = [f"u{number}" for number in range(6)], []
    load = partial(dies_loading, times=2)  # both of the first, or one and its successor
    outcomes = list(run_units(load, job(tmp_path, 2), iter(units(*names)), lambda n: None, said.append))
    assert sorted(outcome.unit_id for outcome in outcomes if outcome.shard_path) == names
    assert len(said) == 2 and all("before it was ready: exit code -9" in line for line in said)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_where_loading_keeps_failing_the_stage_ends_with_the_facts(tmp_path: Path) -> None:
    names = [f"u{number}" for number in range(6)]
    load = partial(dies_loading, times=100)
    with pytest.raises(LatentpressError, match=r"exit code -9, 3 times in a row") as caught:
        list(run_units(load, job(tmp_path, 2), iter(units(*names)), lambda n: None))
    assert "kill from outside" in caught.value.next_step and "--workers" in caught.value.next_step
    assert len((tmp_path / "loads").read_text()) == 6
