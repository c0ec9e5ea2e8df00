"""Shared by both shard formats: rows and their checksum, a shard's description, base classes of writers and readers.

A shard is the output of one unit; once it exists under its final name the unit is done. docs/internals.md specifies
every byte.
"""

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, BinaryIO, ClassVar, Self

import pyarrow as pa
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from cache.shards.tensors import Array
from cache.store.damage import DamageError, as_damage, retry_bad_answers
from cache.store.json_checks import Count, EmptyName, Name, Names, check_object, printable
from cache.store.layout import STAGE_PROGRAMS
from cache.store.store import Store
from schemas.identity import hash_bytes
from schemas.tables import FORMAT_VERSION

ARROW_SUFFIX, TAR_SUFFIX, SIDECAR_SUFFIX = ".arrow", ".tar", ".tar.json"
SUFFIXES = {"arrow": ARROW_SUFFIX, "webdataset": TAR_SUFFIX}


@checked(frozen=True)
class RejectedMember:
    """A member of the unit that could not be encoded."""

    id: Name
    reason: Name
    message: str


@checked(frozen=True)
class TruncatedText:
    """A row whose text has more tokens than the limit: only the first `kept` of `tokens` are encoded."""

    id: Name
    tokens: Count
    kept: Count


@checked(config=ConfigDict(allow_inf_nan=False))
class ShardMeta:
    """The description of a shard. In a writer's description, `ids` are the unit's planned members (or empty), and
    `truncated` may grow until `finish`. In a description read from a shard, `ids` are the ids of its rows in order."""

    kind: Name
    fingerprint: Name
    unit: Name
    bucket: EmptyName
    ids: Names = field(default_factory=list)
    rejects: list[RejectedMember] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    truncated: list[TruncatedText] = field(default_factory=list)


@dataclass
class ShardRow:
    """One sample or text: its tensors by name (without absent tensors) and a small JSON object."""

    id: str
    tensors: dict[str, Array]
    info: dict[str, Any] = field(default_factory=dict)


class BaseShardWriter(ABC):
    """Writes a shard, its rows in the order in which they are added. A context manager: leaving it before `finish`
    leaves nothing behind. columns: tensor name -> dtype."""

    suffix: ClassVar[str]
    _file: BinaryIO

    def __init__(self, store: Store, stem: str, meta: ShardMeta, columns: Mapping[str, str]) -> None:
        self.store, self.rel, self.meta, self.columns = store, stem + self.suffix, meta, dict(columns)
        self._ids: dict[str, None] = {}  # ids of the rows, in order
        self._rejects = list(meta.rejects)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Open `_file`, a temporary file of the store."""

    @abstractmethod
    def _write(self, row: ShardRow, info: bytes, checksum: str) -> None:
        """Write one row. info: its JSON as it is stored."""

    @abstractmethod
    def finish(self) -> str:
        """Publish the shard and return its relative path. Raises StoreError if the shard can't be written."""

    def add(self, row: ShardRow) -> None:
        assert row.id and row.id not in self._ids, f"the id {row.id!r} is empty or repeated"
        for name, array in row.tensors.items():
            announced = self.columns.get(name)
            assert array.dtype == announced, f"row {row.id}: {name} is {array.dtype}, announced as {announced}"
        info = canonical_json(row.info)
        with self.store.writing(self.rel):
            self._write(row, info, row_checksum(row.id, info, row.tensors))
        self._ids[row.id] = None

    def reject(self, member: RejectedMember) -> None:
        self._rejects.append(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.discard_temp(self._file)


class BaseShardReader(ABC):
    """Reads one shard; twin of BaseShardWriter. Opening raises DamageError if the shard can't be read at all. Several
    threads may not use a reader at once; rows stay valid after `close`."""

    meta: ShardMeta

    def __init__(self, store: Store, rel: str) -> None:
        self.store, self.rel, self.path = store, rel, store.path(rel)
        with as_damage(self.path, "it can't be opened"):
            self.file = store.open(rel)
        try:
            self._size = self.file.size()
            self._open()
            parts, described = rel.split("/"), (self.meta.kind, self.meta.fingerprint, self.meta.unit)
            if len(parts) == 3 and parts[0] in STAGE_PROGRAMS and (*parts[:2], unit_name(parts[2])) != described:
                raise DamageError(self.path, f"its name is wrong: its description is for {'/'.join(described)}")
        except BaseException:
            self.file.close()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Read the description into `meta`."""

    @abstractmethod
    def _row(self, i: int) -> tuple[ShardRow, bytes, str]:
        """Return row `i`, its info as stored, and its stored checksum. Raises one of PARSE_ERRORS if the row can't be
        read."""

    @abstractmethod
    def _check_file(self) -> None:
        """Raise DamageError for damage that reading every row does not reveal."""

    def __len__(self) -> int:
        return len(self.meta.ids)

    def read(self, i: int, verify: bool = True) -> ShardRow:
        """Return row `i`; its tensors are views into a local file. Raises DamageError if the row differs from the row
        written; with verify=False, only if the row can't be read or has a different id."""
        if not 0 <= i < len(self):
            raise DamageError(self.path, f"it has {len(self)} rows", i)
        return retry_bad_answers(self.store.remote_url, partial(self._read, i, verify), self.file)

    def _read(self, i: int, verify: bool = True) -> ShardRow:
        # Reading a memory map beyond the end of a file that was cut kills the process, and no handler helps. This check
        # takes 2 microseconds; only a file that is cut within the next few can still kill.
        if isinstance(self.file, pa.MemoryMappedFile):
            size = os.fstat(self.file.fileno()).st_size
            if size < self._size:
                raise DamageError(self.path, f"it was cut while it was open, from {self._size} to {size} bytes")
        id = self.meta.ids[i]
        with as_damage(self.path, "it can't be read", i, id):
            row, info, checksum = self._row(i)
            if row.id != id:
                stored = printable(repr(row.id))
                raise DamageError(self.path, f"its id is {stored}, but the description has {id!r}", i, id)
            check_object(row.info, "its info")
        if verify and row_checksum(row.id, info, row.tensors) != checksum:
            raise DamageError(self.path, "its checksum does not match", i, id)
        return row

    def verify(self, check_row: Callable[[ShardRow], object] | None = None) -> list[DamageError]:
        """Read every byte once and return all damage. check_row: function that raises ValueError for further
        problems of an undamaged row."""
        damages = []
        try:
            self._check_file()
        except DamageError as damage:
            damages.append(damage)
        for i, id in enumerate(self.meta.ids):
            try:
                row = self._read(i)
                if check_row is not None:
                    check_row(row)
            except DamageError as damage:
                damages.append(damage)
            except ValueError as error:
                damages.append(DamageError(self.path, str(error), i, id))
        return damages

    def close(self) -> None:
        """Release the file; rows read from a memory map keep their part of it."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def unit_name(name: str) -> str:
    return name.removesuffix(ARROW_SUFFIX).removesuffix(TAR_SUFFIX)


def find_done_units(store: Store, prefix: str) -> dict[str, str]:
    """Return unit -> path of its shard for every finished unit in folder `prefix`. Takes one listing."""
    names = [name for name in store.list_names(prefix) if "/" not in name]
    finished = {unit_name(name): f"{prefix}/{name}" for name in names if name.endswith(TAR_SUFFIX)}
    return finished | {unit_name(name): f"{prefix}/{name}" for name in names if name.endswith(ARROW_SUFFIX)}


def remove_other_format(store: Store, rel: str) -> None:
    """Remove the unit's shard in the other format, in case `cache.format` changed, because two shards could differ. The
    tar is removed before its sidecar, because the tar marks the unit as finished."""
    for suffix in (TAR_SUFFIX, SIDECAR_SUFFIX) if rel.endswith(ARROW_SUFFIX) else (ARROW_SUFFIX,):
        store.remove(unit_name(rel) + suffix)


def canonical_json(value: Any) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, UTF-8, NaN refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def row_checksum(id: str, info: bytes, tensors: Mapping[str, Array]) -> str:
    """Return the xxh3-128 over id, info and each present tensor's name, dtype, shape and bytes, sorted by name. Each
    part is preceded by its length (8 bytes, little-endian), so different rows never hash the same bytes."""
    parts: list[Any] = [id.encode(), info]
    for name in sorted(tensors):
        array = tensors[name]
        shape = struct.pack(f"<{len(array.shape)}q", *array.shape)
        parts += [name.encode(), array.dtype.encode(), shape, array.raw()]
    return hash_bytes(*parts)


def build_description(meta: ShardMeta, ids: Collection[str], rejects: Collection[RejectedMember]) -> dict[str, Any]:
    """Return the JSON object in a finished shard. Rejected members and truncated texts are sorted, because they are
    found in any order."""
    if meta.ids:
        unlike = {*ids, *(member.id for member in rejects)} ^ set(meta.ids)
        assert not unlike, f"unit {meta.unit}: members that are not planned or are missing: {unlike}"
    ordered = sorted((asdict(member) for member in rejects), key=lambda member: tuple(member.values()))
    truncated = sorted((asdict(row) for row in meta.truncated), key=itemgetter("id"))
    return asdict(meta) | {"ids": list(ids), "count": len(ids), "rejects": ordered, "truncated": truncated}


_META = TypeAdapter(ShardMeta)


def parse_description(value: Any, path: str) -> ShardMeta:
    """The inverse of `build_description`. Raises DamageError if the description is incomplete, wrong or has a different
    format version."""
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        stored = printable(repr(version))
        raise DamageError(path, f"its format version is {stored}; this release reads {FORMAT_VERSION}")
    try:
        meta = _META.validate_python(value)
        if value.get("count") != len(meta.ids):
            raise ValueError(f"its count is {value.get('count')}, but it has {len(meta.ids)} row ids")
        if not {member.id for member in meta.rejects}.isdisjoint(meta.ids):
            raise ValueError("a member is both a row and rejected")
        if not {row.id for row in meta.truncated}.issubset(meta.ids):
            raise ValueError("a truncated text is not a row")
        return meta
    except ValueError as error:
        raise DamageError(path, f"its description is incomplete or wrong ({printable(error)})") from error
