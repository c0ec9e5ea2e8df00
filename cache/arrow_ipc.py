"""Record batches of an Arrow IPC file, each by one read, from a file that nobody vouches for.

pyarrow's own `get_batch` believes the file where its blocks lie, decompresses what says that it is compressed (a few
bytes can claim, and become, gigabytes), loads dictionaries, and takes two reads. Here the places are checked when the
file is opened, and a batch that is compressed is refused before it is decoded. Flatbuffers are verified by Arrow first;
what is read of them here is read with bounds checked by Python.
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
#: Numbers of fields in Arrow's tables (its format/File.fbs and format/Message.fbs).
FOOTER_DICTIONARIES, FOOTER_BATCHES = 2, 3
MESSAGE_HEADER, MESSAGE_CUSTOM, BATCH_COMPRESSION = 2, 4, 3


@dataclass(frozen=True)
class BatchIndex:
    """The schema of a file, and of each batch the offset and length of its message."""

    schema: pa.Schema
    ranges: list[tuple[int, int]]


def find_footer(file: pa.NativeFile | BinaryIO) -> tuple[int, int]:
    """Where a file's footer begins, and its length. ValueError where it has none."""
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
    """Read the end of the file. ValueError, as Arrow's own errors are, or OSError where it is no whole Arrow file."""
    place, length = find_footer(file)
    file.seek(place)
    footer, tail = file.read(length), file.read(TAIL_BYTES)
    # A file of no batches' bodies: Arrow verifies the footer and gives the schema without looking further.
    schema = pa.ipc.open_file(pa.BufferReader(FILE_START + footer + tail)).schema
    root = _follow_offset(footer, 0)
    if len(_read_blocks(footer, root, FOOTER_DICTIONARIES)):
        raise ValueError("it has dictionaries")
    return BatchIndex(schema, _check_blocks(_read_blocks(footer, root, FOOTER_BATCHES), place))


def _check_blocks(blocks: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Of each block; ValueError where one lies outside of the first `size` bytes."""
    offset, head, body = (blocks[name].astype(np.int64) for name in ("offset", "head", "body"))
    if ((offset < 8) | (head < 8) | (body < 0) | (offset > size) | (body > size)).any():
        raise ValueError("a batch has no place")
    if (offset + head + body > size).any():  # none of them is near 2**63 any more
        raise ValueError("a batch lies beyond the end")
    return list(zip(offset.tolist(), (head + body).tolist(), strict=True))


def read_batch(file: pa.NativeFile, place: tuple[int, int], schema: pa.Schema) -> pa.RecordBatch:
    """The batch there, a view into a mapped file, its offsets validated. ValueError or OSError where it is none, or is
    compressed."""
    file.seek(place[0])
    message = pa.ipc.read_message(file.read_buffer(place[1]))
    head = memoryview(message.metadata)
    root = _follow_offset(head, 0)
    header = _find_field(head, root, MESSAGE_HEADER)
    # Old files name their compression in the message's own metadata.
    if _find_field(head, _follow_offset(head, header), BATCH_COMPRESSION) or _find_field(head, root, MESSAGE_CUSTOM):
        raise ValueError("the batch is compressed, or none")
    found = pa.ipc.read_record_batch(message, schema)
    # Arrow trusts offsets; a changed one would read outside of its buffer. 2 microseconds for one row of a shard.
    found.validate(full=True)
    return found


def fill_placeholders(path: str, schema: pa.Schema, values: Mapping[bytes, bytes]) -> None:
    """Put what was not known before the rows into a finished file of `schema`: in place of each blank in its metadata a
    value of the same length. Arrow has the schema twice, before the rows and behind them."""
    with open(path, "r+b") as file:
        for place, length in ((0, len(FILE_START) + schema.serialize().size), find_footer(file)):
            file.seek(place)
            piece = file.read(length)
            for blank, value in values.items():
                assert piece.count(blank) == 1 and len(blank) == len(value)
                piece = piece.replace(blank, value)
            file.seek(place)
            file.write(piece)


_uint32, _int32, _uint16 = (struct.Struct(kind).unpack_from for kind in ("<I", "<i", "<H"))


def _follow_offset(data: Any, place: int) -> int:
    """Where the offset at `place` leads."""
    return place + _uint32(data, place)[0]


def _find_field(data: Any, table: int, number: int) -> int:
    """Where field `number` of a flatbuffers table lies; 0 where it is absent."""
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
