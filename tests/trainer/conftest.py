"""Training sets without the stages: real shards and tables around synthetic latents, and tiny transformers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache import set_lookup
from cache.compatibility import bucket_side_multiple
from cache.shard import ShardMeta, ShardRow
from cache.shard_io import open_writer
from cache.store import Store
from cache.tensors import Array
from schemas.catalogue import FAMILIES
from schemas.config.pipeline import Config
from schemas.recipe import build_recipe
from schemas.tables import INDEX_SCHEMA, SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA, TABLES_VERSION

Tensors = dict[str, np.ndarray]


@dataclass
class Item:
    """One sample to write. latent, condition: (C, T, h, w). texts: alternatives, each embeds and perhaps pooled."""

    bucket: str
    latent: np.ndarray
    texts: list[Tensors]
    condition: np.ndarray | None = None
    repeats: int = 0
    weight: float = 1.0
    role: str = "train"
    regularisation: bool = False
    mask: np.ndarray | None = None  # (T, h, w)

    @property
    def place(self) -> tuple:
        """Where it stands in the index: trained on before held out, then by bucket, repeats and weight."""
        return self.role != "train", self.bucket, self.repeats, self.weight


@dataclass
class Prompt:
    """A validation prompt to write."""

    name: str
    bucket: str
    text: Tensors
    condition: np.ndarray | None = None


@dataclass
class SetWriter:
    """Writes text and latent shards, two of each, and the set's tables over them."""

    store: Store
    form: str
    dtype: str = "float32"
    shards: list[dict] = field(default_factory=list)

    def array(self, value: np.ndarray) -> Array:
        if self.dtype == "float32":
            return Array.from_numpy(value.astype(np.float32))
        bits = torch.from_numpy(value.astype(np.float32)).bfloat16().view(torch.uint16)
        return Array.from_numpy(bits.numpy(), "bfloat16")

    def shard(self, kind: str, rows: Sequence[tuple[str, Tensors]]) -> list[tuple[int, int]]:
        """Write two shards with every other row each; (shard, row) of each given row."""
        places = {}
        for half in (0, 1):
            unit = f"{kind}-{len(self.shards)}"
            meta = ShardMeta(kind, "f" * 24, unit, "")
            columns = {name: self.dtype for _, tensors in rows for name in tensors}
            with open_writer(self.store, f"{kind}/{'f' * 24}/{unit}", meta, columns, self.form) as out:
                for number, (id, tensors) in enumerate(rows[half::2]):
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
) -> Path:
    """Write a whole training set under `root` and make it the current one. Text 0 is the null prompt. ids: what the ids
    of samples and texts begin with."""
    out, items = SetWriter(Store(root), form, dtype), sorted(items, key=lambda item: item.place)
    texts = [null, *(text for item in items for text in item.texts), *(prompt.text for prompt in prompts)]
    text_places = out.shard("text", [(f"{ids}-text{i}", text) for i, text in enumerate(texts)])
    latents = [{"latent": item.latent} for item in items]
    for row, item in zip(latents, items, strict=True):
        row |= {} if item.condition is None else {"condition": item.condition}
        row |= {} if item.mask is None else {"mask": item.mask}
    latents += [{"latent": prompt.condition} for prompt in prompts if prompt.condition is not None]
    places = out.shard("latents", [(f"{ids}-sample{i}", row) for i, row in enumerate(latents)])
    index, first = [], 1
    for number, item in enumerate(items):
        entry = {"sample_id": f"{ids}-sample{number}", "dataset": "made", "bucket": item.bucket}
        entry |= dict(zip(("shard", "row"), places[number], strict=True))
        entry |= {"repeats": item.repeats, "weight": item.weight, "role": item.role}
        entry |= {"regularisation": item.regularisation, "null_text": None}
        entry["texts"] = list(range(first, first + len(item.texts)))
        index.append(entry)
        first += len(item.texts)
    conditions = iter(places[len(items) :])
    validation: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        given = None if prompt.condition is None else dict(zip(("shard", "row"), next(conditions), strict=True))
        entry = {"name": prompt.name, "prompt": prompt.name, "negative_prompt": "", "bucket": prompt.bucket}
        validation.append(entry | {"text": first + number, "negative": 0, "condition": given})
    text_rows = [
        {"text_id": f"{ids}-text{i}", "shard": place[0], "row": place[1]} for i, place in enumerate(text_places)
    ]
    tables = (
        ("shards", SET_SHARDS_SCHEMA, out.shards),
        ("texts", SET_TEXTS_SCHEMA, text_rows),
        ("index", INDEX_SCHEMA, index),
    )
    for table, schema, rows in tables:
        out.store.write_table(f"sets/{name}/{table}.arrow", pa.Table.from_pylist(list(rows), schema))
    family, task = config.model.family, config.model.task
    meta = {"format_version": TABLES_VERSION, "id": name, "family": family, "task": task, "null_text": 0}
    meta |= {"flavour": config.model.flavour_spec.name, "template": "made", "generation": "none"}
    meta |= {"validation": validation, "counts": {"samples": len(items), "texts": len(texts)}}
    made = build_recipe(config, bucket_side_multiple(config.model))
    weights = {"weights": {"content": "those of encoders that are not here"}}
    meta |= {"recipe": made, "provenance": {kind: made[kind] | weights for kind in ("text", "latents")}}
    out.store.publish_bytes(f"sets/{name}/set.json", json.dumps(meta).encode())
    set_lookup.update_pointers(out.store, meta)
    return root


def caption(rng: np.random.Generator, length: int, pooled: bool = True) -> Tensors:
    """Embeddings of one caption of `length` tokens, at the width of the tiny transformers."""
    text = {"embeds": rng.normal(size=(length, 64)).astype(np.float32)}
    return text | ({"pooled": rng.normal(size=32).astype(np.float32)} if pooled else {})


KINDS = {
    "t2i": ("kandinsky5-image", "t2i-lite-sft", "kandinsky5-image-t2i"),
    "i2i": ("kandinsky5-image", "i2i-lite-sft", "kandinsky5-image-i2i"),
    "t2v": ("kandinsky5-video", "t2v-lite-sft-5s", "kandinsky5-video-t2v"),
    "i2v": ("kandinsky5-video", "i2v-lite-5s", "kandinsky5-video-i2v"),
    "sana": ("sana", None, "sana"),
}


def latent(rng: np.random.Generator, config: Config, bucket: str) -> np.ndarray:
    """A random latent (C, T, h, w) of a bucket "WxH" or "WxH@F"."""
    spec, (size, _, frames) = config.model.family_spec, bucket.partition("@")
    width, height = (int(side) // spec.spatial_stride for side in size.split("x"))
    length = 1 + (int(frames or 1) - 1) // spec.temporal_stride
    return rng.normal(size=(spec.latent_channels, length, height, width)).astype(np.float32)


def mixed_items(config: Config, count: int = 12, seed: int = 0) -> tuple[list[Item], Tensors, list[Prompt]]:
    """Samples of two buckets, captions of unequal lengths (one or two each), null prompt, one validation prompt."""
    rng, sana, task = np.random.default_rng(seed), config.model.family == "sana", config.model.task
    buckets = {"t2v": ("64x64@5", "96x64@5"), "i2v": ("64x64@5", "96x64@5")}.get(task, ("64x64", "96x64"))
    items = []
    for number in range(count):
        x0 = latent(rng, config, buckets[number % 3 == 2])
        texts = [caption(rng, int(rng.integers(2, 9)), not sana) for _ in range(1 + number % 2)]
        condition = {"i2v": x0[:, :1], "i2i": rng.normal(size=x0.shape).astype(np.float32)}.get(task)
        items.append(Item(buckets[number % 3 == 2], x0, texts, condition))
    shown = {"i2v": items[0].latent[:, :1], "i2i": items[0].latent}.get(task)
    return items, caption(rng, 2, not sana), [Prompt("one", buckets[0], caption(rng, 5, not sana), shown)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> folder with a tiny transformer and scheduler in diffusers layout, built once."""
    from examples.tiny_models import build

    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            out = tmp_path_factory.mktemp("models") / kind
            made[kind] = build(KINDS[kind][2], out, only=["transformer", "scheduler"])
        return made[kind]

    return get


@pytest.fixture
def make_config(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Callable[..., Config]:
    """make_config(kind, **train settings): a configuration with root and output under tmp_path, on a CPU."""

    def make(kind: str = "t2i", *, name: str = "work", validation: dict | None = None, **train: Any) -> Config:
        family, flavour, _ = KINDS[kind]
        assert family in FAMILIES
        optimizer = {"lr": 2e-3, "warmup": 2}  # so that a few steps change the loss
        fixed = {"device": "cpu", "steps": 4, "checkpoint_every": 1000, "threads": 1, "optimizer": optimizer}
        train = {**fixed, **train}
        video = {"dataset_type": "video"} if kind in ("t2v", "i2v") else {}
        dataset = {"id": "made", "instance_data_dir": "none", **video}
        if kind == "i2i":
            dataset["conditioning_data"] = "none"
        return Config.model_validate(
            {
                "root": str(tmp_path / name / "root"),
                "output": str(tmp_path / name / "output"),
                "model": {
                    "family": family,
                    "flavour": flavour,
                    "path": str(checkpoints(kind)),
                    "precision": "float32",
                },
                "datasets": [dataset],
                "train": train,
                "validation": {"eval_samples": 0, "every": 1000, "steps": 2, **(validation or {})},
            }
        )

    return make


@pytest.fixture
def make_set() -> Callable[..., Path]:
    """make_set(config, items, null, prompts, form=, dtype=, name=): writes the set into config.root."""

    def make(config: Config, *args: Any, **options: Any) -> Path:
        return write_set(Path(config.root), config, *(args or mixed_items(config)), **options)

    return make


@pytest.fixture
def made() -> Any:
    """The classes and helpers above, for tests that make their own samples."""
    from types import SimpleNamespace

    return SimpleNamespace(Item=Item, Prompt=Prompt, caption=caption, latent=latent, mixed_items=mixed_items)
