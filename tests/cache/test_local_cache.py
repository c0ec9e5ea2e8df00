"""train.local_cache: its defaults, and what is computed of the plan before a model is loaded."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cache.exporter import Exporter
from cache.files import StoreError
from cache.local_cache import (
    cache_folder,
    cache_limit,
    explain_order,
    fitting_shards,
    largest_window,
    mean_bytes,
    supply_whole_set,
)
from cache.remote_shards import LocalCacheError
from cache.store import Store
from schemas.config.training import LocalCache
from tests.cache.exports import make_source, opened

GB = 10**9


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(LocalCache()) == tmp_path / ".cache/latentpress/shards"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(LocalCache()) == Path("/elsewhere/latentpress/shards")
    assert cache_folder(LocalCache(folder="~/copies")) == tmp_path / "copies"


def test_the_limit_is_within_what_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the folder has already counts as free."""
    folder = tmp_path / "new" / "copies"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=50 * GB))
    assert cache_limit(LocalCache(), folder) == 25 * GB and not folder.exists()
    assert cache_limit(LocalCache(max_gb=50.0), folder) == 50 * GB
    with pytest.raises(LocalCacheError, match=r"is 50\.1, and the disk of .* has room for 50") as caught:
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


@pytest.mark.parametrize("fits", [True, False])
def test_an_export_reads_whole_shards_where_they_fit(tmp_path: Path, fits: bool) -> None:
    """The same bytes as without copies. What the target has already is not fetched."""
    source, written, fetched = make_source(Store(f"memory://{tmp_path.name}"), "arrow"), {}, []
    copies = LocalCache(folder=str(tmp_path / "copied"), max_gb=1.0 if fits else 1e-6)
    for name in ("plain", "copies", "copies"):
        data, target = opened(source), Store(tmp_path / name)
        exporter = Exporter(data, target, "arrow", 0.01, False)
        if name == "copies":
            supply_whole_set(copies, data, exporter.needs(), 0)
        for shard in exporter.missing_shards:
            exporter.write(shard)
        fetched.append(data.supply.metrics().get("shards_fetched"))
        data.close()
        written[name] = {path: target.read_bytes(f"samples/{path}") for path in target.list_names("samples")}
    assert written["plain"] == written["copies"] and len(written["plain"]) > 1
    assert fetched == ([None, len(data.tables["shards"]), 0] if fits else [None] * 3)


def test_what_the_plan_needs() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, 20).tolist()
    needs = [{*rng.integers(0, 20, 5).tolist()} for _ in range(30)]
    windows = [needs[first] | needs[first + 1] | needs[first + 2] for first in range(28)]
    assert largest_window(needs, sizes, 3) == max(sum(sizes[i] for i in one) for one in windows) + max(sizes)
    assert largest_window([{3}], sizes, 3) == sizes[3] + max(sizes) and largest_window([], sizes, 3) == max(sizes)
    assert mean_bytes(needs, sizes) == pytest.approx(np.mean([sum(sizes[i] for i in one) for one in needs]))
    assert mean_bytes([], sizes) == 0


def test_the_order_that_fits() -> None:
    """A set of 100 shards of latents and 200 of texts, 1 GB each, of which a step of 8 samples needs 16: 5 in 6 are not
    there in an order over the whole set. With a shard of latents come 2 of texts and part of another, 4 GB together."""
    sizes = [GB] * 300
    assert fitting_shards(50 * GB, sizes, 100) == 11 and fitting_shards(2 * GB, sizes, 100) == 2
    said = explain_order("s", 50 * GB, 300 * GB, 16 * GB, 11)
    assert "have 300 GB, and train.local_cache.max_gb is 50" in said
    assert (
        "about 13,333 MB a step, or 13,333 MB/s" in said and "train.shuffle_shards: 11, or raise max_gb to 300" in said
    )
