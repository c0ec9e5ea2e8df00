"""A set that reads through a supply of shards."""

from pathlib import Path

import numpy as np
import pytest

from cache.sets.set_lookup import open_set
from cache.shards.shard import ARROW_SUFFIX
from cache.shards.shard_io import ShardSupply, open_reader
from cache.store.damage import DamageError
from cache.store.store import Store
from tests.cache.sets.test_read_draw import FORMS, carefully, make_set, read
from tests.cache.sets.test_trainset import FAMILY, TASK

SHARDS = 4  # of latents; number 0 is the shard of texts


@FORMS
def test_a_set_reads_through_its_supply(tmp_path: Path, form: str) -> None:
    store = Store(tmp_path)
    make_set(store, form, SHARDS)
    data, second = (open_set(store, "s1", FAMILY, TASK) for _ in range(2))
    opened = []

    class Noted(ShardSupply):
        def open(self, number: int):
            opened.append(number)
            return super().open(number)

    noted = Noted(store, data.shard_path)
    data.use_supply(noted)
    rows = [0, 4, 11]
    for _ in range(2):
        assert read(data, rows) == [carefully(second, row) for row in rows]
    assert sorted(opened) == [0, 1, 2, 4], "each once"
    opened.clear()
    noted.forget(2)
    read(data, rows)
    assert opened == [2]


def test_damage_is_replaced_where_the_supply_can(tmp_path: Path) -> None:
    sound, damaged = (make_set(Store(tmp_path / name), "arrow") for name in ("good", "bad"))
    path = tmp_path / "bad" / damaged.shard_path(1)
    content = bytearray(path.read_bytes())
    offset = content.index(np.full(8, 1, np.float32).tobytes())  # of s1's latent
    content[offset] ^= 1
    path.write_bytes(content)
    assert path.suffix == ARROW_SUFFIX

    class Healing(ShardSupply):
        healed = False

        def open(self, number: int):
            return open_reader((sound if self.healed else damaged).store, damaged.shard_path(number))

        def damaged(self, number: int) -> bool:
            forgotten.append(number)
            was, self.healed = self.healed, True
            self.forget(number)
            return not was

    forgotten: list[int] = []
    damaged.use_supply(healing := Healing(damaged.store, damaged.shard_path))
    assert carefully(damaged, 1) == carefully(sound, 1) and forgotten == [1]
    damaged.use_supply(ShardSupply(damaged.store, damaged.shard_path))
    healing.forget(1)
    with pytest.raises(DamageError, match=r"checksum.*"):
        damaged.sample(1)
