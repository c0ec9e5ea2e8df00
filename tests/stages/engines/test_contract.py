"""The contract of every engine, with processes on this machine and with actors on a Ray cluster of two nodes."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from schemas.activities import announce_by
from schemas.config.encoding import EngineName
from schemas.errors import LatentpressError, UsageError
from stages.engines import local
from stages.engines.jobs import Engine, Job, load_engine
from stages.engines.pool import MAX_UNIT_TRIES
from tests.forms import long
from tests.processes import ForkedWorkers
from tests.ray_cluster import ray_cluster
from tests.stages.engines.engine_workers import Echo, make_job, make_units

ENGINES = [name if name == "local" else long(name) for name in get_args(EngineName)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(1, 1) as made:
        yield made


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "multiprocessing", ForkedWorkers().multiprocessing)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, forked: None) -> Engine:
    return load_engine(request.param)


@pytest.fixture
def job(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Job:
    """For two workers."""
    if engine is local:
        return make_job(tmp_path, 2)
    return make_job(tmp_path, 2, engine="ray", ray={"address": request.getfixturevalue("cluster").address})


def test_units_of_workers_that_die_are_tried_again_and_one_that_kills_them_is_left(
    engine: Engine, job: Job, tmp_path: Path
) -> None:
    names, counts, messages = ("u0", "die-once", "u1", "die-always", "u2"), [], []
    found = engine.run_units(Echo, job, iter(make_units(*names)), counts.append, messages.append)
    results = {result.unit_id: result for result in found}
    assert set(results) == set(names)
    assert [name for name, result in results.items() if result.shard_path is None] == ["die-always"]
    # A death counts if the process had only this unit, which may be different in the first process alone.
    tries = len((tmp_path / "tried-die-always").read_text().splitlines())
    assert f"{MAX_UNIT_TRIES} " in results["die-always"].error and MAX_UNIT_TRIES <= tries <= MAX_UNIT_TRIES + 1
    assert len((tmp_path / "tried-die-once").read_text().splitlines()) == 2
    assert sum(counts) == 8
    assert (
        sum("die-once" in line for line in messages) in (1, 2)
        and sum("die-always" in line for line in messages) >= tries
    )


def test_an_error_for_the_user_reaches_the_caller_and_the_workers_clean_up(
    engine: Engine, job: Job, tmp_path: Path
) -> None:
    units = iter(make_units("slow-0", "error-beside"))
    with pytest.raises(LatentpressError, match="no more room") as caught:
        list(engine.run_units(Echo, job, units, lambda n: None))
    assert caught.value.next_step == "make some"
    assert not (tmp_path / "slow-0").exists()
    assert len(list(tmp_path.glob("cleaned-*"))) == 2


def test_one_that_is_closed_early_drops_what_is_under_way(engine: Engine, job: Job, tmp_path: Path) -> None:
    with closing(engine.run_units(Echo, job, iter(make_units("u0", "slow-1", "slow-2")), lambda n: None)) as results:
        assert next(results).unit_id == "u0"
    assert not list(tmp_path.glob("slow-*"))
    tried = {path.read_text().strip() for path in tmp_path.glob("tried-*")}
    assert tried <= {path.name.removeprefix("cleaned-") for path in tmp_path.glob("cleaned-*")}


def test_what_workers_announce_is_announced_by_the_program(engine: Engine, job: Job) -> None:
    messages = list[str]()
    announce_by(messages.append)
    try:
        list(engine.run_units(Echo, job, iter(make_units("announced-0", "u1", "announced-2")), lambda n: None))
    finally:
        announce_by(None)
    results = sorted(line.partition(": ")[2] for line in messages)
    assert results == [f"announced-{number}: the request is tried again" for number in (0, 2)], messages
    assert all(line.startswith("worker ") for line in messages)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_unit_is_done_and_counted(tmp_path: Path, workers: int) -> None:
    """One worker is this process."""
    counts, names = list[int](), [f"u{number}" for number in range(6)]
    results = local.run_units(Echo, make_job(tmp_path, workers), iter(make_units(*names)), counts.append)
    assert sorted(result.unit_id for result in results) == names and sum(counts) == 12
    processes = {(tmp_path / name).read_text() for name in names}
    assert len(processes) <= workers and (str(os.getpid()) in processes) == (workers == 1)


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
    names, messages = [f"u{number}" for number in range(6)], []
    load = partial(dies_loading, times=2)  # both of the first, or one and its successor
    outcomes = list(
        local.run_units(load, make_job(tmp_path, 2), iter(make_units(*names)), lambda n: None, messages.append)
    )
    assert sorted(outcome.unit_id for outcome in outcomes if outcome.shard_path) == names
    assert messages and all("before it was ready: exit code -9" in line for line in messages)
    assert len((tmp_path / "loads").read_text()) > 2  # a death after the last unit is not reported


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_where_loading_keeps_failing_the_stage_ends_with_the_facts(tmp_path: Path) -> None:
    names = [f"u{number}" for number in range(6)]
    load = partial(dies_loading, times=100)
    with pytest.raises(LatentpressError, match=r"exit code -9, 3 ") as caught:
        list(local.run_units(load, make_job(tmp_path, 2), iter(make_units(*names)), lambda n: None))
    assert "Exit code -9" in caught.value.next_step and "--workers" in caught.value.next_step
    assert len((tmp_path / "loads").read_text()) == 6


def test_the_extra_of_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "stages.engines.ray", raising=False)
    with pytest.raises(UsageError) as caught:
        load_engine("ray")
    assert ".[ray]" in caught.value.next_step
