"""A disk that is full at any one write, sync or rename, and a process killed there: never half a shard, never two."""

import errno
import os
import signal
from pathlib import Path

import pytest

from cache.shards import shard, shard_io
from cache.store.files import StoreError
from cache.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.long]

WIDE = 1500  # numbers in a row of a tensor: several writes a shard


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


@pytest.fixture(params=["nothing", "an older shard", "its twin in the other format"])
def before(request, shards):
    """What stands there already: before(store, format)."""

    def make(store: Store, format: str) -> None:
        if request.param == "an older shard":
            shards.write(store, format, rows=2, width=WIDE)
        elif request.param == "its twin in the other format":
            shards.write(store, "webdataset" if format == "arrow" else "arrow", rows=2, width=WIDE)

    return make


def check(store: Store, shards, format: str, expected: dict[str, bytes]) -> None:
    """What is done is whole: as before or as it will be. And done again, it is what it should be."""
    for rel in shard.find_done_units(store, "text/f00d").values():
        assert shard_io.verify(store, rel) == []
        with shard_io.open_reader(store, rel) as reader:
            assert [reader.read(i) for i in range(len(reader))] == [shards.row(n, WIDE) for n in range(len(reader))]
            assert len(reader) in (2, 4)
    shards.write(store, format, width=WIDE)
    assert shards.files(store) == expected


def test_full_at_every_step(tmp_path, shards, format, before, steps) -> None:
    whole = Store(tmp_path / "whole")
    shards.write(whole, format, width=WIDE)
    expected, steps_taken = shards.files(whole), steps.log
    assert steps_taken.count("write") >= 2 and steps_taken.count("rename") >= 1
    at = 0
    while True:
        store = Store(tmp_path / str(at))
        before(store, format)
        steps.arm(at, full)
        try:
            shards.write(store, format, width=WIDE)
        except StoreError as error:
            assert "the disk is full" in str(error) and str(store.root) in str(error) and "run the same" in str(error)
        else:
            assert len(steps.log) <= at, "a full disk was taken for success"
            break
        assert temporaries(store.root) == []
        steps.arm(-1, full)
        check(store, shards, format, expected)
        at += 1
    assert at >= 8


@pytest.mark.long
def test_killed_at_every_step(tmp_path, shards, format, before, steps, forked, often) -> None:
    whole = Store(tmp_path / "whole")
    shards.write(whole, format, width=WIDE)
    expected, at, ended = shards.files(whole), 0, signal.SIGKILL
    while ended:
        store = Store(tmp_path / str(at))
        before(store, format)

        def work(at: int = at, store: Store = store) -> None:
            steps.arm(at, die)
            shards.write(store, format, width=WIDE)

        ended = forked(work)
        assert ended in (0, signal.SIGKILL)
        assert not any(name.endswith(".tmp") for name in store.list_names(""))
        check(store, shards, format, expected)
        store.remove_stale_temps(older_than_s=-1)
        assert temporaries(store.root) == []
        at += often(5, 1)
    assert at > 8
