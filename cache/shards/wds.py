"""Shards as WebDataset tars: `<id>.safetensors` and `<id>.json` for each row, and a sidecar `<stem>.tar.json`.

A tar that was cut between two members reads like a shorter tar, and a member is found only by scanning. So the sidecar
holds count, size, checksums and offsets. The sidecar is published first, because the tar marks the unit as finished.
"""

import json
import math
import re
import struct
import tarfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import xxhash

from cache.shards import shard
from cache.shards.tensors import Array
from cache.store import json_checks
from cache.store.damage import DamageError, as_damage
from schemas import json_records

#: Name of a dtype in safetensors -> name of the dtype in latentpress.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64", "U8": "uint8"}
DTYPES |= {"I8": "int8", "F8_E4M3": "float8_e4m3fn"}
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TAR_BLOCK, TAR_RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
CHECKSUM_SUFFIX = b',"checksum":"'
READ_BYTES = 1 << 22


def to_safetensors(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """Return a safetensors file in pieces, which are views of the tensors if possible. The safetensors library is not
    used, because its functions take numpy arrays, which have no bfloat16, or raw pointers. As in the library, wider
    dtypes come first, so that each tensor is aligned."""

    def order(name: str) -> tuple[int, str]:
        array = tensors[name]
        return -(array.nbytes // math.prod(array.shape)) if array.nbytes else 0, name

    header, end, names = {}, 0, sorted(tensors, key=order)
    for name in names:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {"dtype": SAFETENSORS_NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)), text, *(tensors[name].raw() for name in names)]


def from_safetensors(data: memoryview) -> dict[str, Array]:
    """Return the tensors of a safetensors file as views into `data`. Raises ValueError or KeyError unless `data` is a
    safetensors file without gaps or overlaps."""
    size = int(struct.unpack("<Q", data[:8])[0]) if data.nbytes >= 8 else data.nbytes
    if size > data.nbytes - 8:
        raise ValueError("the safetensors header is cut off")
    header, body = json_checks.check_object(json_records.parse_json(data[8 : 8 + size]), "the header"), data[8 + size :]
    tensors, spans = {}, []
    for name, entry in header.items():
        start, end = (json_checks.check_count(at, "an offset") for at in entry["data_offsets"])
        spans.append((start, end))
        dtype, shape = DTYPES[json_checks.check_text(entry["dtype"], "dtype")], json_checks.check_shape(entry["shape"])
        tensors[json_checks.check_name(name, "a tensor's name")] = Array(dtype, shape, body[start:end])
    spans.sort()
    if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), body.nbytes]:
        raise ValueError("the tensors leave gaps or share bytes")
    return tensors


class _TarWriter:
    """Writes members one after another, with headers that depend on name and size only; counts and hashes bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.hash = file, 0, xxhash.xxh3_128()

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)

    def add(self, name: str, *pieces: bytes | memoryview) -> list[int]:
        """Write a member and return its offset and size. pieces: its content in pieces, because joining them would
        copy."""
        member = tarfile.TarInfo(name)
        member.size = size = sum(map(len, pieces))
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        offset = self.size
        for piece in (*pieces, bytes(-size % TAR_BLOCK)):
            self._write(piece)
        return [offset, size]

    def end(self) -> None:
        self._write(bytes(2 * TAR_BLOCK))
        self._write(bytes(-self.size % TAR_RECORD))


class ShardWriter(shard.BaseShardWriter):
    """Writes `<stem>.tar` and `<stem>.tar.json`."""

    suffix = shard.TAR_SUFFIX

    def _open(self) -> None:
        self.sidecar = self.rel.removesuffix(shard.TAR_SUFFIX) + shard.SIDECAR_SUFFIX
        self._entries: list[dict[str, Any]] = []
        self._file = self.store.open_temp(self.rel)
        self._tar = _TarWriter(self._file)

    def _write(self, row: shard.ShardRow, info: bytes, checksum: str) -> None:
        # A tar's short name holds 100 bytes, and webdataset cuts keys at the first dot.
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", row.id), f"{row.id!r} can't name a member"
        spans = {
            "tensors": self._tar.add(f"{row.id}.safetensors", *to_safetensors(row.tensors)),
            "info": self._tar.add(f"{row.id}.json", info),
        }
        self._entries.append({"id": row.id, "checksum": checksum, **spans})

    def finish(self) -> str:
        """Publish the sidecar, then the tar; returns the tar's path. Raises StoreError if writing fails."""
        described = shard.build_description(self.meta, self._ids, self._rejects)
        with self.store.writing(self.rel):
            self._tar.end()
        content = {"size": self._tar.size, "xxh3_128": self._tar.hash.hexdigest(), "rows": self._entries}
        sidecar = add_checksum(described | content)
        # An older tar that does not match this sidecar would be damage that counts as finished. If a kill follows its
        # removal, the unit is encoded again.
        shard.remove_other_format(self.store, self.rel)
        if self.store.exists(self.rel) and not self._has_sidecar(sidecar):
            self.store.remove(self.rel)
        self.store.publish_bytes(self.sidecar, sidecar)
        self.store.publish(self._file, self.rel)
        # Two workers may finish one unit at once, on different hardware with different bytes. If the tar is ours and
        # the sidecar is not, put our sidecar back. If the tar is not ours, its writer does this after us, unless it
        # finished while we put our sidecar back. In this case the pair does not match, and the unit is encoded again.
        if not self._has_sidecar(sidecar) and self._has_tar():
            self.store.publish_bytes(self.sidecar, sidecar)
            if not self._has_tar():
                self.store.remove(self.rel)
        return self.rel

    def _has_sidecar(self, sidecar: bytes) -> bool:
        try:
            return self.store.read_bytes(self.sidecar) == sidecar
        except FileNotFoundError:
            return False

    def _has_tar(self) -> bool:
        """Whether the published tar was written by this object."""
        try:
            with self.store.open(self.rel) as file:
                return _hash_file(file) == self._tar.hash.hexdigest()
        except FileNotFoundError:
            return False


def add_checksum(value: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of `value` with a last member that is the xxh3-128 of every byte before this member."""
    body = shard.canonical_json(value)[:-1]
    return body + CHECKSUM_SUFFIX + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def parse_with_checksum(data: bytes) -> dict[str, Any]:
    """The inverse of `add_checksum`. Raises ValueError if a byte changed."""
    body = data[: data.rfind(CHECKSUM_SUFFIX)] if CHECKSUM_SUFFIX in data else b""
    if data != body + CHECKSUM_SUFFIX + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n':
        raise ValueError("its checksum does not match")
    return json_checks.check_object(json_records.parse_json(data), "the sidecar")


def _hash_file(file: Any) -> str:
    state = xxhash.xxh3_128()
    file.seek(0)
    while piece := file.read(READ_BYTES):
        state.update(piece)
    return state.hexdigest()


class ShardReader(shard.BaseShardReader):
    """Reads a tar and its sidecar. Opening reads only the sidecar; a row takes two reads."""

    def _open(self) -> None:
        name = self.rel.removesuffix(shard.TAR_SUFFIX) + shard.SIDECAR_SUFFIX
        try:
            size = self.store.size(name)
            if size > json_checks.MAX_DESCRIPTION_BYTES:
                raise DamageError(self.path, f"its description {name} has {size} bytes")
            data = self.store.read_bytes(name)
        except FileNotFoundError as error:
            raise DamageError(self.path, f"its description {name} is missing") from error
        with as_damage(self.path, f"its description {name} is changed"):
            described = parse_with_checksum(data)
        self.meta = shard.parse_description(described, self.path)
        with as_damage(self.path, f"its description {name} is wrong"):
            self._sidecar = _Sidecar.model_validate(described)
            self._sidecar.check_spans()
        if [row.id for row in self._sidecar.rows] != self.meta.ids:
            raise DamageError(self.path, f"its description {name} has offsets for rows that differ from its row ids")
        if self._size != self._sidecar.size:
            raise DamageError(self.path, f"it has {self._size} bytes instead of {self._sidecar.size}")

    def _row(self, i: int) -> tuple[shard.ShardRow, bytes, str]:
        row = self._sidecar.rows[i]
        info = self._read_span(*row.info).tobytes()
        tensors = from_safetensors(self._read_span(*row.tensors))
        return shard.ShardRow(row.id, tensors, json_records.parse_json(info)), info, row.checksum

    def _read_span(self, offset: int, size: int) -> memoryview:
        """Read a range of the file's bytes. Members are within the file, which is checked when the file is opened."""
        self.file.seek(offset)
        content = memoryview(self.file.read_buffer(size)).cast("B")
        if content.nbytes != size:
            raise ValueError(f"it ends after {content.nbytes} of {size} bytes")
        return content

    def _check_file(self) -> None:
        """Check the whole file, including headers and padding, which tar reads but random access does not."""
        with as_damage(self.path, "it can't be read"):
            checksum = _hash_file(self.file)
        if checksum != self._sidecar.xxh3_128:
            raise DamageError(self.path, "the checksum of the whole file does not match")
        for i, row in enumerate(self._sidecar.rows):
            with as_damage(self.path, "the header of one of its members is wrong", i, row.id):
                self._check_header(f"{row.id}.safetensors", *row.tensors)
                self._check_header(f"{row.id}.json", *row.info)

    def _check_header(self, name: str, offset: int, size: int) -> None:
        """Raise ValueError if a tar reader would see a different member: a link, a different name or a different
        size."""
        block = self._read_span(offset - TAR_BLOCK, TAR_BLOCK).tobytes()
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error
        if (member.name, member.size) != (name, size) or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ValueError(f"{member.name!r}, {member.size} bytes, type {member.type!r}, instead of {name!r}")


class _Row(json_checks.Foreign):
    id: str
    tensors: json_checks.Span
    info: json_checks.Span
    checksum: json_checks.Checksum


class _Sidecar(json_checks.Foreign):
    rows: list[_Row]
    size: json_checks.Count
    xxh3_128: json_checks.Checksum

    def check_spans(self) -> None:
        """Raise ValueError if the offset or size of a member's content is impossible."""
        end = 0
        for row in self.rows:
            for offset, size in (row.tensors, row.info):
                if offset != end + TAR_BLOCK:
                    raise ValueError(f"a member is at {offset} instead of {end + TAR_BLOCK}")
                end = offset + size + -size % TAR_BLOCK
        end += 2 * TAR_BLOCK
        end += -end % TAR_RECORD
        if self.size != end:
            raise ValueError(f"its rows take {end} bytes, but its size is {self.size}")
