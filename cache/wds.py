"""Shards as WebDataset tars: `<id>.safetensors` and `<id>.json` a row, described in `<stem>.tar.json` beside.

A tar cut between two members reads as a shorter one, and finding a member means scanning; so the sidecar
holds count, size, checksums and offsets. It is published first: the tar's existence says "done".
"""

import io
import json
import math
import re
import struct
import tarfile
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO, NamedTuple, Self

import xxhash

from cache import json_checks
from cache.damage import DamageError
from cache.files import explained
from cache.shard import (
    SIDECAR_SUFFIX,
    TAR_SUFFIX,
    BaseShardReader,
    RejectedMember,
    ShardMeta,
    ShardRow,
    build_description,
    canonical_json,
    check_row,
    parse_description,
    remove_other_format,
    row_checksum,
)
from cache.store import Store
from cache.tensors import Array

#: Our dtype names and those of safetensors.
SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}
DTYPES_FROM_SAFETENSORS = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
TAR_BLOCK, TAR_RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
CHECKSUM_SUFFIX = b',"checksum":"'
READ_BYTES = 1 << 22


def to_safetensors(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file."""
    return b"".join(_safetensors_pieces(tensors))


def _safetensors_pieces(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """A safetensors file before it is joined. Made here: the library's own functions take numpy arrays, which have no
    bfloat16, or raw pointers. Wider dtypes first, so that every tensor is aligned, as the library does."""
    names = sorted(tensors, key=lambda name: (-_itemsize(tensors[name]), name))
    header, end = {}, 0
    for name in names:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)), text, *(tensors[name].raw() for name in names)]


def _itemsize(array: Array) -> int:
    return 0 if not array.nbytes else array.nbytes // math.prod(array.shape)


def from_safetensors(data: memoryview) -> dict[str, Array]:
    """Tensors as views into `data`; ValueError or KeyError where it is no safetensors file, or one whose tensors leave
    gaps or share bytes."""
    size = int(struct.unpack("<Q", data[:8])[0]) if data.nbytes >= 8 else data.nbytes
    if size > data.nbytes - 8:
        raise ValueError("the safetensors header is cut off")
    header, body = json_checks.check_object(json_checks.parse_json(data[8 : 8 + size]), "the header"), data[8 + size :]
    tensors, spans = {}, []
    for name, entry in header.items():
        start, end = json_checks.check_span(json_checks.check_object(entry, "a tensor")["data_offsets"], "data_offsets")
        spans.append((start, end))
        tensors[json_checks.check_name(name, "a tensor's name")] = Array(
            DTYPES_FROM_SAFETENSORS[json_checks.check_text(entry["dtype"], "dtype")],
            json_checks.check_shape(entry["shape"]),
            body[start:end],
        )
    spans.sort()
    if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), body.nbytes]:
        raise ValueError("the tensors do not lie one behind the other")
    return tensors


_BLANK_HEADER = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)


def tar_header(name: str, size: int) -> bytes:
    """That of a file in a tar, as tarfile makes it of a name in ASCII; in a tenth of the time."""
    block = bytearray(_BLANK_HEADER)
    block[: len(name)] = name.encode("ascii")
    block[124:135] = b"%011o" % size
    block[148:156] = b" " * 8  # the checksum's own place counts as spaces
    block[148:155] = b"%06o\0" % sum(block)
    assert len(block) == TAR_BLOCK, f"{name!r} and {size} bytes do not fit into a header"
    return bytes(block)


class _TarWriter:
    """Members one after another, with headers that depend on name and size only; counts and hashes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.hash = file, 0, xxhash.xxh3_128()

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)

    def add(self, name: str, *pieces: bytes | memoryview) -> list[int]:
        """Returns offset and size of the content, given in pieces: joining a row's copies it."""
        size = sum(map(len, pieces))
        self._write(tar_header(name, size))
        offset = self.size
        for piece in (*pieces, bytes(-size % TAR_BLOCK)):
            self._write(piece)
        return [offset, size]

    def end(self) -> None:
        self._write(bytes(2 * TAR_BLOCK))
        self._write(bytes(-self.size % TAR_RECORD))


class ShardWriter:
    """Writes `<stem>.tar` and `<stem>.tar.json`. `columns`: tensor name -> dtype. Rows are written as they
    are added, in that order."""

    def __init__(self, store: Store, stem: str, meta: ShardMeta, columns: Mapping[str, str]) -> None:
        self.store, self.meta, self.columns = store, meta, dict(columns)
        self.rel, self.sidecar = stem + TAR_SUFFIX, stem + SIDECAR_SUFFIX
        self._ids: list[str] = []
        self._taken: set[str] = set()
        self._set_aside = list(meta.set_aside)
        self._entries: list[dict[str, Any]] = []
        self._file = store.open_temp(self.rel)
        self._tar = _TarWriter(self._file)

    def add(self, row: ShardRow) -> None:
        check_row(row, self.columns, self._taken)
        # A tar's short name holds 100 bytes, and webdataset cuts keys at the first dot.
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", row.id), f"{row.id!r} can't name a member"
        info = canonical_json(row.info)
        checksum = row_checksum(row.id, info, row.tensors)
        with explained(self.store.path(self.rel)):
            places = {
                "tensors": self._tar.add(f"{row.id}.safetensors", *_safetensors_pieces(row.tensors)),
                "info": self._tar.add(f"{row.id}.json", info),
            }
        self._entries.append({"id": row.id, "checksum": checksum, **places})
        self._ids.append(row.id)
        self._taken.add(row.id)

    def set_aside(self, member: RejectedMember) -> None:
        self._set_aside.append(member)

    def finish(self) -> str:
        """Publish the sidecar, then the tar; returns the tar's path. StoreError where it can't be."""
        described = build_description(self.meta, self._ids, self._set_aside)
        with explained(self.store.path(self.rel)):
            self._tar.end()
            self._file.close()
        content = {"size": self._tar.size, "xxh3_128": self._tar.hash.hexdigest(), "rows": self._entries}
        sidecar = add_checksum(described | content)
        self._clear(sidecar)
        self.store.publish_bytes(self.sidecar, sidecar)
        self.store.publish(self._file.name, self.rel)
        self._settle(sidecar)
        return self.rel

    def _clear(self, sidecar: bytes) -> None:
        """Remove an older shard of the unit that is not the same: a tar beside another's description would be damage
        that says "done". Killed after this, the unit is done again."""
        remove_other_format(self.store, self.rel)
        if self.store.exists(self.rel) and not self._described_by(sidecar):
            self.store.remove(self.rel)

    def _described_by(self, sidecar: bytes) -> bool:
        try:
            return self.store.read_bytes(self.sidecar) == sidecar
        except FileNotFoundError:
            return False

    def _settle(self, sidecar: bytes) -> None:
        """Two workers may finish one unit at once, and, on unlike hardware, with unlike bytes. Where the tar is ours
        and the sidecar is not, put ours back. Where the tar is not ours, its writer comes here after us; unless it
        came while we put our sidecar back: then the pair is of no use, and the unit is done again."""
        if self._described_by(sidecar) or not self._tar_is_ours():
            return
        self.store.publish_bytes(self.sidecar, sidecar)
        if not self._tar_is_ours():
            self.store.remove(self.rel)

    def _tar_is_ours(self) -> bool:
        try:
            with self.store.open(self.rel) as file:
                return _hash_file(file) == self._tar.hash.hexdigest()
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tar.file = io.BytesIO()
        self.store.discard_temp(self._file)


def add_checksum(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `value` with, as its last member, the xxh3-128 of every byte before that member."""
    body = canonical_json(value)[:-1]
    return body + CHECKSUM_SUFFIX + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def parse_with_checksum(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`; ValueError where one byte of it changed."""
    body = data[: data.rfind(CHECKSUM_SUFFIX)] if CHECKSUM_SUFFIX in data else b""
    if data != body + CHECKSUM_SUFFIX + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n':
        raise ValueError("its checksum does not match")
    return json_checks.check_object(json_checks.parse_json(data), "it")


def _hash_file(file: Any) -> str:
    state = xxhash.xxh3_128()
    file.seek(0)
    while piece := file.read(READ_BYTES):
        state.update(piece)
    return state.hexdigest()


class ShardReader(BaseShardReader):
    """Reads `rel` and the sidecar beside it. Opening reads the sidecar only; a row costs two reads."""

    def _open(self) -> None:
        name = self.rel.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX
        try:
            size = self.store.size(name)
            if size > json_checks.MAX_DESCRIPTION_BYTES:
                raise DamageError(self.path, f"its description {name} has {size} bytes")
            data = self.store.read_bytes(name)
        except FileNotFoundError as error:
            raise DamageError(self.path, f"its description {name} is missing") from error
        sidecar = self.read_or_damage(lambda: parse_with_checksum(data), f"its description {name} is changed")
        self.meta = parse_description(sidecar, self.path)
        self._entries, self._hash = self.read_or_damage(
            lambda: _parse_entries(sidecar), f"its description {name} is wrong"
        )
        if [entry.id for entry in self._entries] != self.meta.ids:
            raise DamageError(self.path, f"its description {name} names other rows than it places")
        if self._size != sidecar["size"]:
            raise DamageError(self.path, f"it has {self._size} bytes and should have {sidecar['size']}")

    def _row(self, i: int) -> tuple[ShardRow, bytes, str]:
        entry = self._entries[i]
        info = self._at(entry.info).tobytes()
        tensors = from_safetensors(self._at(entry.tensors))
        return ShardRow(entry.id, tensors, json_checks.parse_json(info)), info, entry.checksum

    def _at(self, place: tuple[int, int]) -> memoryview:
        """A member's content; places were checked to lie within the file when it was opened."""
        offset, size = place
        self.file.seek(offset)
        found = memoryview(self.file.read_buffer(size)).cast("B")
        if found.nbytes != size:
            raise ValueError(f"it ends after {found.nbytes} of {size} bytes")
        return found

    def _check_file(self) -> None:
        """The whole file, headers and padding included, which random access never looks at, but tar does."""
        if self.read_or_damage(lambda: _hash_file(self.file), "it can't be read") != self._hash:
            raise DamageError(self.path, "the checksum of the whole file does not match")
        for i, entry in enumerate(self._entries):
            for place, suffix in ((entry.tensors, "safetensors"), (entry.info, "json")):
                wrong = partial(self._check_header, place, f"{entry.id}.{suffix}")
                self.read_or_damage(wrong, "the header of one of its members is wrong", i, entry.id)

    def _check_header(self, place: tuple[int, int], name: str) -> None:
        """ValueError where another reader would take the member for another: a link, another name, another size."""
        block = self._at((place[0] - TAR_BLOCK, TAR_BLOCK)).tobytes()
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error
        if (member.name, member.size) != (name, place[1]) or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ValueError(f"{member.name!r}, {member.size} bytes, type {member.type!r}, where {name!r} should be")


class RowEntry(NamedTuple):
    """Where a row lies: offset and size of its members' content."""

    id: str
    checksum: str
    tensors: tuple[int, int]
    info: tuple[int, int]


def _parse_entries(sidecar: dict[str, Any]) -> tuple[list[RowEntry], str]:
    """The rows' places, and the checksum of the whole file. ValueError or KeyError where something is not of its kind,
    or lies elsewhere than one member behind the other does."""
    entries, end = [], 0
    for value in json_checks.check_list(sidecar["rows"], "rows"):
        row = json_checks.check_object(value, "a row")
        places = [json_checks.check_span(row[part], part) for part in ("tensors", "info")]
        for offset, size in places:
            if offset != end + TAR_BLOCK:
                raise ValueError(f"a member at {offset} where one should be at {end + TAR_BLOCK}")
            end = offset + size + -size % TAR_BLOCK
        checksum = json_checks.check_checksum(row["checksum"], "a row's checksum")
        entries.append(RowEntry(json_checks.check_text(row["id"], "id"), checksum, places[0], places[1]))
    end += 2 * TAR_BLOCK
    if json_checks.check_count(sidecar["size"], "size") != end + -end % TAR_RECORD:
        raise ValueError(f"its rows take {end + -end % TAR_RECORD} bytes and it says {sidecar['size']}")
    return entries, json_checks.check_checksum(sidecar["xxh3_128"], "xxh3_128")
