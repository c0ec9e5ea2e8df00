"""Writes a training set as an export, which `cache/exported_set.py` reads and `cache/importer.py` turns back.

How rows are divided into shards is a function of the set and the options, so a shard that is there and whole is not
made again; `sets/<id>/set.json`, without which there is no set, is written last.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache import plans, set_pointers, shard_io
from cache.damage import DamageError
from cache.exported_set import (
    EXPORT_VERSION,
    PROMPTS_KIND,
    SAMPLES_KIND,
    collect_columns,
    collect_provenance,
    pack_row,
    part_columns,
    prompt_id,
    row_id,
    source_fingerprints,
)
from cache.shard import SUFFIXES, ShardMeta, ShardRow, find_done_units
from cache.store import Store
from cache.tensor_checks import SAMPLE, kind_of
from cache.trainset import TrainSet
from schemas.errors import USAGE, LatentpressError
from schemas.identity import compute_fingerprint
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA, index_schema

SIZE_SAMPLE_ROWS = 16  # rows of a group, to estimate the size of one
MIB = 2**20
SET_KEYS = ("family", "flavour", "task", "template")
INDEX_KEYS = ("role", "dataset", "bucket", "repeats", "weight", "regularisation")  # of the index

RowGroup = tuple[str, str, int, int]  # role, bucket, first row, row after the last


class TargetError(LatentpressError):
    """The place to write to holds something else."""

    exit_code = USAGE


@dataclass(frozen=True)
class RowSize:
    """Estimated bytes of a row of a group: all of it, and its texts."""

    row: float
    text: float


@dataclass(frozen=True)
class ExportShard:
    """What becomes one shard: rows start..stop-1 of the index, of one role and bucket."""

    number: int
    bucket: str
    start: int
    stop: int

    @property
    def unit(self) -> str:
        return f"{self.number:06d}"


def divide_groups(groups: Sequence[RowGroup], sizes: Sequence[RowSize], limit: float) -> list[ExportShard]:
    """Divide each group into pieces of equally many rows: of about `limit` bytes at most, and at least one row."""
    pieces: list[ExportShard] = []
    for (_, bucket, first, last), size in zip(groups, sizes, strict=True):
        rows = last - first
        count = min(rows, max(1, -int(-rows * size.row // limit)))
        bounds = [first + rows * i // count for i in range(count + 1)]
        pieces += [ExportShard(len(pieces) + i, bucket, bounds[i], bounds[i + 1]) for i in range(count)]
    return pieces


def estimate_row_size(data: TrainSet, group: RowGroup) -> RowSize:
    """The mean of some rows of a group, evenly spaced: all rows of a bucket have latents of one size."""
    _, _, first, last = group
    count = min(SIZE_SAMPLE_ROWS, last - first)
    every = [data.part_rows(first + (2 * i + 1) * (last - first) // (2 * count)) for i in range(count)]
    whole = [sum(row_bytes(row) for row in parts.values()) for parts in every]
    text = [sum(row_bytes(row) for name, row in parts.items() if kind_of(name) == "text") for parts in every]
    return RowSize(sum(whole) / count, sum(text) / count)


def row_bytes(row: ShardRow) -> int:
    return sum(array.nbytes for array in row.tensors.values())


class Exporter:
    """One set, and where and how it is written. captions: with the words of each text."""

    def __init__(self, data: TrainSet, target: Store, form: str, limit_mib: float, captions: bool) -> None:
        self.data, self.target, self.format = data, target, form
        self._words = load_captions(data) if captions else None
        self.groups = data.groups
        self.sizes = [estimate_row_size(data, group) for group in self.groups]
        self.shards = divide_groups(self.groups, self.sizes, limit_mib * MIB)
        index = data.tables["index"]
        most = pc.max(pc.list_value_length(index.column("texts"))).as_py()
        null = data.meta["null_text"] is not None or index.column("null_text").null_count < index.num_rows
        self._parts = [SAMPLE, *data.kinds, *(f"text{i}" for i in range(most)), *(["null"] if null else [])]
        self._columns = collect_columns(data)
        settings = {"format": form, "shard_mib": limit_mib, "captions": captions}
        export = {
            "version": EXPORT_VERSION,
            "folders": source_fingerprints(data),
            "made_with": collect_provenance(data),
        }
        plain = {key: value for key, value in data.meta.items() if key != "export"}
        plain["validation"] = [{**prompt, "condition": None} for prompt in plain["validation"]]
        self.record = {**plain, "export": {**export, "settings": settings}}
        self.name = compute_fingerprint({"set": data.id, "parts": self._parts, **self.record["export"]})

    @property
    def rel(self) -> str:
        return f"sets/{self.data.id}/set.json"

    def check_target(self) -> None:
        """TargetError where the target holds this set otherwise: a set is published once. A damaged one is written
        anew."""
        try:
            there = self.target.read_json(self.rel)
        except (FileNotFoundError, DamageError):
            return
        if there != json.loads(json.dumps(self.record)):
            raise TargetError(
                f"{self.target.path(f'sets/{self.data.id}')} is this set already, not exported from here or otherwise",
                "choose another folder with --to, or remove that one",
            )

    @cached_property
    def _there(self) -> dict[str, str]:
        return find_done_units(self.target, f"{SAMPLES_KIND}/{self.name}")

    @property
    def missing_shards(self) -> list[ExportShard]:
        """The pieces of which there is no shard yet."""
        return [piece for piece in self.shards if piece.unit not in self._there]

    def is_complete(self, piece: ExportShard) -> bool:
        """Whether the shard of `piece` is there and holds its rows, every byte as it was written. Reads all of it."""
        path = self._there.get(piece.unit)
        if path is None or shard_io.verify(self.target, path):
            return False
        with shard_io.open_reader(self.target, path) as there:
            return there.meta.ids == self._ids(piece)

    def _ids(self, piece: ExportShard) -> list[str]:
        ids = self.data.tables["index"].column("sample_id").slice(piece.start, piece.stop - piece.start)
        return [row_id(piece.start + i, name) for i, name in enumerate(ids.to_pylist())]

    def write(self, piece: ExportShard) -> int:
        """Publish the shard of `piece`; bytes of its tensors. DamageError where a row that it takes is damaged."""
        ids = self._ids(piece)
        rows = (
            pack_row(id, self.data.part_rows(number), self._facts(number))
            for id, number in zip(ids, range(piece.start, piece.stop), strict=True)
        )
        return self._publish(SAMPLES_KIND, piece.unit, piece.bucket, ids, self._parts, rows)

    def write_prompts(self) -> None:
        """Publish the shard of the validation prompts, where there are any."""
        prompts = self.record["validation"]
        if not prompts:
            return
        found = [self.data.prompt_rows(number) for number in range(len(prompts))]
        keys = ("name", "prompt", "negative_prompt", "bucket")
        ids = [prompt_id(number) for number in range(len(prompts))]
        facts = [{key: prompt[key] for key in keys} | self._named for prompt in prompts]
        rows = [pack_row(*each) for each in zip(ids, found, facts, strict=True)]
        parts = ["text", "negative", *(["condition"] if any("condition" in one for one in found) else [])]
        self._publish(PROMPTS_KIND, "000000", "", ids, parts, rows)

    def _publish(
        self, kind: str, unit: str, bucket: str, ids: list[str], parts: list[str], rows: Iterable[ShardRow]
    ) -> int:
        kept = (*SET_KEYS, "generation", "fingerprints", "provenance")
        provenance = {key: self.record[key] for key in kept if key in self.record}
        provenance |= {"set": self.data.id, "made_with": self.record["export"]["made_with"]}
        meta = ShardMeta(kind, self.name, unit, bucket, ids, [], provenance)
        names, size = part_columns(self._columns, parts), 0
        with shard_io.open_writer(self.target, f"{kind}/{self.name}/{unit}", meta, names, self.format) as out:
            for row in rows:
                out.add(row)
                size += row_bytes(row)
            out.finish()
        return size

    @property
    def _named(self) -> dict[str, Any]:
        return {key: self.record[key] for key in SET_KEYS}

    def _facts(self, number: int) -> dict[str, Any]:
        """What a row says beside its parts."""
        index = self.data.tables["index"]
        facts = {key: index.column(key)[number].as_py() for key in INDEX_KEYS} | self._named
        if self._words is not None:
            texts = index.column("texts")[number].as_py()
            facts["captions"] = [self._words[self.data.text_id(text)]["text"] for text in texts]
        return facts

    def publish(self) -> None:
        """The tables, then set.json, then the pointer to it."""
        suffix = SUFFIXES[self.format]
        paths = [f"{SAMPLES_KIND}/{self.name}/{piece.unit}{suffix}" for piece in self.shards]
        paths += [f"{PROMPTS_KIND}/{self.name}/000000{suffix}"] if self.record["validation"] else []
        counts = [piece.stop - piece.start for piece in self.shards]
        places = np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])
        texts = self.data.tables["texts"].column("text_id")
        nowhere = pa.nulls(len(texts), pa.int32())
        tables = {
            "index": replace_locations(self.data.tables["index"], {"latents": places}),
            "texts": pa.table([texts, nowhere, nowhere], schema=SET_TEXTS_SCHEMA),
            "shards": pa.table([paths, [path.split("/")[0] for path in paths]], schema=SET_SHARDS_SCHEMA),
        }
        publish_set(self.target, self.record, tables)


def replace_locations(index: pa.Table, places: Mapping[str, Any]) -> pa.Table:
    """The index with other places. places: (2, n) shards and rows by kind, of "latents" and of each further one."""
    new = {
        f"{kind}_{what}".removeprefix("latents_"): pa.array(each, pa.int32())
        for kind, both in places.items()
        for what, each in zip(("shard", "row"), both, strict=True)
    }
    schema = index_schema([kind for kind in places if kind != "latents"])
    return pa.table([new[name] if name in new else index.column(name) for name in schema.names], schema=schema)


def publish_set(store: Store, record: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> None:
    """Publish a set and make it the current one of its family and task."""
    folder = f"sets/{record['id']}"
    for name, table in tables.items():
        store.write_table(f"{folder}/{name}.arrow", table)
    store.publish_json(f"{folder}/set.json", record)
    set_pointers.update_pointers(store, record)


def load_captions(data: TrainSet) -> Mapping[str, Mapping[str, Any]]:
    """text_id -> its row in the plan. LatentpressError where the plan is not at hand."""
    name = data.meta["generation"]
    if name not in plans.list_plans(data.store):
        raise LatentpressError(
            f"the captions' words are in plan {name}, which is not under {data.store.path('plans')}",
            "export without --with-captions, or where the set was made",
        )
    return plans.load_plan(data.store, name).texts
