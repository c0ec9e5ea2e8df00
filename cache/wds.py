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
from pathlib import Path
from typing import Any, BinaryIO, Self

import xxhash

from cache.shard import (
    SIDECAR_SUFFIX,
    TAR_SUFFIX,
    BaseReader,
    DamageError,
    Row,
    SetAside,
    ShardMeta,
    check_row,
    describe,
    parse_meta,
    remove_twin,
    row_checksum,
    to_json,
)
from cache.store import Store, explained
from cache.tensors import Array

#: Our dtype names and those of safetensors.
SAFETENSORS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}
DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}
BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
SEAL = b',"checksum":"'
READ_BYTES = 1 << 22


def to_safetensors(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file. Written here: the library's own functions take numpy arrays, which have no
    bfloat16, or raw pointers. Wider dtypes first, so that every tensor is aligned, as the library does."""
    names = sorted(tensors, key=lambda name: (-_itemsize(tensors[name]), name))
    header, end = {}, 0
    for name in names:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {"dtype": SAFETENSORS[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(tensors[name].raw() for name in names)])


def _itemsize(array: Array) -> int:
    return 0 if not array.nbytes else array.nbytes // math.prod(array.shape)


def from_safetensors(data: memoryview) -> dict[str, Array]:
    """Tensors as views into `data`; ValueError or KeyError where it is no safetensors file."""
    size = int(struct.unpack("<Q", data[:8])[0]) if data.nbytes >= 8 else data.nbytes
    if size > data.nbytes - 8:
        raise ValueError("the safetensors header is cut off")
    header, body = json.loads(bytes(data[8 : 8 + size])), data[8 + size :]
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = Array(DTYPES[entry["dtype"]], tuple(entry["shape"]), body[start:end])
    return tensors


class _Tar:
    """Members one after another, with headers that depend on name and size only; counts and hashes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.hash = file, 0, xxhash.xxh3_128()

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)

    def add(self, name: str, data: bytes) -> list[int]:
        """Returns offset and size of the content."""
        header = tarfile.TarInfo(name)
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        offset = self.size
        self._write(data)
        self._write(bytes(-len(data) % BLOCK))
        return [offset, len(data)]

    def end(self) -> None:
        self._write(bytes(2 * BLOCK))
        self._write(bytes(-self.size % RECORD))


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
        self._tar = _Tar(self._file)

    def add(self, row: Row) -> None:
        check_row(row, self.columns, self._taken)
        # A tar's short name holds 100 bytes, and webdataset cuts keys at the first dot.
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", row.id), f"{row.id!r} can't name a member"
        info, tensors = to_json(row.info), to_safetensors(row.tensors)
        checksum = row_checksum(row.id, info, row.tensors)
        with explained(self.store.path(self.rel)):
            places = {
                "tensors": self._tar.add(f"{row.id}.safetensors", tensors),
                "info": self._tar.add(f"{row.id}.json", info),
            }
        self._entries.append({"id": row.id, "checksum": checksum, **places})
        self._ids.append(row.id)
        self._taken.add(row.id)

    def set_aside(self, member: SetAside) -> None:
        self._set_aside.append(member)

    def finish(self) -> str:
        """Publish the sidecar, then the tar; returns the tar's path. StoreError where it can't be."""
        described = describe(self.meta, self._ids, self._set_aside)
        with explained(self.store.path(self.rel)):
            self._tar.end()
            self._file.close()
        content = {"size": self._tar.size, "xxh3_128": self._tar.hash.hexdigest(), "rows": self._entries}
        sidecar = seal(described | content)
        self.store.publish_bytes(self.sidecar, sidecar)
        self.store.publish(self._file.name, self.rel)
        self._settle(sidecar)
        remove_twin(self.store, self.rel)
        return self.rel

    def _settle(self, sidecar: bytes) -> None:
        """Two workers may finish one unit at once, and, on unlike hardware, with unlike bytes. Where the tar
        is ours and the sidecar is not, put ours back."""
        if self.store.read_bytes(self.sidecar) == sidecar:
            return
        with self.store.open(self.rel) as file:
            ours = _hash(file) == self._tar.hash.hexdigest()
        if ours:
            self.store.publish_bytes(self.sidecar, sidecar)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        Path(self._file.name).unlink(missing_ok=True)
        self._tar.file = io.BytesIO()
        _close_quietly(self._file)


def _close_quietly(file: BinaryIO) -> None:
    """Close a removed temporary: what it still held can't be written to a full disk, nor need be."""
    try:
        file.close()
    except OSError:
        file.close()


def seal(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `value` with, as its last member, the xxh3-128 of every byte before that member."""
    body = to_json(value)[:-1]
    return body + SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`; ValueError where one byte of it changed."""
    body = data[: data.rfind(SEAL)] if SEAL in data else b""
    if data != body + SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n':
        raise ValueError("its checksum does not match")
    return json.loads(data)


def _hash(file: Any) -> str:
    state = xxhash.xxh3_128()
    file.seek(0)
    while piece := file.read(READ_BYTES):
        state.update(piece)
    return state.hexdigest()


class ShardReader(BaseReader):
    """Reads `rel` and the sidecar beside it. Opening reads the sidecar only; a row costs two reads."""

    def _open(self) -> None:
        name = self.rel.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX
        try:
            data = self.store.read_bytes(name)
        except FileNotFoundError as error:
            raise DamageError(self.path, f"its description {name} is missing") from error
        self._sidecar = self.attempt(lambda: unseal(data), f"its description {name} is changed")
        self.meta = parse_meta(self._sidecar, self.path)
        self._entries = self._sidecar.get("rows", [])
        if [entry["id"] for entry in self._entries] != self.meta.ids:
            raise DamageError(self.path, f"its description {name} names other rows than it places")
        if self.file.size() != self._sidecar["size"]:
            size = self.file.size()
            raise DamageError(self.path, f"it has {size} bytes and should have {self._sidecar['size']}")

    def _row(self, i: int) -> tuple[Row, bytes, str]:
        entry = self._entries[i]
        info = self._at(entry["info"]).tobytes()
        tensors = from_safetensors(self._at(entry["tensors"]))
        return Row(entry["id"], tensors, json.loads(info)), info, entry["checksum"]

    def _at(self, place: list[int]) -> memoryview:
        offset, size = place
        self.file.seek(offset)
        return memoryview(self.file.read_buffer(size)).cast("B")

    def _check_file(self) -> None:
        """The whole file, headers and padding included, which random access never looks at."""
        if _hash(self.file) != self._sidecar["xxh3_128"]:
            raise DamageError(self.path, "the checksum of the whole file does not match")
