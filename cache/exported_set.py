"""A training set as an export holds it: everything that belongs to a sample lies in one row.

An export is a root of its own: `sets/<id>` over shards of the kinds "samples" and "prompts", which need no other
file. One of their rows is several rows of ordinary shards put together, its parts: "sample" (of a latents shard),
others called like the kind of their shard ("vision"), "text0", "text1", ... (its captions, which are alternatives) and
"null". A validation prompt's are "text", "negative" and "condition". The tensors of "sample" keep their names; those of
another part are "<part>.<name>". So a text that many samples share stands in each of their rows, and a row needs
nothing beside itself.

What is read here may come from anywhere. Tables, names and numbers are checked before they are followed.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache import table_checks
from cache.arrow import ShardReader as ArrowReader
from cache.arrow import is_reserved_name
from cache.damage import ENCODE_PROGRAMS, PARSE_ERRORS, DamageError
from cache.json_checks import (
    PATH_NAME_PATTERN,
    check_checksum,
    check_list,
    check_object,
    check_path_name,
    check_text,
    printable,
)
from cache.shard import ShardRow, canonical_json, row_checksum
from cache.shard_io import open_reader
from cache.store import Store
from cache.tensor_checks import SAMPLE, kind_of
from cache.trainset import SetError, TrainSet

EXPORT_VERSION = 1
SAMPLES_KIND, PROMPTS_KIND = "samples", "prompts"  # kinds of shards
PROVENANCE_KEYS = ("libraries", "device")  # of a shard's provenance: what is not of its unit alone
OF_SAMPLE = "|".join(
    sorted(ENCODE_PROGRAMS.keys() - {"latents", "text"})
)  # further parts, called like their kinds of shards
PART_PATTERN = re.compile(rf"sample|text|null|negative|condition|{OF_SAMPLE}|text(0|[1-9][0-9]{{0,5}})")
TENSOR_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")
FINGERPRINT_PATTERN = re.compile(r"[0-9a-f]{24}", re.ASCII)  # a fingerprint
SHARD_PATH_PATTERN = re.compile(rf"(samples|prompts)/{PATH_NAME_PATTERN.pattern}/[0-9]{{6,9}}\.(arrow|tar)", re.ASCII)

ColumnDtypes = dict[str, str]  # tensor name -> dtype


def row_id(number: int, sample_id: str) -> str:
    """The id of row `number` of the index: two files of the same bytes are two rows of one sample."""
    return f"{number:08d}-{sample_id}"


def prompt_id(number: int) -> str:
    return f"prompt-{number:04d}"


def tensor_name(part: str, name: str) -> str:
    return name if part == SAMPLE else f"{part}.{name}"


def split_tensor_name(full: str) -> tuple[str, str]:
    """The part and the name of a tensor of a row; ValueError where it can be none."""
    part, _, name = full.rpartition(".")
    part = part or SAMPLE
    if not PART_PATTERN.fullmatch(part) or not TENSOR_PATTERN.fullmatch(name) or is_reserved_name(name):
        raise ValueError(f"a tensor {full!r}")
    return part, name


def part_columns(columns: Mapping[str, ColumnDtypes], parts: Iterable[str]) -> ColumnDtypes:
    """The columns of a shard whose rows have these parts. columns: kind -> its columns."""
    return {
        tensor_name(part, name): dtype
        for part in parts
        for name, dtype in sorted(columns.get(kind_of(part), {}).items())
    }


def pack_row(id: str, parts: Mapping[str, ShardRow], facts: Mapping[str, Any]) -> ShardRow:
    """One row of the rows in `parts`. Its info: `facts`, and of each part its id, info and checksum."""
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
        parts[name] = ShardRow(
            check_path_name(described["id"], f"the id of its {name}"), {}, check_object(described["info"], "an info")
        )
    for full, array in row.tensors.items():
        part, name = split_tensor_name(full)
        parts[part].tensors[name] = array
    for name, one in parts.items() if verify else ():
        if _part_checksum(one) != row.info["parts"][name]["checksum"]:
            raise ValueError(f"the checksum of its {name} does not match")
    return parts


def _part_checksum(row: ShardRow) -> str:
    return row_checksum(row.id, canonical_json(row.info), row.tensors)


class ExportedSet(TrainSet):
    """sets/<id> of an export, read as any other set is. SetError where its tables are not those of an export."""

    def __init__(self, store: Store, set_id: str, meta: dict[str, Any]):
        super().__init__(store, set_id, meta)
        self._attempt("set.json", lambda: check_export_meta(meta))
        self._attempt("index.arrow", lambda: check_export_tables(self._index, self._texts, self._shards))
        self.kinds = sorted(meta["export"]["folders"].keys() - {"latents", "text"})
        if bool(meta["validation"]) != (self._shards.column("kind").to_pylist()[-1:] == [PROMPTS_KIND]):
            path = store.path(f"sets/{set_id}/shards.arrow")
            raise DamageError(path, "its last shard is not that of the validation prompts")

    def part_rows(self, row: int, names: Collection[str] | None = None, verify: bool = False) -> dict[str, ShardRow]:
        ids = {name: self.part_id(row, name) for name in (self.part_names(row) if names is None else names)}
        return self._unpack(self._place(row), row_id(row, ids.get(SAMPLE) or self.part_id(row, SAMPLE)), ids, verify)

    def prompt_rows(self, number: int, verify: bool = False) -> dict[str, ShardRow]:
        entry = self.meta["validation"][number]
        ids = {name: self.text_id(entry[name]) for name in ("text", "negative")}
        return self._unpack(self._prompt_place(number), prompt_id(number), ids, verify)

    def _place(self, row: int, name: str = SAMPLE) -> tuple[int, int]:
        return super()._place(row, SAMPLE)

    def _prompt_place(self, number: int, name: str = "") -> tuple[int, int]:
        return self._shards.num_rows - 1, number

    def _unpack(self, place: tuple[int, int], id: str, ids: Mapping[str, str], verify: bool) -> dict[str, ShardRow]:
        """The parts of the row `id` at `place`; DamageError where they are not those whose ids are in `ids`."""
        (shard, at), row = place, self._read(*place, id)
        try:
            parts = unpack_row(row, verify)
        except PARSE_ERRORS as error:
            raise DamageError(self._path(shard), f"it is no row of an export ({error})", at, row.id) from error
        if missing := sorted(ids.keys() - parts.keys()):
            raise DamageError(self._path(shard), f"it lacks its {', '.join(missing)}", at, row.id)
        for name, wanted in ids.items():
            if parts[name].id != wanted:
                raise DamageError(self._path(shard), f"its {name} is {parts[name].id}, not {wanted}", at)
        return parts


def source_fingerprints(data: TrainSet) -> dict[str, str]:
    """kind of ordinary shard -> the fingerprint of the cache that the set's rows come from."""
    if "export" in data.meta:
        return dict(data.meta["export"]["folders"])
    shards = data.tables["shards"]
    return {row["kind"]: row["path"].split("/")[-2] for row in shards.to_pylist()}


def collect_provenance(data: TrainSet) -> list[dict[str, Any]]:
    """What the set's shards say they were made with, each of what differs once: versions of libraries and device."""
    if "export" in data.meta:
        return list(data.meta["export"]["made_with"])
    found = set()
    for path in data.tables["shards"].column("path").to_pylist():
        with open_reader(data.store, path) as shard:
            provenance = shard.meta.provenance
        several = provenance.get("made_with", [{key: provenance[key] for key in PROVENANCE_KEYS if key in provenance}])
        found |= {canonical_json(one) for one in several if one}
    return [json.loads(one) for one in sorted(found)]


def collect_columns(data: TrainSet) -> dict[str, ColumnDtypes]:
    """kind of ordinary shard -> tensor name -> dtype, of everything that the set's shards hold. SetError where they
    differ in a dtype."""
    found: dict[str, ColumnDtypes] = {}
    for shard in data.tables["shards"].to_pylist():
        for full, dtype in read_columns(data.store, shard["path"]).items():
            kind, name = shard["kind"], full
            if kind in (SAMPLES_KIND, PROMPTS_KIND):
                try:
                    part, name = split_tensor_name(full)
                except ValueError as error:
                    raise DamageError(
                        data.store.path(shard["path"]), f"it is no shard of an export: {error}"
                    ) from error
                kind = kind_of(part)
            known = found.setdefault(kind, {}).setdefault(name, dtype)
            if known != dtype:
                raise SetError(
                    f"{name} is {dtype} in {shard['path']} and {known} in other shards of the set",
                    "Shards of several precisions are mixed: encode them anew, then run `latentpress index`.",
                )
    return found


def read_columns(store: Store, path: str) -> ColumnDtypes:
    """tensor name -> dtype: as an Arrow shard announces them; a tar's are found by its rows' headers."""
    with open_reader(store, path) as shard:
        if isinstance(shard, ArrowReader):
            return shard.columns
        rows = (shard.read(number, verify=False) for number in range(len(shard)))
        return {name: array.dtype for row in rows for name, array in row.tensors.items()}


def check_export_meta(meta: Mapping[str, Any]) -> None:
    """ValueError, or another of PARSE_ERRORS, where set.json has not what an export's has."""
    export = check_object(meta["export"], "export")
    if type(export["version"]) is not int or export["version"] != EXPORT_VERSION:
        raise ValueError(
            f"it has export version {printable(repr(export['version']))}; this release reads {EXPORT_VERSION}"
        )
    folders = check_object(export["folders"], "folders")
    if not set(folders) <= set(ENCODE_PROGRAMS) or not all(
        FINGERPRINT_PATTERN.fullmatch(check_text(one, "a folder")) for one in folders.values()
    ):
        raise ValueError(f"folders {printable(folders)}")
    if not {"latents", "text"} <= set(folders):
        raise ValueError(f"folders {printable(folders)}")
    for one in check_list(export["made_with"], "made_with"):
        check_object(one, "one of made_with")
    check_object(meta.get("provenance", {}), "provenance")


def check_export_tables(index: pa.Table, texts: pa.Table, shards: pa.Table) -> None:
    """ValueError where these sound tables of a set are none of an export. Reads each whole, once."""
    for path, kind in zip(*(shards.column(name).to_pylist() for name in ("path", "kind")), strict=True):
        if not SHARD_PATH_PATTERN.fullmatch(path or "") or path.split("/")[0] != kind:
            raise ValueError(f"a shard {path!r} of kind {kind!r}")
    for column in (index.column("sample_id"), texts.column("text_id")):
        if not pc.all(pc.match_substring_regex(column, f"^{PATH_NAME_PATTERN.pattern}$")).as_py():
            raise ValueError("an id has characters that no id has")
    if pc.count_distinct(texts.column("text_id")).as_py() != texts.num_rows:
        raise ValueError("a text stands twice")
    table_checks.check_row_numbers(
        index.column("shard"), shards.column("kind").to_pylist().count(SAMPLES_KIND), "shard"
    )
    _check_row_order(np.asarray(index.column("shard")), np.asarray(index.column("row")))


def _check_row_order(shard: np.ndarray, row: np.ndarray) -> None:
    """Rows of the index are those of its shards, one after another."""
    first = np.flatnonzero(np.diff(shard, prepend=-1))
    counted = np.arange(len(shard)) - np.repeat(first, np.diff(first, append=len(shard)))
    if not np.array_equal(shard[first], np.arange(len(first))) or not np.array_equal(row, counted):
        raise ValueError("the index does not name the shards' rows in their order")
