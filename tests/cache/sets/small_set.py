"""A small training set, and everything that can be read of it."""

from typing import Any

import numpy as np
import pyarrow as pa

from cache.sets.set_lookup import open_set
from cache.sets.table_checks import SetPointer, SetRecord
from cache.sets.trainset import TrainSet
from cache.shards.shard import ShardMeta, ShardRow, canonical_json, row_checksum
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.tables import (
    INDEX_SCHEMA,
    SET_SHARDS_SCHEMA,
    SET_TEXTS_SCHEMA,
    index_schema,
)

FAMILY, TASK = "kandinsky5-image", "t2i"
FORMS = ["arrow", "webdataset"]
ROLES, DATASETS = ("train", "eval"), ("d", "e")


def name_of(kind: str, number: int) -> str:
    return f"{kind}{number:031x}"


def bfloat(rng: np.random.Generator, *shape: int) -> Array:
    return Array.from_numpy(rng.integers(0, 2**16, shape, dtype=np.uint16), "bfloat16")


def make_shard(store: Store, kind: str, unit: str, rows: list[ShardRow], form: str) -> str:
    columns = {name: array.dtype for row in rows for name, array in row.tensors.items()}
    provenance = {"libraries": {"torch": "2.13.0"}, "device": "cpu", "batch": len(rows)}
    meta = ShardMeta(kind, "f" * 24, unit, "", provenance=provenance)
    with open_writer(store, f"{kind}/{'f' * 24}/{unit}", meta, columns, form) as out:
        for row in rows:
            out.add(row)
        return out.finish()


def publish(store: Store, tables: dict[str, pa.Table], meta: dict[str, Any]) -> None:
    for key, table in tables.items():
        store.write_table(f"sets/{meta['id']}/{key}.arrow", table)
    store.publish_record(f"sets/{meta['id']}/set.json", SetRecord.model_validate(meta))
    store.publish_record(f"sets/current-{FAMILY}-{TASK}.json", SetPointer(id=meta["id"]))


def make_source(store: Store, form: str) -> Store:
    """Samples 0-8 of two buckets and roles, two of them of one id; texts 0-11, some shared; text 0 is the null prompt,
    sample 3 has one of its own; two validation prompts, of which one has an image."""
    rng = np.random.default_rng(0)
    texts = [
        ShardRow(
            name_of("a", i), {"embeds": bfloat(rng, i % 5, 8), "pooled": bfloat(rng, 4)}, {"tokens": i % 5, "ü": "é\n"}
        )
        for i in range(12)
    ]
    latents = [
        ShardRow(name_of("b", i), {"latent": bfloat(rng, 4, 1, 4, 4 + 2 * (i % 2))}, {"number": i / 3})
        for i in range(9)
    ]
    latents[2].tensors["condition"] = bfloat(rng, 4, 1, 1, 1)
    paths = [
        make_shard(store, "latents", "l0", latents[::2], form),
        make_shard(store, "latents", "l1", latents[1::2], form),
        make_shard(store, "text", "t0", texts[:7], form),
        make_shard(store, "text", "t1", texts[7:], form),
    ]
    rows = []
    for i in [*range(8), 1]:
        rows.append(
            {
                **{"sample_id": name_of("b", i), "role": ROLES[i > 5], "dataset": DATASETS[len(rows) == 8]},
                **{"bucket": ("32x32", "48x32")[i % 2], "repeats": 0, "weight": 1.5, "regularization": i == 4},
                **{"shard": i % 2, "row": i // 2, "texts": [1 + i, *([2] if i % 3 == 0 else [])]},
                "null_text": 9 if i == 3 else None,
            }
        )
    rows.sort(key=lambda row: (row["role"] != "train", row["bucket"], row["dataset"], row["sample_id"]))
    prompts = [
        {"name": "one", "prompt": "a cat", "negative_prompt": "", "bucket": "32x32", "text": 10, "negative": 0},
        {"name": "two", "prompt": "a dog", "negative_prompt": "", "bucket": "32x32", "text": 10, "negative": 11},
    ]
    prompts[0]["condition"], prompts[1]["condition"] = None, {"shard": 0, "row": 4}
    kinds = ["latents", "latents", "text", "text"]
    tables = {
        "index": pa.Table.from_pylist(rows, INDEX_SCHEMA),
        "texts": pa.Table.from_pylist(
            [{"text_id": row.id, "shard": 2 + (i > 6), "row": i % 7} for i, row in enumerate(texts)], SET_TEXTS_SCHEMA
        ),
        "shards": pa.Table.from_pylist(
            [{"path": p, "kind": k} for p, k in zip(paths, kinds, strict=True)], SET_SHARDS_SCHEMA
        ),
    }
    meta = {"id": "0123456789abcdef", "family": FAMILY, "flavour": "t2i-lite-sft"}
    meta |= {"task": TASK, "template": "image", "generation": "000001-a", "null_text": 0, "validation": prompts}
    meta |= {"fingerprints": {"text": "f" * 24, "latents": "f" * 24}, "provenance": {"text": {"a": 1}, "latents": {}}}
    publish(store, tables, meta)
    return store


def add_vision(store: Store, form: str) -> None:
    """Features of every sample, in a separate shard, in another order than the order of the index."""
    data, rng = opened(store), np.random.default_rng(1)
    index, folder = data.tables["index"], f"sets/{data.id}"
    ids = sorted(set(index.column("sample_id").to_pylist()), reverse=True)
    rows = [ShardRow(id, {"vision": bfloat(rng, 1, 2, 2, 3)}, {"number": i}) for i, id in enumerate(ids)]
    shards = [
        *data.tables["shards"].to_pylist(),
        {"path": make_shard(store, "vision", "v0", rows, form), "kind": "vision"},
    ]
    places = [{"vision_shard": 4, "vision_row": ids.index(row["sample_id"])} for row in index.to_pylist()]
    found = [row | place for row, place in zip(index.to_pylist(), places, strict=True)]
    store.write_table(f"{folder}/index.arrow", pa.Table.from_pylist(found, index_schema(["vision"])))
    store.write_table(f"{folder}/shards.arrow", pa.Table.from_pylist(shards, SET_SHARDS_SCHEMA))


def opened(store: Store) -> TrainSet:
    return open_set(store, "current", FAMILY, TASK)


def content(store: Store) -> list[Any]:
    """Everything that a trainer gets out of a set, and every row that it is made of."""
    data = opened(store)
    index = (
        data.tables["index"].select([name for name in INDEX_SCHEMA.names if name not in ("shard", "row")]).to_pylist()
    )
    samples = []
    for row, entry in enumerate(index):
        samples += [data.sample(row, f"text{caption}") for caption in range(len(entry["texts"]))]
        samples.append(data.sample(row, "null"))
    parts = [data.part_rows(row) for row in range(len(index))]
    parts += [data.prompt_rows(number) for number in range(2)]
    sums = [
        {name: (row.id, row_checksum(row.id, canonical_json(row.info), row.tensors)) for name, row in p.items()}
        for p in parts
    ]
    eval_rows, choice = list(data.eval_rows), data.choose_eval_rows(2)
    return [data.id, index, data.spans, samples, parts, sums, data.validation, eval_rows, choice, data.regularization]
