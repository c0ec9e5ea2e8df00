"""A training set as an export holds it: one row has everything that belongs to a sample.

An export is a root of its own: `sets/<id>` over shards of the kinds "samples" and "prompts", which need no other file.
One of their rows packs several rows of ordinary shards, its parts: "sample" (of a latents shard), others named like the
kind of their shard ("vision"), "text0", "text1", ... (its captions, which are alternatives) and "null". The parts of a
validation prompt are "text", "negative" and "condition". The tensors of "sample" keep their names; those of another
part are "<part>.<name>". A text that many samples share is repeated in each of their rows, so a row is complete.

An export may come from anywhere: tables, names and numbers are checked before they are used.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.samples import Location
from cache.sets.table_checks import check_row_numbers
from cache.sets.trainset import SetError, TrainSet, packed_row_id
from cache.shards import shard_io
from cache.shards.arrow import ShardReader as ArrowReader
from cache.shards.arrow import is_reserved_name
from cache.shards.shard import ShardMeta, ShardRow, canonical_json, row_checksum
from cache.shards.tensor_checks import SAMPLE, kind_of
from cache.store.damage import ENCODE_PROGRAMS, DamageError, as_damage
from cache.store.json_checks import (
    PATH_NAME_PATTERN,
    check_checksum,
    check_list,
    check_object,
    check_path_name,
    printable,
)
from cache.store.store import Store
from schemas.errors import USAGE, LatentpressError
from schemas.references import REFERENCE_PARTS
from schemas.tables import index_schema, reference_parts

EXPORT_VERSION = 1
CHECKED_ROWS = 1 << 17  # at a time
SAMPLES_KIND, PROMPTS_KIND = "samples", "prompts"  # kinds of shards
PROVENANCE_KEYS = ("libraries", "device")  # of a shard's provenance: those that do not describe its unit
FURTHER_PARTS = "|".join(sorted(ENCODE_PROGRAMS.keys() - {"latents", "text"}))
PART_PATTERN = re.compile(
    rf"sample|text|null|negative|condition|{'|'.join(REFERENCE_PARTS)}|{FURTHER_PARTS}|text(0|[1-9][0-9]{{0,5}})"
)
TENSOR_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")
FINGERPRINT_PATTERN = re.compile(r"[0-9a-f]{24}", re.ASCII)
SHARD_PATH_PATTERN = re.compile(rf"(samples|prompts)/{PATH_NAME_PATTERN.pattern}/[0-9]{{6,9}}\.(arrow|tar)", re.ASCII)

ColumnDtypes = dict[str, str]  # tensor name -> dtype


def prompt_id(number: int) -> str:
    return f"prompt-{number:04d}"


def tensor_name(part: str, name: str) -> str:
    return name if part == SAMPLE else f"{part}.{name}"


def split_tensor_name(full: str) -> tuple[str, str]:
    """The part and the name of a tensor of a row; ValueError where it can't be one."""
    part, _, name = full.rpartition(".")
    part = part or SAMPLE
    if not PART_PATTERN.fullmatch(part) or not TENSOR_PATTERN.fullmatch(name) or is_reserved_name(name):
        raise ValueError(f"a tensor {full!r}")
    return part, name


def pack_row(id: str, parts: Mapping[str, ShardRow], facts: Mapping[str, Any]) -> ShardRow:
    """One row with the tensors of all `parts`. Its info: `facts`, and of each part the id, info and checksum."""
    tensors = {tensor_name(part, name): array for part, row in parts.items() for name, array in row.tensors.items()}
    described = {part: {"id": row.id, "info": row.info, "checksum": _part_checksum(row)} for part, row in parts.items()}
    return ShardRow(id, tensors, {**facts, "parts": described})


def unpack_row(row: ShardRow, verify: bool = False) -> dict[str, ShardRow]:
    """The inverse of `pack_row`. Raises one of PARSE_ERRORS for another row. verify: check each part's checksum."""
    parts = {}
    for name, value in check_object(row.info["parts"], "parts").items():
        if not PART_PATTERN.fullmatch(name):
            raise ValueError(f"a part {printable(repr(name))}")
        described = check_object(value, f"its {name}")
        check_checksum(described["checksum"], f"the checksum of its {name}")
        id, info = check_path_name(described["id"], f"the id of its {name}"), check_object(described["info"], "an info")
        parts[name] = ShardRow(id, {}, info)
    for full, array in row.tensors.items():
        part, name = split_tensor_name(full)
        parts[part].tensors[name] = array
    for name, part_row in parts.items() if verify else ():
        if _part_checksum(part_row) != row.info["parts"][name]["checksum"]:
            raise ValueError(f"the checksum of its {name} does not match")
    return parts


def _part_checksum(row: ShardRow) -> str:
    return row_checksum(row.id, canonical_json(row.info), row.tensors)


class ExportedSet(TrainSet):
    """sets/<id> of an export, read like any other set. DamageError where its tables are not those of an export."""

    packed = True

    def __init__(self, store: Store, set_id: str, meta: dict[str, Any]):
        super().__init__(store, set_id, meta)
        self._check_file("set.json", check_export_meta, meta)
        self._check_file("index.arrow", check_export_tables, self._index, self._texts, self._shards)
        self.kinds = sorted(meta["export"]["folders"].keys() - {"latents", "text"})
        if bool(meta["validation"]) != (self._shards.column("kind").to_pylist()[-1:] == [PROMPTS_KIND]):
            path = store.path(f"sets/{set_id}/shards.arrow")
            raise DamageError(path, "its last shard is not that of the validation prompts")

    def part_locations(self, row: int) -> dict[str, Location]:
        parts = super().part_locations(row)
        return {name: Location(*parts[SAMPLE][:2], location.id) for name, location in parts.items()}

    def part_rows(self, row: int, names: Collection[str] | None = None, verify: bool = False) -> dict[str, ShardRow]:
        """The same as of TrainSet. verify: check each part's checksum too."""
        parts = self.part_locations(row)
        ids = {name: location.id for name, location in parts.items() if names is None or name in names}
        return self._unpack(Location(*parts[SAMPLE][:2], packed_row_id(row, str(parts[SAMPLE].id))), ids, verify)

    def prompt_locations(self, number: int) -> dict[str, Location]:
        entry, shard = self.meta["validation"][number], self._shards.num_rows - 1
        ids: dict[str, str | None] = {name: self.text_id(entry[name]) for name in ("text", "negative")}
        ids |= {part: given["id"] for part, given in zip(REFERENCE_PARTS, entry.get("references", ()), strict=False)}
        return {name: Location(shard, number, id) for name, id in (ids | {"condition": None}).items()}

    def prompt_rows(self, number: int, verify: bool = False) -> dict[str, ShardRow]:
        """The same as of TrainSet. verify: check each part's checksum too."""
        parts = self.prompt_locations(number)
        ids = {name: location.id for name, location in parts.items() if location.id is not None}
        return self._unpack(Location(*parts["text"][:2], prompt_id(number)), ids, verify)

    def _unpack(self, location: Location, ids: Mapping[str, str | None], verify: bool) -> dict[str, ShardRow]:
        """The parts of the row at `location`; DamageError where they do not have the ids in `ids`."""
        row, path, number = self.read_row(location), self.store.path(self.shard_path(location.shard)), location.row
        with as_damage(path, "it is no row of an export", number, row.id):
            parts = unpack_row(row, verify)
        if missing := sorted(ids.keys() - parts.keys()):
            raise DamageError(path, f"it lacks its {', '.join(missing)}", number, row.id)
        for name, expected in ids.items():
            if parts[name].id != expected:
                raise DamageError(path, f"its {name} is {parts[name].id}, not {expected}", number)
        return parts


def source_fingerprints(data: TrainSet) -> dict[str, str]:
    """Kind of ordinary shard -> fingerprint of the cache that the set's rows come from."""
    if "export" in data.meta:
        return dict(data.meta["export"]["folders"])
    shards = data.tables["shards"]
    fingerprints = {}
    for kind in pc.unique(shards.column("kind")).to_pylist():
        last = np.flatnonzero(pc.equal(shards.column("kind"), kind))[-1]
        fingerprints[kind] = shards.column("path")[int(last)].as_py().split("/")[-2]
    return fingerprints


def collect_provenance(data: TrainSet) -> list[dict[str, Any]]:
    """The distinct versions of libraries and devices that the set's shards were made with."""
    if "export" in data.meta:
        return list(data.meta["export"]["made_with"])
    texts = set()
    for path in data.tables["shards"].column("path").to_pylist():
        with shard_io.open_reader(data.store, path) as shard:
            provenance = shard.meta.provenance
        several = provenance.get("made_with", [{key: provenance[key] for key in PROVENANCE_KEYS if key in provenance}])
        texts |= {canonical_json(versions) for versions in several if versions}
    return [json.loads(versions) for versions in sorted(texts)]


def collect_columns(data: TrainSet) -> dict[str, ColumnDtypes]:
    """Kind of ordinary shard -> tensor name -> dtype, of the set's shards. SetError where dtypes differ."""
    columns: dict[str, ColumnDtypes] = {}
    for shard in data.tables["shards"].to_pylist():
        for name, dtype in read_columns(data.store, shard["path"]).items():
            kind = shard["kind"]
            if kind in (SAMPLES_KIND, PROMPTS_KIND):
                with as_damage(data.store.path(shard["path"]), "it is no shard of an export"):
                    part, name = split_tensor_name(name)
                kind = kind_of(part)
            known = columns.setdefault(kind, {}).setdefault(name, dtype)
            if known != dtype:
                raise SetError(
                    f"{name} is {dtype} in {shard['path']} and {known} in other shards of the set",
                    "Shards of several precisions are mixed: encode again, then run `latentpress index`.",
                )
    return columns


def read_columns(store: Store, path: str) -> ColumnDtypes:
    """Tensor name -> dtype: from the schema of an Arrow shard, from the rows of a tar."""
    with shard_io.open_reader(store, path) as shard:
        if isinstance(shard, ArrowReader):
            return shard.columns
        rows = (shard.read(number, verify=False) for number in range(len(shard)))
        return {name: array.dtype for row in rows for name, array in row.tensors.items()}


def check_export_meta(meta: Mapping[str, Any]) -> None:
    """One of PARSE_ERRORS where set.json lacks what an export's has."""
    export = check_object(meta["export"], "export")
    version = export["version"]
    if type(version) is not int or version != EXPORT_VERSION:
        raise ValueError(f"it has export version {printable(repr(version))}; this release reads {EXPORT_VERSION}")
    folders = check_object(export["folders"], "folders")
    names = all(isinstance(name, str) and FINGERPRINT_PATTERN.fullmatch(name) for name in folders.values())
    if not names or not {"latents", "text"} <= set(folders) <= set(ENCODE_PROGRAMS):
        raise ValueError(f"folders {printable(folders)}")
    for versions in check_list(export["made_with"], "made_with"):
        check_object(versions, "versions of made_with")
    check_object(meta.get("provenance", {}), "provenance")


def check_export_tables(index: pa.Table, texts: pa.Table, shards: pa.Table) -> None:
    """ValueError where these checked tables of a set are not those of an export. Reads each once."""
    if not len(index):
        raise ValueError("the index has no row")
    for path, kind in zip(*(shards.column(name).to_pylist() for name in ("path", "kind")), strict=True):
        if not SHARD_PATH_PATTERN.fullmatch(path or "") or path.split("/")[0] != kind:
            raise ValueError(f"a shard {path!r} of kind {kind!r}")
    for column in (index.column("sample_id"), texts.column("text_id")):
        plain = pc.match_substring_regex(column, rf"\A(?:{PATH_NAME_PATTERN.pattern})\z")
        if not pc.all(plain, skip_nulls=False).as_py():
            raise ValueError("an id has characters that no id has")
    check_row_numbers(index.column("shard"), shards.column("kind").to_pylist().count(SAMPLES_KIND), "shard")
    last_shard = last_row = -1
    for first in range(0, len(index), CHECKED_ROWS):  # what is computed of a slice stays small
        part = index.slice(first, CHECKED_ROWS)
        shard, row = (np.asarray(part.column(name)) for name in ("shard", "row"))
        steps, next_row = np.diff(shard, prepend=last_shard), np.append(last_row, row[:-1]) + 1
        if not np.where(steps == 0, row == next_row, (steps == 1) & (row == 0)).all():
            raise ValueError("the index does not name the shards' rows in their order")
        last_shard, last_row = shard[-1], row[-1]


class TargetError(LatentpressError):
    """The target of an export or import holds something else."""

    exit_code = USAGE


def row_bytes(row: ShardRow) -> int:
    return sum(array.nbytes for array in row.tensors.values())


def has_shard(store: Store, path: str | None, ids: list[str]) -> bool:
    """Whether the shard at `path` exists, is undamaged and has the rows `ids`. Reads all of it."""
    if path is None or shard_io.verify(store, path):
        return False
    with shard_io.open_reader(store, path) as shard:
        return shard.meta.ids == ids


def write_shard(store: Store, meta: ShardMeta, columns: Mapping[str, str], form: str, rows: Iterable[ShardRow]) -> int:
    """Publish <kind>/<fingerprint>/<unit> in the format `form`; returns the bytes of its tensors."""
    size, stem = 0, f"{meta.kind}/{meta.fingerprint}/{meta.unit}"
    with shard_io.open_writer(store, stem, meta, columns, form) as writer:
        for row in rows:
            writer.add(row)
            size += row_bytes(row)
        writer.finish()
    return size


def without_places(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A validation prompt of set.json without the places of its images; references are named by their ids."""
    named = {**prompt, "condition": None}
    if isinstance(given := prompt.get("references"), list):
        named["references"] = [{"id": image.get("id")} for image in given if isinstance(image, dict)]
    return named


def replace_locations(index: pa.Table, locations: Mapping[str, Any]) -> pa.Table:
    """The index with other locations: (2, n) shards and rows by kind, of "latents" and of each further kind, and by
    part of references; of those that have none, nulls."""
    parts = reference_parts(index.column_names)
    nowhere = np.full((2, len(index)), -1)
    new = {
        f"{kind}_{name}".removeprefix("latents_"): pa.array(numbers, pa.int32(), mask=np.asarray(numbers) < 0)
        for kind, both in (dict.fromkeys(parts, nowhere) | {**locations}).items()
        for name, numbers in zip(("shard", "row"), both, strict=True)
    }
    schema = index_schema([kind for kind in locations if kind not in ("latents", *parts)], len(parts))
    return pa.table([new[name] if name in new else index.column(name) for name in schema.names], schema=schema)
