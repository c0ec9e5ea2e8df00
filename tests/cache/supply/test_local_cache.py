"""train.local_cache: its defaults, and what is computed of the plan before a model is loaded."""

import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache.sets.exported_set import ExportedSet
from cache.sets.exporter import Exporter
from cache.sets.importer import Importer
from cache.shards.shard_supply import SupplyError
from cache.store.files import StoreError
from cache.store.store import Store
from cache.supply.local_cache import cache_folder, cache_limit, supply_whole_set
from schemas.config.training import LocalCache
from tests.cache.sets.exports import export, files, import_, make_source, opened
from tests.cache.sets.test_trainset import embeds, entry, latent, publish, shard

GB = 10**9
MADE_BY = {"template": "image", "fingerprints": dict.fromkeys(("text", "latents"), "f" * 24), "provenance": {}}


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(LocalCache()) == tmp_path / ".cache/latentpress/shards"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(LocalCache()) == Path("/elsewhere/latentpress/shards")
    assert cache_folder(LocalCache(folder="~/copies")) == tmp_path / "copies"


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


def make_long_source(store: Store) -> Store:
    """32 samples in 8 shards, each with a caption in one of 4 shards, both in the order of the index."""
    latents = [
        shard(store, "latents", f"l{n}", {f"s{n * 4 + i:02d}": latent(n) for i in range(4)}, "arrow") for n in range(8)
    ]
    texts = [shard(store, "text", f"t{n}", {f"t{n * 8 + i}": embeds(n) for i in range(8)}, "arrow") for n in range(4)]
    index = [entry(f"s{i:02d}", "32x32", (4 + i // 4, i % 4), [i]) for i in range(32)]
    rows = [(f"t{i}", i // 8, i % 8) for i in range(32)]
    publish(store, [(rel, rel.partition("/")[0]) for rel in (*texts, *latents)], rows, index, null_text=None, **MADE_BY)
    return store


def list_sizes(folder: Path) -> dict[str, int]:
    """Of the copies that were there at one moment: others are fetched and removed while they are listed."""
    found: list[dict[str, int]] = []
    while len(found) < 2 or found[-1] != found[-2]:
        with suppress(FileNotFoundError):  # one was renamed or removed since it was listed
            found.append({path.name: path.stat().st_size for path in folder.glob("*.arrow*")})
    return found[-1]


@pytest.mark.parametrize("room", [1.0, 0.5])
def test_an_export_reads_whole_shards(tmp_path: Path, room: float) -> None:
    """The same bytes as without copies, whether all of these fit or not. What the target has is not fetched."""
    source, written, fetched = make_long_source(Store(f"memory://{tmp_path.name}")), {}, []
    sizes = [entry.size for top in ("latents", "text") for entry in source.list_files(top)]
    copies = LocalCache(folder=str(tmp_path / "copied"), max_gb=room * sum(sizes) / GB)
    most = 0
    for name in ("plain", "copies", "copies"):
        data, target = opened(source), Store(tmp_path / name)
        exporter = Exporter(data, target, "arrow", 0.005, False)
        if name == "copies":
            supply_whole_set(copies, data, exporter.needs)
        for part in exporter.missing_shards:
            exporter.write(part)
            most = max(most, sum(list_sizes(tmp_path / "copied").values()))
        fetched.append(data.supply.metrics().get("shards_fetched"))
        data.close()
        written[name] = {path: target.read_bytes(f"samples/{path}") for path in target.list_names("samples")}
    assert written["plain"] == written["copies"] and len(written["plain"]) > 1
    assert fetched == [None, len(sizes), 0] and 0 < most <= room * sum(sizes)


def test_an_export_for_which_the_copies_have_too_little_room_is_refused(tmp_path: Path) -> None:
    data = opened(make_source(Store(f"memory://{tmp_path.name}"), "arrow"))
    exporter, copies = Exporter(data, Store(tmp_path / "x"), "arrow", 0.01, False), tmp_path / "copied"
    with pytest.raises(SupplyError, match="the shards of a row and one more have up to") as caught:
        supply_whole_set(LocalCache(folder=str(copies), max_gb=1e-6), data, exporter.needs)
    assert "train.local_cache.max_gb to" in caught.value.next_step
    with pytest.raises(SupplyError, match=r"may have 0 "):
        supply_whole_set(LocalCache(folder=str(copies)), data, exporter.needs, 1 << 60)


def test_an_import_reads_each_shard_of_the_export_once(tmp_path: Path) -> None:
    far = Store(f"memory://{tmp_path.name}")
    export(make_source(Store(tmp_path / "source"), "arrow"), far)
    data = opened(far)
    assert isinstance(data, ExportedSet)
    importer = Importer(data, Store(tmp_path / "back"), "arrow")
    supply_whole_set(LocalCache(folder=str(tmp_path / "copied")), data, importer.needs)
    for part in importer.shards:
        importer.write(part)
    assert data.supply.metrics()["shards_fetched"] == len(importer.shards) > 1
    importer.publish(importer.write_prompts())
    data.close()
    import_(far, Store(tmp_path / "plain"))
    back, plain = files(Store(tmp_path / "back")), files(Store(tmp_path / "plain"))
    assert back == plain
