"""Several processes that do the same unit at the same time: a whole shard or none at every moment, one in the end."""

import os
import random
import time

import pytest

from cache.shards import shard, shard_io
from cache.store.store import Store
from tests.processes import Child

pytestmark = [pytest.mark.slow, pytest.mark.long]

WORKERS = 3
WIDE = 2000


@pytest.fixture
def at_once(shards):
    """at_once(store, format, width_of): every worker writes the unit several times; yields while they do."""

    def run(store: Store, format: str, width_of, times: int):
        def work(number: int) -> None:
            draw = random.Random(number)
            for _ in range(times):
                time.sleep(draw.uniform(0, 0.004))
                shards.write(store, format, width=width_of(number))

        children = [Child(lambda number=number: work(number)) for number in range(WORKERS)]
        while children:
            yield
            for child in list(children):
                ended, status = os.waitpid(child.pid, os.WNOHANG)
                if ended:
                    children.remove(child)
                    assert status == 0

    return run


def test_of_equal_hardware(tmp_path, shards, format, at_once, often) -> None:
    """Equal bytes: whoever lists or reads sees a whole shard at every moment."""
    alone, store = Store(tmp_path / "alone"), Store(tmp_path / "many")
    shards.write(alone, format, width=WIDE)
    seen = 0
    for _ in at_once(store, format, lambda number: WIDE, often(12, 400)):
        for rel in shard.find_done_units(store, "text/f00d").values():
            assert shard_io.verify(store, rel) == []
            seen += 1
    assert seen > 0
    assert shards.files(store) == shards.files(alone)
    assert not list(store.root.rglob("*.tmp"))


def test_of_unlike_hardware(tmp_path, shards, format, at_once, often) -> None:
    """Unlike bytes: in the end one of them, whole, or none, which is done again; nobody's rows among another's."""
    for turn in range(often(1, 60)):
        store = Store(tmp_path / str(turn))
        for _ in at_once(store, format, lambda number: 500 + number, 2):
            time.sleep(0.002)
        for rel in shard.find_done_units(store, "text/f00d").values():
            assert shard_io.verify(store, rel) == []
            with shard_io.open_reader(store, rel) as reader:
                rows = [reader.read(number) for number in range(4)]
            assert rows in [[shards.row(n, 500 + number) for n in range(4)] for number in range(WORKERS)]
        assert not list(store.root.rglob("*.tmp"))


def test_of_both_formats(tmp_path, shards) -> None:
    """A machine whose cache.format differs: done_units names one, and both are whole."""
    store = Store(tmp_path)
    children = [Child(lambda f=f: shards.write(store, f, width=WIDE)) for f in ("arrow", "webdataset")]
    assert [child.wait() for child in children] == [0, 0]
    for rel in shard.find_done_units(store, "text/f00d").values():
        assert shard_io.verify(store, rel) == []
