"""What every supply of shards does, and a set that reads through one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cache.sets.set_lookup import open_set
from cache.shards.shard import ARROW_SUFFIX
from cache.shards.shard_io import open_reader
from cache.shards.shard_supply import ShardSupply, StoredShards
from cache.store.damage import DamageError
from cache.store.store import Store
from cache.supply.fetched_shards import FetchedShards
from cache.supply.limited_folder import LimitedFolder
from cache.supply.remote_shards import ShardCopies
from tests.cache.sets.test_read_draw import FORMS, carefully, make_set, read
from tests.cache.sets.test_trainset import FAMILY, TASK

SHARDS = 4  # of latents; number 0 is the shard of texts


def stored(folder: Path) -> tuple[Store, Callable[[Store, Callable[[int], str]], ShardSupply]]:
    return Store(folder), StoredShards


def copied(folder: Path) -> tuple[Store, Callable[[Store, Callable[[int], str]], ShardSupply]]:
    def supply_of(store: Store, path_of: Callable[[int], str]) -> ShardSupply:
        paths = [path_of(number) for number in range(SHARDS + 1)]
        return FetchedShards(ShardCopies(store, paths, LimitedFolder(folder / "copies", 10**9)), 2)

    return Store(f"memory://{folder.name}"), supply_of


SUPPLIES = {"stored": stored, "copied": copied}


@pytest.fixture(params=SUPPLIES)
def supplied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable]:
    """Makes a store with a set of SHARDS shards of 3 rows in a format, and the supply of its shards."""
    supplies = []

    def make(form: str) -> tuple[Store, list[str], ShardSupply]:
        store, supply_of = SUPPLIES[request.param](tmp_path)
        data = make_set(store, form, SHARDS)
        supplies.append(supply_of(store, data.shard_path))
        return store, [data.shard_path(number) for number in range(SHARDS + 1)], supplies[-1]

    yield make
    for supply in supplies:
        supply.close()


@FORMS
def test_shards_are_opened_in_any_order_and_named_as_in_the_store(supplied, form: str) -> None:
    """With or without a plan, by several threads, also those that no step was said to need."""
    store, paths, supply = supplied(form)
    wanted = {number: rows(open_reader(store, path)) for number, path in enumerate(paths)}
    assert rows(supply.open(3)) == wanted[3]
    supply.follow(5, iter([{0, 2}, {0, 1}, set(), {4}]))
    assert rows(supply.open(3)) == wanted[3]
    found: dict[int, object] = {}

    def use(number: int) -> None:
        found[number] = rows(supply.open(number))

    threads = [threading.Thread(target=use, args=(number,)) for number in (2, 0, 4, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: wanted[number] for number in (0, 1, 2, 4)}
    for step in range(5, 9):
        supply.finished(step)
    with closing(supply.open(1)) as shard:  # after its step
        assert rows(shard) == wanted[1] and shard.path == store.path(paths[1]) and shard.rel == paths[1]
        assert shard.store.path(shard.rel) == store.path(paths[1])
    supply.follow(0, iter([{1}]))  # once more from the start
    assert rows(supply.open(1)) == wanted[1]


def rows(shard) -> list:
    found = [shard.read(number) for number in range(len(shard))]
    return [(one.id, one.info, {name: array.raw() for name, array in one.tensors.items()}) for one in found]


@FORMS
def test_a_missing_shard_is_named(supplied, form: str) -> None:
    store, paths, supply = supplied(form)
    store.remove(paths[2])
    supply.follow(0, iter([{1, 2}]))
    supply.open(1)
    for _ in range(2):
        with pytest.raises(DamageError, match="missing") as caught:
            supply.open(2)
        assert caught.value.path == store.path(paths[2])


@FORMS
def test_a_set_reads_through_its_supply(supplied, form: str) -> None:
    store, _, supply = supplied(form)
    data, other = (open_set(store, "s1", FAMILY, TASK) for _ in range(2))
    opened = []

    class Noted(StoredShards):
        def open(self, number: int):
            opened.append(number)
            return supply.open(number)

        def on_removal(self, forget: Callable[[int], None]) -> None:
            listeners.append(forget)

    listeners: list[Callable[[int], None]] = []
    noted = Noted(store, data.shard_path)
    data.use_supply(noted)
    assert len(listeners) == 1
    chosen = [0, 4, 11]
    for _ in range(2):
        assert read(data, chosen) == [carefully(other, row) for row in chosen]
    assert sorted(opened) == [0, 1, 2, 4], "each once"
    opened.clear()
    for forget in listeners:
        forget(2)
    read(data, chosen)
    assert opened == [2]


def test_damage_is_replaced_where_the_supply_can(tmp_path: Path) -> None:
    good, bad = (make_set(Store(tmp_path / name), "arrow") for name in ("good", "bad"))
    path = tmp_path / "bad" / bad.shard_path(1)
    content = bytearray(path.read_bytes())
    found = content.index(np.full(8, 1, np.float32).tobytes())  # of s1's latent
    content[found] ^= 1
    path.write_bytes(content)
    assert path.suffix == ARROW_SUFFIX

    class Healing(StoredShards):
        healed = False

        def open(self, number: int):
            return open_reader((good if self.healed else bad).store, bad.shard_path(number))

        def damaged(self, number: int) -> bool:
            told.append(number)
            was, self.healed = self.healed, True
            for forget in listeners:
                forget(number)
            return not was

        def on_removal(self, forget: Callable[[int], None]) -> None:
            listeners.append(forget)

    told: list[int] = []
    listeners: list[Callable[[int], None]] = []
    bad.use_supply(Healing(bad.store, bad.shard_path))
    assert carefully(bad, 1) == carefully(good, 1) and told == [1]
    bad.use_supply(StoredShards(bad.store, bad.shard_path))
    listeners[0](1)
    with pytest.raises(DamageError, match=r"checksum.*"):
        bad.sample(1)
