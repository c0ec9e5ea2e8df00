"""Encoding stages with cache.rolling, alone: what was set aside. tests/torture/test_rolling.py has them beside
training."""

import os
import signal
import subprocess
from collections.abc import Callable

import pytest
import torch

from cache.shards.shard_io import open_reader
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, index
from stages.encoding.vae import flux
from tests.background import until
from tests.project import Project
from tests.torture.test_rolling import LIMIT_GB, PROGRAMS, make, programs, start

pytestmark = pytest.mark.slow


def test_what_was_set_aside_is_tried_again_on_request(
    project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alternate` lets a stage end once what fits is there."""
    home = project(cache={"unit_mib": 0.02, "rolling": {"max_gb": 1, "alternate": True}}, text={"max_length": 16})
    home.settings["train"] = {"batch_size": 1, "steps": 4}
    home.settings["stages"]["max_reject_fraction"] = 1.0
    for number in range(3):
        home.image(f"{number}.png", seed=number)
    for program in (discover, bucket, index, encode_text):
        assert home.run(program.run).exit_code == 0
    encode = flux.Autoencoder.encode

    def once_infinite(self, *given):
        latents = encode(self, *given)
        latents[0] = torch.inf
        monkeypatch.setattr(flux.Autoencoder, "encode", encode)
        return latents

    monkeypatch.setattr(flux.Autoencoder, "encode", once_infinite)
    first = home.run(encode_latents.run)
    (aside,) = first.set_aside
    assert aside["reason"] == "not-finite" and first.done == 2
    again = home.run(encode_latents.run)
    assert again.done == 0 and again.set_aside == [aside], "not without being asked to"
    before = home.shards("latents")
    mended = home.run(encode_latents.run, retry_set_aside=True)
    assert mended.set_aside == [] and mended.remaining == 0
    after = home.shards("latents")
    changed = [name for name in after if after[name] != before.get(name)]
    assert before.keys() == after.keys() and len(changed) == 1
    with open_reader(Store(home.root), f"latents/{changed[0]}") as shard:
        assert aside["item"] in shard.meta.ids and not shard.meta.set_aside
    assert mended.done == len(shard.meta.ids)


@pytest.mark.long
def test_everything_ends_once_run_is_killed(project: Callable[..., Project]) -> None:
    home = make(project, max_gb=LIMIT_GB)
    run = start(home, "run", stdout=subprocess.DEVNULL)
    until(lambda: programs(run.pid).keys() >= PROGRAMS and home.shards("latents"), "training")
    run.kill()
    assert run.wait() == -signal.SIGKILL
    try:
        until(lambda: not programs(run.pid), "the end of what it had started")
    finally:
        for process in programs(run.pid).values():
            os.kill(process, signal.SIGKILL)
        run.communicate()
