"""Copies of remote shards that are damaged, and a disk that takes no more."""

import resource
import signal
from pathlib import Path

import pytest

from cache.store.damage import ANSWERS, DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from tests.cache.sets.test_read_draw import FORMS
from tests.cache.store.remote_place import Place, content, read, total
from tests.processes import in_child


@FORMS
def test_a_damaged_copy_is_fetched_once_more(tmp_path: Path, form: str) -> None:
    """Found on reuse, also where it was cut, and by a reader after it was verified."""
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    supply = place.supply()
    for number in range(4):
        read(supply, number)
    supply.close()
    shards = [path for path in place.copies() if path.suffix != ".json"]
    place.damage(shards[0])
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    if form == "webdataset":
        Path(f"{shards[2]}.json").unlink()
    supply = place.supply()
    for number in range(4):
        read(supply, number)
    assert total(supply)["shards_fetched"] == (2 if form == "arrow" else 3)
    supply.follow(0, iter([{5}]))
    read(supply, 5)
    place.damage(next(path for path in place.copies() if path.suffix != ".json" and path not in shards))
    assert supply.damaged(5) and not supply.damaged(5)
    read(supply, 5)
    assert total(supply)["shards_fetched"] == (4 if form == "arrow" else 5)
    supply.close()


@FORMS
def test_damage_in_the_store_is_said_of_the_row_as_locally(tmp_path: Path, form: str) -> None:
    """Fetched ANSWERS times; the other rows can be read."""
    place = Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies", form)
    local = tmp_path / "whole"
    local.write_bytes(place.store.read_bytes(place.paths[4]))
    place.damage(local)
    place.store.publish_bytes(place.paths[4], local.read_bytes())
    supply = place.supply()
    supply.follow(0, iter([{3, 4}]))
    with supply.open(4) as shard:
        assert shard.read(1).tensors["latent"].raw() == content(4, 1)
        with pytest.raises(DamageError, match="checksum") as caught:
            shard.read(2)
    remote = place.store.path(place.paths[4])
    assert caught.value.path == remote and caught.value.row == 2 and remote in str(caught.value)
    assert not supply.damaged(4), "it was fetched again already"
    read(supply, 3)
    assert total(supply)["shards_fetched"] == ANSWERS + 1
    supply.close()


def test_a_shard_that_is_no_arrow_file_is_named(place: Place) -> None:
    place.store.publish_bytes(place.paths[4], b"x" * 100)
    supply = place.supply()
    for _ in range(2):
        with pytest.raises(DamageError, match="not a whole Arrow file") as caught:
            supply.open(4)
        assert caught.value.path == place.store.path(place.paths[4])
    assert total(supply)["shards_fetched"] == ANSWERS
    supply.close()


def test_a_damaged_copy_that_another_process_replaced_stays(place: Place) -> None:
    one, other = place.supply(), place.supply()
    for supply in (one, other):
        read(supply, 0)
    (path,) = place.copies()
    place.damage(path)
    assert one.damaged(0)
    read(one, 0)
    fresh = path.stat().st_ino
    assert other.damaged(0)
    read(other, 0)
    assert path.stat().st_ino == fresh and total(other)["shards_fetched"] == 0
    one.close()
    other.close()


def test_a_disk_that_takes_no_more_is_named(place: Place) -> None:
    def fetch() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        supply = place.supply(threads=1)
        with pytest.raises(StoreError, match="a file may not grow larger") as caught:
            supply.open(1)
        assert caught.value.path.startswith(str(place.folder))
        assert place.copies() == []

    assert in_child(fetch) == 0
