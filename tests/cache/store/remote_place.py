"""Shards of a remote store, of which tests keep copies."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.store import Store
from cache.supply.fetched_shards import FetchedShards
from cache.supply.limited_folder import LimitedFolder
from cache.supply.remote_shards import ShardCopies, list_shards

ROWS, ROW_BYTES = 4, 4000
COUNT = 10


class Place:
    """A store with COUNT shards of ROWS rows; row r of shard s holds s + r."""

    def __init__(self, store: Store, folder: Path, form: str = "arrow") -> None:
        self.store, self.folder = store, folder
        self.paths = []
        for number in range(COUNT):
            meta = ShardMeta("latents", "f" * 24, f"u{number}", "")
            with open_writer(store, f"latents/{'f' * 24}/u{number}", meta, {"latent": "uint8"}, form) as out:
                for row in range(ROWS):
                    out.add(ShardRow(f"r{row}", {"latent": Array("uint8", (ROW_BYTES,), content(number, row))}))
                self.paths.append(out.finish())
        self.sizes = [shard.bytes for shard in list_shards(store, self.paths)]

    def supply(self, limit: int | None = None, threads: int = 3) -> FetchedShards:
        """limit: in shards; default: all."""
        folder = LimitedFolder(self.folder, sum(self.sizes) if limit is None else limit * max(self.sizes))
        return FetchedShards(ShardCopies(self.store, self.paths, folder), threads)

    def copies(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*") if path.is_file() and not path.name.startswith("."))

    def damage(self, path: Path, row: int = 2, number: int | None = None) -> None:
        """Change a byte of a row of a copy."""
        whole = bytearray(path.read_bytes())
        at = next(whole.find(content(each, row)) for each in range(COUNT) if whole.find(content(each, row)) >= 0)
        whole[at + 5] ^= 255
        path.write_bytes(whole)


def content(number: int, row: int) -> bytes:
    return np.random.default_rng([number, row]).bytes(ROW_BYTES)


def read(supply: FetchedShards, number: int) -> None:
    with supply.open(number) as shard:
        assert [shard.read(row).tensors["latent"].raw() for row in range(ROWS)] == [
            content(number, row) for row in range(ROWS)
        ]


def total(supply: FetchedShards) -> dict[str, float]:
    """Metrics, added up over several calls."""
    found = supply.metrics()
    kept = supply.__dict__.setdefault("kept", dict.fromkeys(found, 0.0))
    for name, value in found.items():
        kept[name] += value
    return kept


def sizes(place: Place) -> Iterator[int]:
    for path in place.folder.glob("*"):
        try:
            yield path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            yield 0
