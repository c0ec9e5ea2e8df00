"""The Ray engine without a cluster: refusals before a connection, and the checks on a node."""

from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from schemas.activities import announce_by
from schemas.cli.options import Options
from schemas.config.loading import ConfigError
from schemas.errors import LatentpressError, UsageError
from stages import bucket, discover, encode_latents
from stages.encoding.stage import choose_engine
from stages.engines import ray as engine
from stages.engines.jobs import UnitResult
from stages.engines.ray import ClusterError, UnitActor, digest_code, run_units
from tests.stages.engines.engine_workers import Echo, make_job, make_units


def test_a_node_with_other_sources_or_another_root_loads_no_model(tmp_path: Path) -> None:
    job, loaded = make_job(tmp_path, 1), []
    actor = UnitActor(lambda job: loaded.append(job) or Echo(job), job)
    [error] = actor.load("other")
    assert "sources of latentpress" in str(error)
    [error] = UnitActor(Echo, replace(job, generation="later")).load(digest_code())
    assert str(tmp_path) in str(error) and "plan later" in str(error) and loaded == []
    try:
        assert actor.load(digest_code()) == [0] and loaded == [job]
        (unit,) = make_units("announced-0")
        announced, members, result = actor.run_unit(unit)
    finally:
        actor.stop()
        announce_by(None)
    assert (announced, members) == ("announced-0: the request is tried again", 2)
    assert isinstance(result, UnitResult) and result.shard_path == "announced-0"
    assert list(tmp_path.glob("cleaned-*"))


def test_a_card_is_not_chosen_by_number(tmp_path: Path) -> None:
    job = make_job(tmp_path, 1, {"device": "cuda:1"}, engine="ray")
    with pytest.raises(UsageError, match="cuda:1") as caught:
        next(run_units(Echo, job, iter(()), lambda n: None))
    assert "num_gpus" in caught.value.next_step


@pytest.mark.parametrize("address", ["127.0.0.2:9", "auto"])
def test_where_there_is_no_cluster_the_next_step_starts_one(tmp_path: Path, monkeypatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:9")
    job = make_job(tmp_path, 1, engine="ray", ray={"address": address})
    with pytest.raises(ClusterError, match=r"127.0.0.2:9' can't be used: .*refused") as caught:
        next(run_units(Echo, job, iter(()), lambda n: None))
    assert "ray start --head" in caught.value.next_step


def test_a_call_that_never_returns_ends_the_program_in_a_bounded_time(tmp_path: Path, monkeypatch) -> None:
    """tests/torture/test_ray.py has a real head that stands still."""
    ended, released = list[LatentpressError](), Event()
    monkeypatch.setattr(engine, "HEAD_TIMEOUT_S", 2)
    monkeypatch.setattr(engine, "POLL_S", 0.1)
    monkeypatch.setattr(engine.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(engine.ray, "cluster_resources", released.wait)
    monkeypatch.setattr(engine, "end_at_once", lambda error: (ended.append(error), released.set()))
    with engine._watching_head(make_job(tmp_path, 1, engine="ray", ray={"address": "first:6379"})):
        assert released.wait(60)
    assert "cluster at 'first:6379' has not answered for 3 s" in str(ended[0]) and "ray status" in ended[0].next_step


def test_the_options_choose_engine_and_address(project) -> None:
    home = project()
    config, options = home.config(), Options(home.folder / "pipeline.yaml")
    stages = choose_engine(config, options, None, "first:6379").stages
    assert (stages.engine, stages.ray.address) == ("ray", "first:6379")
    assert choose_engine(config, options, "ray", None).stages.ray.address == "auto"
    assert choose_engine(config, options, None, None) is config
    with pytest.raises(UsageError, match="--engine is local"):
        choose_engine(config, options, "local", "first:6379")
    with pytest.raises(ConfigError, match=r"stages.ray.address: 'ray://first:10001' is not valid; .*HOST:PORT"):
        choose_engine(config, options, None, "ray://first:10001")


def test_another_checkpoint_on_a_node_is_refused(tmp_path: Path, project) -> None:
    home = project()
    home.image("one.png")
    home.run(discover.run)
    home.run(bucket.run)
    job = replace(make_job(tmp_path, 1), config=home.config(), fingerprint="0" * 32)
    with pytest.raises(LatentpressError, match=f"latents/{'0' * 32}"):
        encode_latents.STAGE.load_remote_worker(job)
