"""An export back into ordinary shards and a set over them: what `cache/exporter.py` did, undone bit by bit.

Every shard of the export becomes one of latents and one of the texts that it is the first to hold, named after the
set, so that no stage takes them for units of a plan. The set keeps its id: a run begun on one goes on with the other.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache import shard, shard_io
from cache.exported_set import ExportedSet, collect_columns, source_fingerprints
from cache.exporter import TargetError, publish_set, replace_locations, row_bytes
from cache.schedule import Ints
from cache.shard import ShardMeta, ShardRow, find_done_units
from cache.store import Store
from cache.tensor_checks import SAMPLE
from cache.trainset import read_set_table
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA


@dataclass
class ImportShard:
    """What one shard of the export becomes. texts: row of the index -> numbers of the texts that it is the first to
    hold, each with the name of its part. samples: rows that are the first of their sample."""

    unit: str
    bucket: str
    rows: range
    samples: list[int]
    texts: dict[int, list[tuple[int, str]]] = field(default_factory=dict)

    def numbers(self) -> list[int]:
        return [number for row in sorted(self.texts) for number, _ in self.texts[row]]


class Importer:
    """One export, and where and how it is written."""

    def __init__(self, data: ExportedSet, target: Store, form: str) -> None:
        self.data, self.target, self.form = data, target, form
        self.folders = source_fingerprints(data)
        self.of_samples = {"latents": SAMPLE, **{kind: kind for kind in data.kinds}}  # kind of shard -> part of a row
        self.index = data.tables["index"]
        plain = {key: value for key, value in data.meta.items() if key != "export"}
        self.record: dict[str, Any] = {**plain, "validation": [dict(prompt) for prompt in plain["validation"]]}
        codes = np.asarray(self.index.column("sample_id").combine_chunks().dictionary_encode().indices)
        self._first = np.unique(codes, return_index=True)[1][codes]  # (n,) the first row of the same sample
        self.shards = self._divide()
        placed = {number for part in self.shards for number in part.numbers()}
        self.prompts = self._of_prompts(placed)

    # -- what goes where -------------------------------------------------------------------------------------

    def _divide(self) -> list[ImportShard]:
        shards = np.asarray(self.index.column("shard"))
        starts = np.flatnonzero(np.diff(shards, prepend=-1)).tolist()
        parts = [
            ImportShard(
                self._unit(f"{number:06d}"),
                self.index.column("bucket")[start].as_py(),
                range(start, stop),
                [row for row in range(start, stop) if self._first[row] == row],
            )
            for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(shards)], strict=True))
        ]
        for number, row, name in zip(*self._first_texts(), strict=True):
            parts[int(shards[row])].texts.setdefault(int(row), []).append((int(number), name))
        return parts

    def _unit(self, name: str) -> str:
        return f"import-{self.data.id}-{name}"

    def _first_texts(self) -> tuple[Ints, Ints, list[str]]:
        """(number, row, part) of the first place at which each text lies, by row and number."""
        lists = self.index.column("texts").combine_chunks()
        flat, parent = np.asarray(lists.flatten()), np.asarray(pc.list_parent_indices(lists))
        length = np.asarray(pc.list_value_length(lists))
        within = np.arange(len(flat)) - np.repeat(np.cumsum(length) - length, length)
        null = self.index.column("null_text").combine_chunks()
        if self.data.meta["null_text"] is not None:
            null = pc.fill_null(null, self.data.meta["null_text"])
        with_null = np.flatnonzero(np.asarray(pc.is_valid(null)))
        number = np.concatenate([flat, np.asarray(null.drop_null())])
        row, place = np.concatenate([parent, with_null]), np.concatenate([within, np.full(len(with_null), -1)])
        order = np.argsort(row, kind="stable")
        number, row, place = number[order], row[order], place[order]
        _, first = np.unique(number, return_index=True)
        first = first[np.lexsort((number[first], row[first]))]
        names = ["null" if at < 0 else f"text{at}" for at in place[first].tolist()]
        return number[first], row[first], names

    def _of_prompts(self, placed: set[int]) -> list[tuple[int, str, int]]:
        """(prompt, part, number of its text) of the texts that only prompts have."""
        found: dict[int, tuple[int, str, int]] = {}
        for at, prompt in enumerate(self.record["validation"]):
            for name in ("text", "negative"):
                if prompt[name] not in placed:
                    found.setdefault(prompt[name], (at, name, prompt[name]))
        return list(found.values())

    # -- writing ---------------------------------------------------------------------------------------------

    def is_present(self) -> bool:
        """Whether the target holds this set, and not by an earlier import. TargetError where it holds it otherwise."""
        rel = f"sets/{self.data.id}/set.json"
        if not self.target.exists(rel):
            return False
        there = self.target.read_json(rel)
        if _without_locations(there) != _without_locations(self.record):
            raise TargetError(
                f"{self.target.path(rel)} is another set of the same id, or an export",
                "import into another root: --set root=...",
            )
        paths = read_set_table(self.target, self.data.id, "shards").column("path").to_pylist()
        return not any("/import-" in path for path in paths)

    @cached_property
    def _columns(self) -> dict[str, dict[str, str]]:
        return collect_columns(self.data)

    @cached_property
    def _there(self) -> dict[str, dict[str, str]]:
        return {kind: find_done_units(self.target, f"{kind}/{name}") for kind, name in self.folders.items()}

    def _ids(self, part: ImportShard) -> dict[str, list[str]]:
        samples = self.index.column("sample_id").take(pa.array(part.samples, pa.int64())).to_pylist()
        return dict.fromkeys(self.of_samples, samples) | {"text": [self.data.text_id(n) for n in part.numbers()]}

    def is_complete(self, part: ImportShard) -> bool:
        """Whether the shards of `part` are there, every byte as it was written. Reads all of them."""
        return all(self._holds(kind, part.unit, ids) for kind, ids in self._ids(part).items() if ids)

    def _holds(self, kind: str, unit: str, ids: list[str]) -> bool:
        path = self._there[kind].get(unit)
        if path is None or shard_io.verify(self.target, path):
            return False
        with shard_io.open_reader(self.target, path) as there:
            return there.meta.ids == ids

    def write(self, part: ImportShard) -> int:
        """Publish the shards of `part`; bytes of their tensors. DamageError where a row of the export is damaged."""
        ids, first = self._ids(part), set(part.samples)
        rows: dict[str, list[ShardRow]] = {kind: [] for kind in ids}
        for number in part.rows:
            parts = self.data.part_rows(number, verify=True)
            for kind, name in self.of_samples.items() if number in first else ():
                rows[kind].append(parts[name])
            rows["text"] += [parts[name] for _, name in part.texts.get(number, [])]
        return sum(
            self._publish(kind, part.unit, "" if kind == "text" else part.bucket, ids[kind], rows[kind]) for kind in ids
        )

    def _publish(self, kind: str, unit: str, bucket: str, ids: list[str], rows: list[ShardRow]) -> int:
        if not rows:
            return 0
        provenance = {"set": self.data.id, "made_with": self.data.meta["export"]["made_with"]}
        folder = f"{kind}/{self.folders[kind]}"
        meta = ShardMeta(kind, self.folders[kind], unit, bucket, ids, [], provenance)
        with shard_io.open_writer(self.target, f"{folder}/{unit}", meta, self._columns[kind], self.form) as out:
            for row in rows:
                out.add(row)
            out.finish()
        self._explain(kind, f"{folder}/provenance.json")
        return sum(row_bytes(row) for row in rows)

    def _explain(self, kind: str, rel: str) -> None:
        """provenance.json beside the shards, as the stage that makes their kind writes it. It says what the export
        says: whoever reads one checks what he takes from it."""
        made = self.record.get("provenance", {}).get(kind)
        if isinstance(made, dict) and not self.target.exists(rel):
            record = {**made, "fingerprint": self.folders[kind]}
            text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False)
            self.target.publish_bytes(rel, text.encode())

    def write_prompts(self) -> dict[int, tuple[str, int]]:
        """Publish what only validation prompts have; prompt -> path and row of its image's latent."""
        every = [self.data.prompt_rows(at, verify=True) for at in range(len(self.record["validation"]))]
        texts = [every[at][name] for at, name, _ in self.prompts]
        self._publish("text", self._unit("prompts"), "", [row.id for row in texts], texts)
        buckets: dict[str, dict[str, ShardRow]] = {}  # an image is one frame of the size of what is to be made of it
        named = {}
        for at, found in enumerate(every):
            if "condition" in found:
                bucket = self.record["validation"][at]["bucket"].partition("@")[0] + "@1"
                rows, image = buckets.setdefault(bucket, {}), found["condition"]
                rows.setdefault(image.id, image)
                named[at] = (bucket, [*rows].index(image.id))
        units = {bucket: self._unit(f"prompts{number}") for number, bucket in enumerate(buckets)}
        for bucket, rows in buckets.items():
            self._publish("latents", units[bucket], bucket, list(rows), list(rows.values()))
        return {at: (self._path("latents", units[bucket]), row) for at, (bucket, row) in named.items()}

    def _path(self, kind: str, unit: str) -> str:
        return f"{kind}/{self.folders[kind]}/{unit}{shard.SUFFIXES[self.form]}"

    def publish(self, images: Mapping[int, tuple[str, int]]) -> None:
        """The tables over what was written, then set.json, then the pointer to it."""
        shards = list[dict[str, str]]()

        def place(kind: str, path: str) -> int:
            shards.append({"path": path, "kind": kind})
            return len(shards) - 1

        # (2, n) shard and row of each sample, by kind, and (2, m) of each text
        own = {kind: np.full((2, len(self.index)), -1, np.int64) for kind in self.of_samples}
        text = np.full((2, len(self.data.tables["texts"])), -1, np.int64)
        for part in self.shards:
            for kind, places in own.items() if part.samples else ():
                places[0, part.samples] = place(kind, self._path(kind, part.unit))
                places[1, part.samples] = np.arange(len(part.samples))
        of_prompts = (self._unit("prompts"), [number for _, _, number in self.prompts])
        for unit, numbers in (*((part.unit, part.numbers()) for part in self.shards), of_prompts):
            if numbers:
                text[0, numbers] = place("text", self._path("text", unit))
                text[1, numbers] = np.arange(len(numbers))
        numbered = {path: place("latents", path) for path in dict.fromkeys(path for path, _ in images.values())}
        for at, (path, row) in images.items():
            self.record["validation"][at]["condition"] = {"shard": numbered[path], "row": row}
        texts = self.data.tables["texts"].column("text_id")
        tables = {
            "index": replace_locations(self.index, {kind: places[:, self._first] for kind, places in own.items()}),
            "texts": pa.table([texts, *(pa.array(each, pa.int32()) for each in text)], schema=SET_TEXTS_SCHEMA),
            "shards": pa.Table.from_pylist(shards, SET_SHARDS_SCHEMA),
        }
        publish_set(self.target, self.record, tables)


def _without_locations(record: Mapping[str, Any]) -> dict[str, Any]:
    """For comparing: of what is no list of prompts, a record that equals none of a set."""
    prompts = record.get("validation")
    if not isinstance(prompts, list) or not all(isinstance(prompt, dict) for prompt in prompts):
        return {}
    return {**record, "validation": [{**prompt, "condition": None} for prompt in prompts]}
