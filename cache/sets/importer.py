"""Turns an export back into ordinary shards and a set over them, bit by bit as `cache/sets/exporter.py` found them.

Every shard of the export becomes one of latents and one of the texts that it is the first to hold. They are named after
the set, so that no stage takes them for units of a plan. The set keeps its id: a run started on one continues on the
other.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.exported_set import (
    ExportedSet,
    TargetError,
    collect_columns,
    has_shard,
    replace_locations,
    source_fingerprints,
    without_places,
    write_shard,
)
from cache.sets.set_lookup import publish_set
from cache.sets.table_checks import read_set_table
from cache.shards.shard import SUFFIXES, ShardMeta, ShardRow, find_done_units
from cache.shards.tensor_checks import SAMPLE
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.geometry import Bucket
from schemas.references import REFERENCE_PARTS
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA


class ImportShard(NamedTuple):
    """The content of one shard of the export. samples: rows that are the first of their sample. texts: row of the index
    -> number and part of each text that it is the first to hold. references: size -> id -> row and part of each
    reference that it is the first to hold."""

    unit: str
    bucket: str
    rows: range
    samples: list[int]
    texts: dict[int, list[tuple[int, str]]]
    references: dict[str, dict[str, tuple[int, str]]]

    @property
    def text_numbers(self) -> list[int]:
        return [number for texts in self.texts.values() for number, _ in texts]


class Importer:
    """Writes the shards and the set of one export to `target`."""

    def __init__(self, data: ExportedSet, target: Store, form: str) -> None:
        self.data, self.target, self.form = data, target, form
        self.folders = source_fingerprints(data)
        self._sample_parts = {"latents": SAMPLE, **{kind: kind for kind in data.kinds}}  # kind of shard -> part
        self.index = data.tables["index"]
        ids = data.tables["texts"].column("text_id")
        if pc.count_distinct(ids).as_py() != len(
            ids
        ):  # not when a set is opened: of ten million it takes 10 s and 2 GB
            raise DamageError(data.store.path(f"sets/{data.id}/texts.arrow"), "a text appears in it twice")
        self.record: dict[str, Any] = {key: value for key, value in data.meta.items() if key != "export"}
        self.record["validation"] = [without_places(prompt) for prompt in data.meta["validation"]]
        codes = np.asarray(self.index.column("sample_id").combine_chunks().dictionary_encode().indices)
        self._first = np.unique(codes, return_index=True)[1][codes]  # (n,) the first row of the same sample
        self.shards = self._divide()
        of_samples = {number for shard in self.shards for number in shard.text_numbers}
        self.prompts: dict[int, tuple[int, str]] = {}  # text that only validation prompts have -> prompt, part
        for at, prompt in enumerate(self.record["validation"]):
            for name in ("text", "negative"):
                if prompt[name] not in of_samples:
                    self.prompts.setdefault(prompt[name], (at, name))

    def _divide(self) -> list[ImportShard]:
        of_row = np.asarray(self.index.column("shard"))
        starts = np.flatnonzero(np.diff(of_row, prepend=-1)).tolist()
        shards, known, known_references = list[ImportShard](), set[int](), set[str]()
        for start, stop in zip(starts, [*starts[1:], len(of_row)], strict=True):
            texts: dict[int, list[tuple[int, str]]] = {}
            for row in range(start, stop):
                # Of a text that a row has twice, the first part.
                parts = {text: part for part, text in reversed(self.data.row_texts.parts(row).items())}
                if new := sorted(parts.keys() - known):
                    texts[row] = [(number, parts[number]) for number in new]
                known.update(new)
            samples = [row for row in range(start, stop) if self._first[row] == row]
            unit, bucket = self._unit(f"{len(shards):06d}"), Bucket.parse(self.data.bucket(start))
            references = dict[str, dict[str, tuple[int, str]]]()
            for part, (width, height) in zip(self.data.references, bucket.references, strict=False):
                ids = self.index.column(f"{part}_id").slice(start, stop - start).to_pylist()
                for row, id in enumerate(ids, start):
                    if id not in known_references:
                        known_references.add(id)
                        references.setdefault(f"{width}x{height}@1", {})[id] = row, part
            plain = str(replace(bucket, references=()))
            shards.append(ImportShard(unit, plain, range(start, stop), samples, texts, references))
        return shards

    def _reference_unit(self, shard: ImportShard, size: str) -> str:
        return f"{shard.unit}-{size}"

    def _unit(self, name: str) -> str:
        return f"import-{self.data.id}-{name}"

    def is_present(self) -> bool:
        """Whether the target has this set, and not by an import. TargetError where it has another set of this id."""
        rel = f"sets/{self.data.id}/set.json"
        if not self.target.exists(rel):
            return False
        if _without_locations(self.target.read_json(rel)) != _without_locations(self.record):
            what = f"{self.target.path(rel)} is another set of the same id, or an export"
            raise TargetError(what, "import into another root: --set root=...")
        paths = read_set_table(self.target, self.data.id, "shards").column("path").to_pylist()
        return not any("/import-" in path for path in paths)

    @cached_property
    def _columns(self) -> dict[str, dict[str, str]]:
        return collect_columns(self.data)

    @cached_property
    def _done(self) -> dict[str, dict[str, str]]:
        return {kind: find_done_units(self.target, f"{kind}/{name}") for kind, name in self.folders.items()}

    def _ids(self, shard: ImportShard) -> dict[str, list[str]]:
        samples = self.index.column("sample_id").take(pa.array(shard.samples, pa.int64())).to_pylist()
        texts = [self.data.text_id(number) for number in shard.text_numbers]
        return dict.fromkeys(self._sample_parts, samples) | {"text": texts}

    def is_complete(self, shard: ImportShard) -> bool:
        """Whether the target has all shards of `shard`, undamaged. Reads all of them."""
        paths = {kind: self._done[kind].get(shard.unit) for kind in self._done}
        units = {self._reference_unit(shard, size): [*rows] for size, rows in shard.references.items()}
        return all(has_shard(self.target, paths[kind], ids) for kind, ids in self._ids(shard).items() if ids) and all(
            has_shard(self.target, self._done["latents"].get(unit), ids) for unit, ids in units.items()
        )

    def write(self, shard: ImportShard) -> int:
        """Publish the shards of `shard`; bytes of their tensors. DamageError where a row of the export is damaged."""
        samples = set(shard.samples)
        rows: dict[str, list[ShardRow]] = {kind: [] for kind in (*self._sample_parts, "text")}
        references = dict[str, dict[str, ShardRow]]()
        for number in shard.rows:
            parts = self.data.part_rows(number, verify=True)
            for kind, name in self._sample_parts.items() if number in samples else ():
                rows[kind].append(parts[name])
            rows["text"] += [parts[name] for _, name in shard.texts.get(number, [])]
            for size, places in shard.references.items():
                held = {id: parts[part] for id, (row, part) in places.items() if row == number}
                references.setdefault(size, {}).update(held)
            self.data.supply.finished(number)
        written = 0
        for size, places in shard.references.items():
            held_rows = [references[size][id] for id in places]
            written += self._publish("latents", self._reference_unit(shard, size), size, held_rows)
        for kind, kind_rows in rows.items():
            written += self._publish(kind, shard.unit, "" if kind == "text" else shard.bucket, kind_rows)
        return written

    def needs(self) -> Iterator[set[int]]:
        """The shard of the export that each of its rows is in, in order; none for rows that the target has."""
        numbers = np.asarray(self.index.column("shard"))
        for shard in self.shards:
            done = shard.unit in self._done["latents"]
            yield from (set() if done else {number} for number in numbers[shard.rows].tolist())

    def _publish(self, kind: str, unit: str, bucket: str, rows: list[ShardRow]) -> int:
        """Publish a shard of `rows`, if there are any, and provenance.json of its cache as the stage of this kind
        writes it. That repeats what the export claims: readers check it."""
        if not rows:
            return 0
        fingerprint, ids = self.folders[kind], [row.id for row in rows]
        provenance = {"set": self.data.id, "made_with": self.data.meta["export"]["made_with"]}
        meta = ShardMeta(kind, fingerprint, unit, bucket, ids, [], provenance)
        size = write_shard(self.target, meta, self._columns[kind], self.form, rows)
        rel, made = f"{kind}/{fingerprint}/provenance.json", self.record.get("provenance", {}).get(kind)
        if isinstance(made, dict) and not self.target.exists(rel):
            text = json.dumps(made | {"fingerprint": fingerprint}, indent=1, sort_keys=True, ensure_ascii=False)
            self.target.publish_bytes(rel, text.encode())
        return size

    def write_prompts(self) -> dict[tuple[int, str], tuple[str, int]]:
        """Publish what only validation prompts have; returns prompt and part -> path and row of its images' latents."""
        prompt_rows = [self.data.prompt_rows(at, verify=True) for at in range(len(self.record["validation"]))]
        self._publish("text", self._unit("prompts"), "", [prompt_rows[at][name] for at, name in self.prompts.values()])
        buckets: dict[str, dict[str, ShardRow]] = {}  # an image is one frame
        places = {}
        stride = FAMILIES[self.record["family"]].spatial_stride
        for at, parts in enumerate(prompt_rows):
            for part in (name for name in ("condition", *REFERENCE_PARTS) if name in parts):
                image = parts[part]
                height, width = (side * stride for side in image.tensors["latent"].shape[-2:])
                rows = buckets.setdefault(f"{width}x{height}@1", {})
                rows.setdefault(image.id, image)
                places[at, part] = (f"{width}x{height}@1", [*rows].index(image.id))
        units = {bucket: self._unit(f"prompts{number}") for number, bucket in enumerate(buckets)}
        for bucket, rows in buckets.items():
            self._publish("latents", units[bucket], bucket, list(rows.values()))
        return {image: (self._path("latents", units[bucket]), row) for image, (bucket, row) in places.items()}

    def _path(self, kind: str, unit: str) -> str:
        return f"{kind}/{self.folders[kind]}/{unit}{SUFFIXES[self.form]}"

    def _reference_places(self, part: str, places: Mapping[str, tuple[int, int]]) -> np.ndarray:
        """(2, n) shard and row of the reference that each row has as `part`; -1 where it has none."""
        ids = self.index.column(f"{part}_id").to_pylist()
        return np.array([places[id] if id else (-1, -1) for id in ids], np.int64).T

    def publish(self, images: Mapping[tuple[int, str], tuple[str, int]]) -> None:
        """Publish the tables, then set.json, then the pointer to it. images: as `write_prompts` returns them."""
        shards = list[dict[str, str]]()

        def add_shard(kind: str, path: str) -> int:
            shards.append({"path": path, "kind": kind})
            return len(shards) - 1

        # (2, n) shard and row of each sample, by kind, and (2, m) of each text
        samples = {kind: np.full((2, len(self.index)), -1, np.int64) for kind in self._sample_parts}
        texts = np.full((2, len(self.data.tables["texts"])), -1, np.int64)
        references = dict[str, tuple[int, int]]()  # id -> shard and row
        for shard in self.shards:
            for size, rows in shard.references.items():
                number = add_shard("latents", self._path("latents", self._reference_unit(shard, size)))
                references |= {id: (number, row) for row, id in enumerate(rows)}
            for kind, locations in samples.items() if shard.samples else ():
                locations[0, shard.samples] = add_shard(kind, self._path(kind, shard.unit))
                locations[1, shard.samples] = np.arange(len(shard.samples))
        of_prompts = (self._unit("prompts"), list(self.prompts))
        for unit, numbers in (*((shard.unit, shard.text_numbers) for shard in self.shards), of_prompts):
            if numbers:
                texts[0, numbers] = add_shard("text", self._path("text", unit))
                texts[1, numbers] = np.arange(len(numbers))
        of_images = {path: add_shard("latents", path) for path in dict.fromkeys(path for path, _ in images.values())}
        for (at, part), (path, row) in images.items():
            location, entry = {"shard": of_images[path], "row": row}, self.record["validation"][at]
            if part == "condition":
                entry["condition"] = location
            else:
                given = entry["references"][REFERENCE_PARTS.index(part)]
                entry["references"][REFERENCE_PARTS.index(part)] = {"id": given["id"], **location}
        ids = self.data.tables["texts"].column("text_id")
        tables = {
            "index": replace_locations(
                self.index,
                {kind: locations[:, self._first] for kind, locations in samples.items()}
                | {part: self._reference_places(part, references) for part in self.data.references},
            ),
            "texts": pa.table([ids, *(pa.array(numbers, pa.int32()) for numbers in texts)], schema=SET_TEXTS_SCHEMA),
            "shards": pa.Table.from_pylist(shards, SET_SHARDS_SCHEMA),
        }
        publish_set(self.target, self.record, tables)


def _without_locations(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record to compare; {}, which no set equals, where its validation is no list of prompts."""
    prompts = record.get("validation")
    if not isinstance(prompts, list) or not all(isinstance(prompt, dict) for prompt in prompts):
        return {}
    return {**record, "validation": [*map(without_places, prompts)]}
