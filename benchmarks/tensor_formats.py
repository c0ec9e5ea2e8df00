"""A training set of random tensors, which are also written in other formats, for benchmarks.data_read."""

import gzip
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from benchmarks.common import MIB, write_shard
from cache.sets.table_checks import SetRecord
from cache.sets.trainset import TrainSet
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_reader
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.tables import INDEX_SCHEMA, SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA

SHARDS = 2  # shards of each kind


@dataclass
class Samples:
    """shape: shape of a latent. width: width of a text. bytes: bytes of each sample. places: (file, offset, size) of
    each sample's two tensors."""

    root: Path
    data: TrainSet
    shape: tuple[int, ...]
    width: int
    bucket: str
    batch: int
    bytes: list[int]
    places: list[list[tuple[int, int, int]]]
    files: list[str]

    @cached_property
    def order(self) -> list[int]:
        """A random order, the same for all ways."""
        return random.Random(0).sample(range(len(self)), len(self))

    def batches(self, order: Sequence[int]) -> list[Sequence[int]]:
        return [order[first : first + self.batch] for first in range(0, len(order), self.batch)]

    @cached_property
    def padding(self) -> list[int]:
        """Bytes of padding after each sample's text, in micro-batches of `order`."""
        padding = [0] * len(self)
        for numbers in self.batches(self.order):
            sizes = {number: self.places[number][1][2] for number in numbers}
            for number, size in sizes.items():
                padding[number] = max(sizes.values()) - size
        return padding

    def __len__(self) -> int:
        return len(self.bytes)


def make_samples(root: Path, shape: tuple[int, ...], bucket: str, batch: int, mib: int, tiny: bool) -> Samples:
    """Make a set of about `mib` MiB, written in every format."""
    rng, width = np.random.default_rng(0), 64 if tiny else 3584
    size, least = 2 * int(np.prod(shape)) + 135 * 2 * width, batch * SHARDS
    count = max(least, mib * MIB // size // least * least)
    lengths = rng.integers(20, 251, count).tolist()
    latents = [ShardRow(f"s{i:031x}", {"latent": normal(shape, rng)}) for i in range(count)]
    texts = [ShardRow(f"t{i:031x}", {"embeds": normal((n, width), rng)}) for i, n in enumerate(lengths)]
    store, rels = Store(root), list[str]()
    tables: dict[str, list[tuple]] = {"shards": [], "texts": [], "index": []}
    for kind, rows in (("latents", latents), ("text", texts)):
        for unit in range(SHARDS):
            meta = ShardMeta(kind, "f" * 24, f"u{unit}", bucket if kind == "latents" else "")
            for form in ("arrow", "webdataset"):
                place = store if form == "arrow" else Store(root / "tars")
                rel = write_shard(place, meta, rows[unit * count // SHARDS : (unit + 1) * count // SHARDS], form)
                rels += [rel] if form == "arrow" else []
            tables["shards"].append((rels[-1], kind))
    per = count // SHARDS
    for i in range(count):
        tables["texts"].append((texts[i].id, SHARDS + i // per, i % per))
        marks = ("train", "d", bucket, 0, 1.0, False)
        tables["index"].append((latents[i].id, *marks, i // per, i % per, [i], None))
    for name, schema in (("shards", SET_SHARDS_SCHEMA), ("texts", SET_TEXTS_SCHEMA), ("index", INDEX_SCHEMA)):
        rows = [dict(zip(schema.names, row, strict=True)) for row in tables[name]]
        store.write_table(f"sets/s/{name}.arrow", pa.Table.from_pylist(rows, schema))
    family = ("kandinsky5-image", "t2i") if batch > 1 else ("kandinsky5-video", "t2v")
    record = SetRecord(id="s", family=family[0], task=family[1], null_text=None, validation=[])
    data = TrainSet(store, "s", record)
    write_single_files(root, latents, texts)
    places, files = find_places(store, rels, per)
    sizes = [sum(place[2] for place in each) for each in places]
    return Samples(root, data, shape, width, bucket, batch, sizes, places, files)


def normal(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    values = torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16()
    return Array.from_numpy(values.view(torch.uint16).numpy(), "bfloat16")


def find_places(store: Store, rels: Sequence[str], per: int) -> tuple[list[list[tuple[int, int, int]]], list[str]]:
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(per * SHARDS)]
    for number, rel in enumerate(rels):
        with open_reader(store, rel) as reader:
            reader.file.seek(0)
            base = reader.file.read_buffer().address
            for row in range(len(reader)):
                (array,) = reader.read(row, verify=False).tensors.values()
                offset = np.frombuffer(array.data, np.uint8).ctypes.data - base
                places[number % SHARDS * per + row].append((number, offset, array.nbytes))
    return places, [store.path(rel) for rel in rels]


def write_single_files(root: Path, latents: Sequence[ShardRow], texts: Sequence[ShardRow]) -> None:
    """Write a safetensors file for each tensor and, for a few tensors, the output of torch.save, compressed by gzip."""
    from safetensors.torch import save_file

    (root / "single").mkdir()
    for number, rows in enumerate(zip(latents, texts, strict=True)):
        for row in rows:
            ((name, array),) = row.tensors.items()
            tensor = torch.from_numpy(array.numpy().copy()).view(torch.bfloat16)
            save_file({name: tensor}, root / "single" / f"{number}.{name}.safetensors")
            if number < 16:
                buffer = io.BytesIO()
                torch.save(tensor, buffer)
                with gzip.open(root / "single" / f"{number}.{name}.pt.gz", "wb", compresslevel=6) as file:
                    file.write(buffer.getvalue())
