"""Writes a training set as an export, which `cache/sets/exported_set.py` reads and `cache/sets/importer.py` turns back.

The division of rows into shards is a function of the set and the options, so an undamaged shard is not written again.
`sets/<id>/set.json`, without which there is no set, is written last.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.order.set_columns import find_runs
from cache.sets import exported_set, plans, set_lookup
from cache.sets.exported_set import (
    PROMPTS_KIND,
    SAMPLES_KIND,
    TargetError,
    has_shard,
    pack_row,
    replace_locations,
    row_bytes,
    without_places,
    write_shard,
)
from cache.sets.trainset import TrainSet, packed_row_id
from cache.shards.shard import SUFFIXES, ShardMeta, ShardRow, find_done_units
from cache.shards.tensor_checks import SAMPLE, kind_of
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.identity import compute_fingerprint
from schemas.references import REFERENCE_PARTS
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA

SIZE_SAMPLE_ROWS = 16  # rows of a group that are read to estimate its size
MIB = 2**20
SET_KEYS = ("family", "flavour", "task", "template")  # of set.json, repeated in each row
INDEX_KEYS = ("role", "dataset", "bucket", "repeats", "weight", "regularisation")  # of the index, likewise
PROMPT_KEYS = ("name", "prompt", "negative_prompt", "bucket")  # of a validation prompt, likewise

RowGroup = tuple[tuple, int, int]  # role and bucket, first row, row after the last


class RowSize(NamedTuple):
    """Estimated bytes of a row of a group: all of it, and its texts."""

    row: float
    text: float


class ExportShard(NamedTuple):
    """A shard of an export: rows start..stop-1 of the index, of one role and bucket."""

    unit: str
    bucket: str
    start: int
    stop: int


def divide_groups(groups: Sequence[RowGroup], sizes: Sequence[RowSize], limit: float) -> list[ExportShard]:
    """Divide each group into shards of equally many rows, at least one, and of about `limit` bytes at most."""
    shards: list[ExportShard] = []
    for ((_, bucket), first, last), size in zip(groups, sizes, strict=True):
        rows = last - first
        count = min(rows, max(1, -int(-rows * size.row // limit)))
        bounds = [first + rows * i // count for i in range(count + 1)]
        shards += [ExportShard(f"{len(shards) + i:06d}", bucket, bounds[i], bounds[i + 1]) for i in range(count)]
    return shards


def estimate_row_size(data: TrainSet, group: RowGroup) -> RowSize:
    """The mean of evenly spaced rows of a group; latents of a bucket all have one size."""
    _, first, last = group
    count = min(SIZE_SAMPLE_ROWS, last - first)
    samples = [data.part_rows(first + (2 * i + 1) * (last - first) // (2 * count)) for i in range(count)]
    sizes = [(kind_of(name), row_bytes(row)) for parts in samples for name, row in parts.items()]
    return RowSize(sum(size for _, size in sizes) / count, sum(size for kind, size in sizes if kind == "text") / count)


class Exporter:
    """Writes one set to `target`. captions: whether rows have the words of their captions."""

    def __init__(self, data: TrainSet, target: Store, form: str, limit_mib: float, captions: bool) -> None:
        self.data, self.target, self.format = data, target, form
        self._words: Mapping[str, Mapping[str, Any]] | None = None  # text_id -> its row in the plan
        if captions:
            name = data.meta["generation"]
            if name not in plans.list_plans(data.store):
                raise LatentpressError(
                    f"the captions' words are in plan {name}, which is not under {data.store.path('plans')}",
                    "export without --with-captions, or from the root where the set was made",
                )
            self._words = plans.load_plan(data.store, name).texts
        index = data.tables["index"]
        self.groups = find_runs(index, ("role", "bucket"))
        self.sizes = [estimate_row_size(data, group) for group in self.groups]
        self.shards = divide_groups(self.groups, self.sizes, limit_mib * MIB)
        most = pc.max(pc.list_value_length(index.column("texts"))).as_py()
        null = data.meta["null_text"] is not None or index.column("null_text").null_count < index.num_rows
        self._parts = [
            SAMPLE,
            *data.kinds,
            *data.references,
            *(f"text{i}" for i in range(most)),
            *(["null"] if null else []),
        ]
        self._columns = exported_set.collect_columns(data)
        export = {
            "version": exported_set.EXPORT_VERSION,
            "folders": exported_set.source_fingerprints(data),
            "made_with": exported_set.collect_provenance(data),
            "settings": {"format": form, "shard_mib": limit_mib, "captions": captions},
        }
        self.record = {key: value for key, value in data.meta.items() if key != "export"} | {"export": export}
        self.record["validation"] = [without_places(prompt) for prompt in data.meta["validation"]]
        self._set_facts = {key: self.record[key] for key in SET_KEYS}
        self.name = compute_fingerprint({"set": data.id, "parts": self._parts, **export})

    def check_target(self) -> None:
        """TargetError where the target has this set with other content. A damaged set is replaced."""
        try:
            record = self.target.read_json(f"sets/{self.data.id}/set.json")
        except (FileNotFoundError, DamageError):
            return
        if record != json.loads(json.dumps(self.record)):
            what = f"{self.target.path(f'sets/{self.data.id}')} is this set already, exported with other options"
            raise TargetError(what, "choose another folder with --to, or remove that one")

    @cached_property
    def _done(self) -> dict[str, str]:
        return find_done_units(self.target, f"{SAMPLES_KIND}/{self.name}")

    @property
    def missing_shards(self) -> list[ExportShard]:
        """The shards that the target does not have yet."""
        return [shard for shard in self.shards if shard.unit not in self._done]

    def is_complete(self, shard: ExportShard) -> bool:
        """Whether the target has the shard, undamaged. Reads all of it."""
        return has_shard(self.target, self._done.get(shard.unit), self._ids(shard))

    def _ids(self, shard: ExportShard) -> list[str]:
        ids = self.data.tables["index"].column("sample_id").slice(shard.start, shard.stop - shard.start)
        return [packed_row_id(shard.start + i, id) for i, id in enumerate(ids.to_pylist())]

    def write(self, shard: ExportShard) -> int:
        """Publish a shard; bytes of its tensors. DamageError where a row of the set is damaged."""
        ids = self._ids(shard)
        return self._publish(SAMPLES_KIND, shard.unit, shard.bucket, ids, self._parts, self._rows(shard, ids))

    def _rows(self, shard: ExportShard, ids: list[str]) -> Iterator[ShardRow]:
        for id, number in zip(ids, range(shard.start, shard.stop), strict=True):
            yield pack_row(id, self.data.part_rows(number), self._row_facts(number))
            self.data.supply.finished(number)

    def needs(self) -> Iterator[set[int]]:
        """The shards of the set that each of its rows is in, in order; none for rows that the target has."""
        for shard in self.shards:
            for number in range(shard.start, shard.stop):
                has_row = shard.unit in self._done
                yield set() if has_row else {location.shard for location in self.data.part_locations(number).values()}

    def _row_facts(self, number: int) -> dict[str, Any]:
        index = self.data.tables["index"]
        facts = {key: index.column(key)[number].as_py() for key in INDEX_KEYS} | self._set_facts
        if self._words is not None:
            texts = index.column("texts")[number].as_py()
            facts["captions"] = [self._words[self.data.text_id(text)]["text"] for text in texts]
        return facts

    def write_prompts(self) -> None:
        """Publish the shard of the validation prompts, where there are any."""
        prompts = self.record["validation"]
        if not prompts:
            return
        prompt_parts = [self.data.prompt_rows(number) for number in range(len(prompts))]
        ids = [exported_set.prompt_id(number) for number in range(len(prompts))]
        facts = [{key: prompt[key] for key in PROMPT_KEYS} | self._set_facts for prompt in prompts]
        rows = [pack_row(*row) for row in zip(ids, prompt_parts, facts, strict=True)]
        given = {part for row_parts in prompt_parts for part in row_parts}
        parts = ["text", "negative", *(part for part in ("condition", *REFERENCE_PARTS) if part in given)]
        self._publish(PROMPTS_KIND, "000000", "", ids, parts, rows)

    def _publish(
        self, kind: str, unit: str, bucket: str, ids: list[str], parts: list[str], rows: Iterable[ShardRow]
    ) -> int:
        kept = (*SET_KEYS, "generation", "fingerprints", "provenance")
        provenance = {key: self.record[key] for key in kept if key in self.record}
        provenance |= {"set": self.data.id, "made_with": self.record["export"]["made_with"]}
        meta = ShardMeta(kind, self.name, unit, bucket, ids, [], provenance)
        columns = {
            exported_set.tensor_name(part, name): dtype
            for part in parts
            for name, dtype in sorted(self._columns.get(kind_of(part), {}).items())
        }
        return write_shard(self.target, meta, columns, self.format, rows)

    def publish(self) -> None:
        """Publish the tables, then set.json, then the pointer to it."""
        suffix = SUFFIXES[self.format]
        paths = [f"{SAMPLES_KIND}/{self.name}/{shard.unit}{suffix}" for shard in self.shards]
        paths += [f"{PROMPTS_KIND}/{self.name}/000000{suffix}"] if self.record["validation"] else []
        counts = [shard.stop - shard.start for shard in self.shards]
        places = np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])
        texts = self.data.tables["texts"].column("text_id")
        nowhere = pa.nulls(len(texts), pa.int32())
        tables = {
            "index": replace_locations(self.data.tables["index"], {"latents": places}),
            "texts": pa.table([texts, nowhere, nowhere], schema=SET_TEXTS_SCHEMA),
            "shards": pa.table([paths, [path.split("/")[0] for path in paths]], schema=SET_SHARDS_SCHEMA),
        }
        set_lookup.publish_set(self.target, self.record, tables)
