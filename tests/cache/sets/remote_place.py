"""Shards of a remote store, and a window of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache.sets.window import Ranks, Section, Window
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.store import Store

ROWS, ROW_BYTES = 4, 4000
COUNT = 10


class Place:
    """A store with COUNT shards of ROWS rows; row r of shard s holds `content(s, r)`."""

    def __init__(self, store: Store, folder: Path, form: str = "arrow") -> None:
        self.store, self.folder = store, folder
        self.paths = []
        for number in range(COUNT):
            meta = ShardMeta("latents", "f" * 24, f"u{number}", "")
            with open_writer(store, f"latents/{'f' * 24}/u{number}", meta, {"latent": "uint8"}, form) as out:
                for row in range(ROWS):
                    out.add(ShardRow(f"r{row}", {"latent": Array("uint8", (ROW_BYTES,), content(number, row))}))
                self.paths.append(out.finish())

    def window(
        self, sections: Sequence[Sequence[int]] = (), limit: int = COUNT, downloads: int = 3, **ranks: Any
    ) -> Window:
        """A window whose sections have one step each. limit: in shards."""

        def list_sections(first: int) -> Iterator[Any]:
            for step in range(first, len(sections)):
                yield Section(range(step, step + 1), tuple(sections[step]))

        window = Window(self.store, self.paths, list_sections, self.folder, 0, downloads, Ranks(**ranks))
        window._limit = limit * max(window.sizes)
        return window

    def copies(self) -> list[Path]:
        """The shards in the windows of all runs, without descriptions."""
        return sorted(path for path in self.folder.glob("*/latents/*/*") if path.suffix in (".arrow", ".tar"))

    def damage(self, path: Path, row: int = 2) -> None:
        """Change a byte of a row of a copy."""
        shard_bytes = bytearray(path.read_bytes())
        at = next(
            shard_bytes.find(content(each, row)) for each in range(COUNT) if shard_bytes.find(content(each, row)) >= 0
        )
        shard_bytes[at + 5] ^= 255
        path.write_bytes(shard_bytes)


def content(number: int, row: int) -> bytes:
    return np.random.default_rng([number, row]).bytes(ROW_BYTES)


def read(window: Window, number: int) -> None:
    with window.open(number) as shard:
        assert [shard.read(row).tensors["latent"].raw() for row in range(ROWS)] == [
            content(number, row) for row in range(ROWS)
        ]
