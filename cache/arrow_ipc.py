"""Record batches of an Arrow IPC file of unknown origin, each by one read.

pyarrow's own `get_batch` trusts the file's block offsets, decompresses (a few bytes can become gigabytes), loads
dictionaries, and takes two reads. Here offsets are checked when the file is opened, and a compressed batch is refused
before it is decoded. Arrow verifies the flatbuffers first; reading them here, Python checks the bounds.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from cache.json_checks import MAX_DESCRIPTION_BYTES

ARROW_MAGIC = b"ARROW1"
FILE_START = ARROW_MAGIC + b"\0\0"
TAIL_BYTES = 4 + len(ARROW_MAGIC)  # the footer's length and the magic
BLOCK_DTYPE = np.dtype([("offset", "<i8"), ("head", "<i4"), ("pad", "<i4"), ("body", "<i8")])
_uint32, _int32, _uint16 = (struct.Struct(kind).unpack_from for kind in ("<I", "<i", "<H"))
#: Numbers of fields in Arrow's format/File.fbs and format/Message.fbs.
FOOTER_DICTIONARIES, FOOTER_BATCHES = 2, 3
MESSAGE_HEADER, MESSAGE_CUSTOM, BATCH_COMPRESSION = 2, 4, 3


@dataclass(frozen=True)
class BatchIndex:
    """The schema of a file, and of each batch the offset and length of its message."""

    schema: pa.Schema
    ranges: list[tuple[int, int]]


def find_footer(file: pa.NativeFile | BinaryIO) -> tuple[int, int]:
    """Offset and length of a file's footer. ValueError where it has none."""
    size = file.seek(0, os.SEEK_END)
    if size < len(FILE_START) + TAIL_BYTES:
        raise ValueError(f"{size} bytes are too few")
    file.seek(size - TAIL_BYTES)
    tail = file.read(TAIL_BYTES)
    (length,) = struct.unpack("<i", tail[:4])
    if tail[4:] != ARROW_MAGIC or not 0 < length <= min(size - TAIL_BYTES - len(FILE_START), MAX_DESCRIPTION_BYTES):
        raise ValueError("it has no footer")
    return size - TAIL_BYTES - length, length


def read_batch_index(file: pa.NativeFile) -> BatchIndex:
    """Read the end of the file. ValueError, as Arrow's errors are, or OSError where it is no whole Arrow file."""
    start, length = find_footer(file)
    file.seek(start)
    footer, tail = file.read(length), file.read(TAIL_BYTES)
    # A file without batches: Arrow verifies the footer and gives the schema without reading further.
    schema = pa.ipc.open_file(pa.BufferReader(FILE_START + footer + tail)).schema
    root = _follow_offset(footer, 0)
    if len(_read_blocks(footer, root, FOOTER_DICTIONARIES)):
        raise ValueError("it has dictionaries")
    blocks = _read_blocks(footer, root, FOOTER_BATCHES)
    offset, head, body = (blocks[name].astype(np.int64) for name in ("offset", "head", "body"))
    if ((offset < 8) | (head < 8) | (body < 0) | (offset > start) | (body > start)).any():
        raise ValueError("the offset or length of a batch is impossible")
    if (offset + head + body > start).any():  # the sums can't overflow now
        raise ValueError("a batch ends beyond the end of the file")
    return BatchIndex(schema, list(zip(offset.tolist(), (head + body).tolist(), strict=True)))


def read_batch(file: pa.NativeFile, span: tuple[int, int], schema: pa.Schema) -> pa.RecordBatch:
    """The batch at (offset, length), a view, validated. ValueError or OSError where it is none, or compressed."""
    file.seek(span[0])
    message = pa.ipc.read_message(file.read_buffer(span[1]))
    head = memoryview(message.metadata)
    root = _follow_offset(head, 0)
    header = _find_field(head, root, MESSAGE_HEADER)
    # Old files name their compression in the message's own metadata.
    if _find_field(head, _follow_offset(head, header), BATCH_COMPRESSION) or _find_field(head, root, MESSAGE_CUSTOM):
        raise ValueError("the batch is compressed, or none")
    batch = pa.ipc.read_record_batch(message, schema)
    # Arrow trusts offsets; a changed one would read outside of its buffer. 2 microseconds for one row of a shard.
    batch.validate(full=True)
    return batch


def fill_placeholders(path: str, schema: pa.Schema, values: Mapping[bytes, bytes]) -> None:
    """Replace placeholders in the metadata of a finished file by values of the same length that were not known before
    the rows. Arrow writes `schema` twice, before the rows and after them."""
    with open(path, "r+b") as file:
        for start, length in ((0, len(FILE_START) + schema.serialize().size), find_footer(file)):
            file.seek(start)
            data = file.read(length)
            for placeholder, value in values.items():
                assert data.count(placeholder) == 1 and len(placeholder) == len(value)
                data = data.replace(placeholder, value)
            file.seek(start)
            file.write(data)


def _follow_offset(data: Any, position: int) -> int:
    """The position that the offset at `position` refers to."""
    return position + _uint32(data, position)[0]


def _find_field(data: Any, table: int, number: int) -> int:
    """The position of field `number` of a flatbuffers table; 0 where it is absent."""
    vtable = table - _int32(data, table)[0]
    slot = 4 + 2 * number
    if slot >= _uint16(data, vtable)[0]:
        return 0
    offset = _uint16(data, vtable + slot)[0]
    return table + offset if offset else 0


def _read_blocks(footer: bytes, root: int, number: int) -> np.ndarray:
    field = _find_field(footer, root, number)
    if not field:
        return np.empty(0, BLOCK_DTYPE)
    vector = _follow_offset(footer, field)
    return np.frombuffer(footer, BLOCK_DTYPE, _uint32(footer, vector)[0], vector + 4)
