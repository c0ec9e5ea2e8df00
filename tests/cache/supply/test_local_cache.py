"""train.local_cache: its defaults, and what is computed of the plan before a model is loaded."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache.shards.shard_supply import SupplyError
from cache.store.files import StoreError
from cache.supply.local_cache import cache_folder, cache_limit
from schemas.config.training import LocalCache

GB = 10**9


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(LocalCache()) == tmp_path / ".cache/latentpress/shards"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(LocalCache()) == Path("/elsewhere/latentpress/shards")
    assert cache_folder(LocalCache(folder="/copies")) == Path("/copies")


def test_no_test_writes_to_the_folder_of_the_user(cache_home: Path) -> None:
    assert cache_folder(LocalCache()) == cache_home / "latentpress/shards"
    assert not cache_home.is_relative_to(Path.home() / ".cache")


def test_the_limit_is_within_what_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the folder has already counts as free."""
    folder = tmp_path / "new" / "copies"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=50 * GB))
    assert cache_limit(LocalCache(), folder) == 25 * GB and not folder.exists()
    assert cache_limit(LocalCache(max_gb=50.0), folder) == 50 * GB
    with pytest.raises(SupplyError, match=r"is 50\.1, and the disk of .* has room for 50") as caught:
        cache_limit(LocalCache(max_gb=50.1), folder)
    assert "train.local_cache.folder" in caught.value.next_step
    folder.mkdir(parents=True)
    (folder / "copy").write_bytes(bytes(1 << 20))
    assert cache_limit(LocalCache(max_gb=50.0 + 1e-3), folder) == 50_001_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**13))
    assert cache_limit(LocalCache(), folder) == 200 * GB
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="can't be a folder"):
        cache_limit(LocalCache(), tmp_path / "file" / "copies")
