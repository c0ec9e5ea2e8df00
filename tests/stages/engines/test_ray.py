"""The Ray engine without a cluster: what is refused before one is asked, and what a node checks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.activities import announce_by
from schemas.errors import USAGE, LatentpressError
from stages import bucket, discover, encode_latents
from stages.encoding.stage_options import UsageError, choose_engine
from stages.engines.ray import run_units
from stages.engines.ray_cluster import (
    ClusterError,
    CodeMismatch,
    DeviceNotChoosable,
    RootMismatch,
    UnitActor,
    digest_code,
)
from tests.stages.engines.engine_workers import Echo, make_job, make_units


def test_a_node_with_other_sources_or_another_root_loads_no_model(tmp_path: Path) -> None:
    job, loaded = make_job(tmp_path, 1), []
    actor = UnitActor(lambda job: loaded.append(job) or Echo(job), job)
    assert isinstance(actor.load("other"), CodeMismatch)
    error = UnitActor(Echo, replace(job, generation="later")).load(digest_code())
    assert isinstance(error, RootMismatch) and f"no plan later under {tmp_path}" in error.message
    assert loaded == []
    try:
        assert actor.load(digest_code()) is None and loaded == [job]
        (unit,) = make_units("announced-0")
        progress, result = actor.run_unit(unit, 0)
    finally:
        actor.stop()
        announce_by(None)
    assert progress.members == 2 and result is not None and result.shard_path == "announced-0"
    said = "announced-0: the request is tried again"
    ask: Any = actor.progress
    assert progress.announced == ask(0).announced == [said] and not ask(1).announced
    assert list(tmp_path.glob("cleaned-*"))


def test_a_card_is_not_chosen_by_number(tmp_path: Path) -> None:
    job = make_job(tmp_path, 1, {"device": "cuda:1"}, engine="ray")
    with pytest.raises(DeviceNotChoosable, match="cuda:1") as caught:
        next(run_units(Echo, job, iter(()), lambda n: None))
    assert "num_gpus" in caught.value.next_step


@pytest.mark.parametrize("address", ["127.0.0.2:9", "auto"])
def test_where_there_is_no_cluster_the_next_step_starts_one(tmp_path: Path, monkeypatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:9")
    job = make_job(tmp_path, 1, engine="ray", ray={"address": address})
    with pytest.raises(ClusterError, match=r"127.0.0.2:9' can't be used: .*refused") as caught:
        next(run_units(Echo, job, iter(()), lambda n: None))
    assert "ray start --head" in caught.value.next_step


def test_the_options_choose_engine_and_address(project) -> None:
    config = project().config()
    chosen = choose_engine(config, None, "first:6379").stages
    assert (chosen.engine, chosen.ray.address) == ("ray", "first:6379")
    assert choose_engine(config, "ray", None).stages.ray.address == "auto"
    assert choose_engine(config, None, None) is config
    with pytest.raises(UsageError, match="--engine is local"):
        choose_engine(config, "local", "first:6379")
    with pytest.raises(
        UsageError, match=r"stages.ray.address: 'ray://first:10001' is not valid; .*HOST:PORT"
    ) as caught:
        choose_engine(config, None, "ray://first:10001")
    assert caught.value.exit_code == USAGE


def test_another_checkpoint_on_a_node_is_refused(tmp_path: Path, project) -> None:
    home = project()
    home.image("one.png")
    home.run(discover.run)
    home.run(bucket.run)
    job = replace(make_job(tmp_path, 1), config=home.config(), fingerprint="0" * 32)
    with pytest.raises(LatentpressError, match=f"in place of latents/{'0' * 32}"):
        encode_latents.STAGE.load_elsewhere(job)
