"""Every program that writes, killed at a random step or with a full disk: the same files, byte for byte, afterwards."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from cache.shards import shard, shard_io
from cache.store.files import StoreError
from cache.store.store import Store
from tests.forms import long
from tests.torture.conftest import Shards
from tests.torture.kills import Act, Steps, die, fill_disk, forked
from tests.torture.programs import PROGRAMS, AtWork

pytestmark = pytest.mark.slow
WIDE = 1500  # numbers in a row of a tensor: several writes for each shard
SHORT = ("index", "encode-latents of clips")


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in PROGRAMS])
def test_killed_once(at_work: Callable[[str], AtWork], draw: Random, name: str) -> None:
    work = at_work(name)
    work.kill(draw.randrange(len(work.log)))
    work.check_left()
    work.finish()


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_in_steps_of_each_kind_and_with_a_full_disk(
    at_work: Callable[[str], AtWork], draw: Random, name: str
) -> None:
    work = at_work(name)
    for at in work.moments(draw):
        work.reset()
        work.kill(at)
        work.check_left()
        work.finish()
    work.reset()
    work.fill_disk(draw.choice([at for at, (step, _) in enumerate(work.log[:-3]) if step in ("create", "write")]))
    work.check_left()
    work.finish()


@pytest.mark.long
@pytest.mark.parametrize("act", [die, fill_disk])
@pytest.mark.parametrize(
    ("before", "format"), [("webdataset", "arrow"), ("webdataset", "webdataset"), ("arrow", "webdataset")]
)
def test_a_shard_that_replaces_another_at_every_step(
    tmp_path: Path, steps: Steps, act: Act, before: str, format: str
) -> None:
    """Until the new one is whole it is the old one, also in the other format, or none."""
    whole = Store(tmp_path / "whole")
    Shards.write(whole, format, width=WIDE)
    expected, at, ended = {name: whole.read_bytes(name) for name in whole.list_names("")}, 0, 1
    while ended:
        store = Store(tmp_path / str(at))
        Shards.write(store, before, rows=2, width=WIDE)

        def work(at: int = at, store: Store = store) -> None:
            steps.arm(at, act)
            try:
                Shards.write(store, format, width=WIDE)
            except StoreError as error:
                assert "the disk is full" in str(error) and not list(store.root.rglob("*.tmp"))
                die()

        ended = forked(work)
        for rel in shard.find_done_units(store, "text/f00d").values():
            assert shard_io.verify(store, rel) == []
            with shard_io.open_reader(store, rel) as reader:
                assert len(reader) in (2, 4)
                assert all(reader.read(number) == Shards.row(number, WIDE) for number in range(len(reader)))
        steps.arm(-1, act)
        Shards.write(store, format, width=WIDE)
        assert {name: store.read_bytes(name) for name in store.list_names("")} == expected
        store.remove_stale_temps(older_than_s=-1)
        assert not list(store.root.rglob("*.tmp"))
        at += 1
    assert at > 8
