"""Training sets without the stages: real shards and tables with random latents and text embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from cache.models.compatibility import bucket_side_multiple
from cache.sets import set_lookup
from cache.sets.table_checks import SetRecord
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.family import REFERENCE_PARTS
from schemas.geometry import Bucket
from schemas.recipe import build_recipe
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA, TABLES_VERSION, index_schema

Tensors = dict[str, np.ndarray]


@dataclass
class Item:
    """A sample to write. latent, condition: (C, T, h, w). texts: alternative texts, each with "embeds" and optionally
    "pooled". references: (C, 1, h, w) each, with the sizes of the bucket."""

    bucket: str
    latent: np.ndarray
    texts: list[Tensors]
    condition: np.ndarray | None = None
    repeats: int = 0
    weight: float = 1.0
    role: str = "train"
    regularization: bool = False
    mask: np.ndarray | None = None  # (T, h, w)
    vision: np.ndarray | None = None  # (T, rows, columns, C)
    references: Sequence[np.ndarray] = ()

    @property
    def place(self) -> tuple:
        """Sort key in the index: training samples before held-out samples, then bucket, repeats and weight."""
        return self.role != "train", self.bucket, self.repeats, self.weight


@dataclass
class Prompt:
    """A validation prompt to write."""

    name: str
    bucket: str
    text: Tensors
    condition: np.ndarray | None = None
    references: Sequence[np.ndarray] = ()


@dataclass
class SetWriter:
    """Writes text and latent shards, `parts` of each kind, and the tables of the set."""

    store: Store
    form: str
    dtype: str = "float32"
    parts: int = 2
    shards: list[dict] = field(default_factory=list)

    def array(self, value: np.ndarray) -> Array:
        if value.dtype == np.int32:
            return Array.from_numpy(value)
        if self.dtype == "float32":
            return Array.from_numpy(value.astype(np.float32))
        bits = torch.from_numpy(value.astype(np.float32)).bfloat16().view(torch.uint16)
        return Array.from_numpy(bits.numpy(), "bfloat16")

    def shard(self, kind: str, rows: Sequence[tuple[str, Tensors]]) -> list[tuple[int, int]]:
        """Write rows to `parts` shards in turn. Returns (shard, row) of each row."""
        places = {}
        for part in range(self.parts):
            unit = f"{kind}-{len(self.shards)}"
            meta = ShardMeta(kind, "f" * 24, unit, "")
            columns = {
                name: "int32" if tensor.dtype == np.int32 else self.dtype
                for _, tensors in rows
                for name, tensor in tensors.items()
            }
            with open_writer(self.store, f"{kind}/{'f' * 24}/{unit}", meta, columns, self.form) as out:
                for number, (id, tensors) in enumerate(rows[part :: self.parts]):
                    out.add(ShardRow(id, {name: self.array(value) for name, value in tensors.items()}))
                    places[id] = (len(self.shards), number)
                self.shards.append({"path": out.finish(), "kind": kind})
        return [places[id] for id, _ in rows]


def write_set(
    root: Path,
    config: Config,
    items: Sequence[Item],
    null: Tensors,
    prompts: Sequence[Prompt] = (),
    *,
    form: str = "arrow",
    dtype: str = "float32",
    name: str = "set1",
    ids: str = "set1",
    parts: int = 2,
) -> Path:
    """Write a complete training set under `root`, and make it the current set. Text 0 is the null prompt. ids: prefix
    of the ids of samples and texts. parts: number of shards of each kind."""
    out, items = SetWriter(Store(root), form, dtype, parts), sorted(items, key=lambda item: item.place)
    texts = [null, *(text for item in items for text in item.texts), *(prompt.text for prompt in prompts)]
    text_places = out.shard("text", [(f"{ids}-text{i}", text) for i, text in enumerate(texts)])
    latents = [{"latent": item.latent} for item in items]
    for row, item in zip(latents, items, strict=True):
        row |= {} if item.condition is None else {"condition": item.condition}
        row |= {} if item.mask is None else {"mask": item.mask}
        row |= {} if item.vision is None else {"vision": item.vision}
    latents += [{"latent": prompt.condition} for prompt in prompts if prompt.condition is not None]
    first_reference, most = len(latents), max(len(item.references) for item in items)
    latents += [{"latent": array} for item in items for array in item.references]
    latents += [{"latent": array} for prompt in prompts for array in prompt.references]
    places = out.shard("latents", [(f"{ids}-sample{i}", row) for i, row in enumerate(latents)])
    references = iter(range(first_reference, len(latents)))
    index, first = [], 1
    for number, item in enumerate(items):
        entry: dict[str, Any] = {"sample_id": f"{ids}-sample{number}", "dataset": "made", "bucket": item.bucket}
        entry |= dict(zip(("shard", "row"), places[number], strict=True))
        entry |= {"repeats": item.repeats, "weight": item.weight, "role": item.role}
        entry |= {"regularization": item.regularization, "null_text": None}
        entry["texts"] = list(range(first, first + len(item.texts)))
        for part, at in zip(REFERENCE_PARTS, [next(references) for _ in item.references], strict=False):
            entry |= {f"{part}_id": f"{ids}-sample{at}", f"{part}_shard": places[at][0], f"{part}_row": places[at][1]}
        index.append(entry)
        first += len(item.texts)
    conditions = iter(places[len(items) :])
    validation: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        condition = None if prompt.condition is None else dict(zip(("shard", "row"), next(conditions), strict=True))
        entry = {"name": prompt.name, "prompt": prompt.name, "negative_prompt": "", "bucket": prompt.bucket}
        if prompt.references:
            numbers = [next(references) for _ in prompt.references]
            entry["references"] = [
                {"id": f"{ids}-sample{at}", "shard": places[at][0], "row": places[at][1]} for at in numbers
            ]
        validation.append(entry | {"text": first + number, "negative": 0, "condition": condition})
    text_rows = [
        {"text_id": f"{ids}-text{i}", "shard": place[0], "row": place[1]} for i, place in enumerate(text_places)
    ]
    tables = (
        ("shards", SET_SHARDS_SCHEMA, out.shards),
        ("texts", SET_TEXTS_SCHEMA, text_rows),
        ("index", index_schema((), most), index),
    )
    for table, schema, rows in tables:
        out.store.write_table(f"sets/{name}/{table}.arrow", pa.Table.from_pylist(list(rows), schema))
    family, task = config.model.family, config.model.task
    meta = {
        "format_version": TABLES_VERSION,
        "id": name,
        "family": family,
        "task": task,
        "null_text": 0,
    }
    meta |= {"flavour": config.model.flavour_spec.name, "template": "made", "generation": "none"}
    meta |= {"validation": validation, "counts": {"samples": len(items), "texts": len(texts)}}
    recipe = build_recipe(config, bucket_side_multiple(config.model))
    weights = {"weights": {"content": "of encoders that do not exist"}}
    meta |= {"recipe": recipe, "provenance": {kind: recipe[kind] | weights for kind in ("text", "latents")}}
    record = SetRecord.model_validate(meta)
    out.store.publish_record(f"sets/{name}/set.json", record)
    set_lookup.update_pointers(out.store, record)
    return root


def latent(rng: np.random.Generator, config: Config, bucket: str) -> np.ndarray:
    """A random latent (C, T, h, w) of a bucket "WxH" or "WxH@F"."""
    spec = config.model.family_spec
    shape = Bucket.parse(bucket).latent_shape(spec.spatial_stride, spec.temporal_stride)
    return rng.normal(size=(spec.latent_channels, *shape)).astype(np.float32)
