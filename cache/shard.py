"""What both shard formats share: rows and their checksum, the description a shard carries, the checks of a reader.

A shard is the output of one unit. Its existence under its final name is the record that the unit is done.
docs/cache-format.md specifies every byte.
"""

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, Self, TypeVar

import pyarrow as pa

from cache import json_checks
from cache.damage import SHARD_PROGRAMS, DamageError, read_or_damage
from cache.files import explained
from cache.store import Store
from cache.tensors import Array
from schemas.identity import hash_bytes
from schemas.tables import FORMAT_VERSION

ARROW_SUFFIX, TAR_SUFFIX, SIDECAR_SUFFIX = ".arrow", ".tar", ".tar.json"
SUFFIXES = {"arrow": ARROW_SUFFIX, "webdataset": TAR_SUFFIX}
T = TypeVar("T")


@dataclass(frozen=True)
class RejectedMember:
    """A member of the unit that could not be encoded."""

    id: str
    reason: str
    message: str


@dataclass(frozen=True)
class TruncatedText:
    """A row whose text has more tokens than the limit: of `tokens` the first `kept` are encoded."""

    id: str
    tokens: int
    kept: int


@dataclass
class ShardMeta:
    """What a shard says of itself. Given to a writer, `ids` are the unit's planned members (or empty), and `truncated`
    may be added to until `finish`; read from a shard `ids` are its rows, in order."""

    kind: str
    fingerprint: str
    unit: str
    bucket: str
    ids: list[str] = field(default_factory=list)
    set_aside: list[RejectedMember] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    truncated: list[TruncatedText] = field(default_factory=list)


@dataclass
class ShardRow:
    """One sample or text: its tensors by name (an absent one is left out) and a small JSON object."""

    id: str
    tensors: dict[str, Array]
    info: dict[str, Any] = field(default_factory=dict)


class ShardWriter(Protocol):
    """A context manager; leaving it before `finish` leaves nothing behind."""

    def add(self, row: ShardRow) -> None: ...
    def set_aside(self, member: RejectedMember) -> None: ...
    def finish(self) -> str: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


class BaseShardReader(ABC):
    """A reader of one shard, twin of a ShardWriter. Opening raises DamageError where the shard can't be read
    at all. Not safe for several threads at once; rows stay valid after `close`."""

    meta: ShardMeta

    def __init__(self, store: Store, rel: str) -> None:
        self.store, self.rel, self.path = store, rel, store.path(rel)
        try:
            self.file = store.open(rel)
        except FileNotFoundError as error:
            raise DamageError(self.path, "the file is missing") from error
        try:
            self._size = self.file.size()
            self._open()
            for damage in check_location(self.meta, rel, self.path):
                raise damage
        except BaseException:
            self.file.close()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Read the description into `meta`."""

    @abstractmethod
    def _row(self, i: int) -> tuple[ShardRow, bytes, str]:
        """Row `i`, its info as stored, and its stored checksum; any of PARSE_ERRORS where it can't be read."""

    @abstractmethod
    def _check_file(self) -> None:
        """DamageError where something is wrong that reading every row would not show."""

    def __len__(self) -> int:
        return len(self.meta.ids)

    def read(self, i: int, verify: bool = True) -> ShardRow:
        """Row `i`, its tensors being views into the file where that is local. DamageError where the row is
        not what was written; with verify=False only where it can't be read or is another row."""
        if not 0 <= i < len(self):
            raise DamageError(self.path, f"it has {len(self)} rows", i)
        id = self.meta.ids[i]
        self._check_length()
        return self.read_or_damage(lambda: self._checked(i, id, verify), "it can't be read", i, id)

    def _checked(self, i: int, id: str, verify: bool) -> ShardRow:
        row, info, checksum = self._row(i)
        if row.id != id:
            found = json_checks.printable(repr(row.id))
            raise DamageError(self.path, f"its id is {found} where the description names {id!r}", i, id)
        json_checks.check_object(row.info, "its info")
        if verify and row_checksum(row.id, info, row.tensors) != checksum:
            raise DamageError(self.path, "its checksum does not match", i, id)
        return row

    def _check_length(self) -> None:
        """Reading a memory map beyond the end of a file that was cut kills the process, and no handler helps. So ask
        before each row, which takes 2 microseconds; only a file cut within the next few can still kill."""
        if isinstance(self.file, pa.MemoryMappedFile):
            size = os.fstat(self.file.fileno()).st_size
            if size < self._size:
                raise DamageError(self.path, f"it was cut while it was open: it had {self._size} bytes and has {size}")

    def verify(self, look: Callable[[ShardRow], object] | None = None) -> list[DamageError]:
        """Read everything; every damage found. look: given each row that is as it was written, it raises ValueError
        with what is wrong with it all the same."""
        checks: list[Callable[[], object]] = [
            self._check_file,
            *(partial(self._check_row, i, look) for i in range(len(self))),
        ]
        return [damage for check in checks if (damage := _catch_damage(check))]

    def _check_row(self, i: int, look: Callable[[ShardRow], object] | None) -> None:
        row = self.read(i)
        if look is not None:
            try:
                look(row)
            except ValueError as error:
                raise DamageError(self.path, str(error), i, row.id) from error

    def read_or_damage(self, read: Callable[[], T], reason: str, row: int | None = None, id: str | None = None) -> T:
        """`read()`, with what it raises on bytes that are not what they should be turned into DamageError. A disk
        or a network that fails is no damage: StoreError."""
        with explained(self.path):
            return read_or_damage(self.path, read, reason, row, id)

    def close(self) -> None:
        """Release the file; rows read from a memory map keep their part of it."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _catch_damage(check: Callable[[], object]) -> DamageError | None:
    try:
        check()
    except DamageError as damage:
        return damage
    return None


def check_location(meta: ShardMeta, rel: str, path: str) -> list[DamageError]:
    """Damage where the shard lies as <kind>/<fingerprint>/<unit> of which it says otherwise of itself."""
    parts = rel.split("/")
    if len(parts) != 3 or parts[0] not in SHARD_PROGRAMS:
        return []
    found = (parts[0], parts[1], unit_name(parts[2]))
    said = (meta.kind, meta.fingerprint, meta.unit)
    return [] if found == said else [DamageError(path, f"it is shard {'/'.join(said)} under another name")]


def unit_name(name: str) -> str:
    return name.removesuffix(ARROW_SUFFIX).removesuffix(TAR_SUFFIX)


def find_done_units(store: Store, prefix: str) -> dict[str, str]:
    """Unit -> path of its shard, for every finished unit in folder `prefix`; one listing."""
    names = [name for name in store.list_names(prefix) if "/" not in name]
    done = {unit_name(name): f"{prefix}/{name}" for name in names if name.endswith(TAR_SUFFIX)}
    return done | {unit_name(name): f"{prefix}/{name}" for name in names if name.endswith(ARROW_SUFFIX)}


def remove_shard(store: Store, rel: str) -> None:
    """Remove a shard: the file that says "done" first, then the description beside it."""
    store.remove(rel)
    if rel.endswith(TAR_SUFFIX):
        store.remove(rel.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX)


def remove_other_format(store: Store, rel: str) -> None:
    """Remove the unit's shard in the other format: a unit done again after a change of `cache.format` has one
    shard, not two that differ."""
    if rel.endswith(ARROW_SUFFIX):
        remove_shard(store, rel.removesuffix(ARROW_SUFFIX) + TAR_SUFFIX)
    else:
        store.remove(rel.removesuffix(TAR_SUFFIX) + ARROW_SUFFIX)


def canonical_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8, NaN refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def row_checksum(id: str, info: bytes, tensors: Mapping[str, Array]) -> str:
    """xxh3-128 over id, info and each present tensor's name, dtype, shape and bytes, sorted by name. Each
    part is preceded by its length (8 bytes, little-endian), so no two rows share a framing."""
    parts: list[Any] = [id.encode(), info]
    for name in sorted(tensors):
        array = tensors[name]
        shape = struct.pack(f"<{len(array.shape)}q", *array.shape)
        parts += [name.encode(), array.dtype.encode(), shape, array.raw()]
    return hash_bytes(*parts)


def build_description(meta: ShardMeta, ids: Sequence[str], set_aside: Sequence[RejectedMember]) -> dict[str, Any]:
    """The JSON object that a finished shard carries. Members set aside and truncated rows are sorted: they may have
    been found in any order."""
    if meta.ids:
        accounted = {*ids, *(member.id for member in set_aside)}
        unlike = accounted ^ set(meta.ids)
        assert not unlike, f"unit {meta.unit}: members lost or invented: {unlike}"
    aside = sorted((asdict(member) for member in set_aside), key=lambda member: tuple(member.values()))
    truncated = sorted((asdict(row) for row in meta.truncated), key=itemgetter("id"))
    return asdict(meta) | {"ids": list(ids), "count": len(ids), "set_aside": aside, "truncated": truncated}


def parse_description(value: Any, path: str) -> ShardMeta:
    """The inverse of `describe`; DamageError where a part is missing or no such thing, or of another format version."""
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        found = json_checks.printable(repr(version))
        raise DamageError(path, f"its format version is {found}; this program reads {FORMAT_VERSION}")
    try:
        meta = ShardMeta(
            kind=json_checks.check_name(value["kind"], "kind"),
            fingerprint=json_checks.check_name(value["fingerprint"], "fingerprint"),
            unit=json_checks.check_name(value["unit"], "unit"),
            bucket=json_checks.check_name(value["bucket"], "bucket", empty=True),
            ids=json_checks.check_names(value["ids"], "ids"),
            set_aside=[_parse_rejected(member) for member in json_checks.check_list(value["set_aside"], "set_aside")],
            truncated=[
                _parse_truncated(row) for row in json_checks.check_list(value.get("truncated", []), "truncated")
            ],
            provenance=json_checks.check_object(value["provenance"], "provenance"),
        )
        if json_checks.check_count(value["count"], "count") != len(meta.ids):
            raise ValueError(f"it says that it has {value['count']} rows and names {len(meta.ids)}")
        if not {member.id for member in meta.set_aside}.isdisjoint(meta.ids):
            raise ValueError("a member is both a row and set aside")
        if not {row.id for row in meta.truncated}.issubset(meta.ids):
            raise ValueError("a text is truncated that is no row")
        return meta
    except (KeyError, ValueError) as error:
        raise DamageError(path, f"its description is incomplete or wrong ({json_checks.printable(error)})") from error


def _parse_rejected(value: Any) -> RejectedMember:
    member = json_checks.check_object(value, "a member set aside")
    if set(member) != {"id", "reason", "message"}:
        raise ValueError(f"a member set aside has {json_checks.printable(sorted(member))}")
    id, reason = json_checks.check_name(member["id"], "an id"), json_checks.check_name(member["reason"], "a reason")
    return RejectedMember(id, reason, json_checks.check_text(member["message"], "a message"))


def _parse_truncated(value: Any) -> TruncatedText:
    row = json_checks.check_object(value, "a truncated row")
    if set(row) != {"id", "tokens", "kept"}:
        raise ValueError(f"a truncated row has {json_checks.printable(sorted(row))}")
    tokens, kept = json_checks.check_count(row["tokens"], "tokens"), json_checks.check_count(row["kept"], "kept")
    return TruncatedText(json_checks.check_name(row["id"], "an id"), tokens, kept)


def check_row(row: ShardRow, columns: Mapping[str, str], taken: set[str]) -> None:
    """Our own mistakes in a row to be written: a tensor or dtype not announced, an id twice."""
    assert row.id and row.id not in taken, f"row {row.id!r} is empty or there already"
    for name, array in row.tensors.items():
        announced = columns.get(name)
        assert array.dtype == announced, f"row {row.id}: {name} is {array.dtype}, announced as {announced}"
