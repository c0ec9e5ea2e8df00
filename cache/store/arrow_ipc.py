"""Arrow IPC files of unknown origin: reads record batches, each in one read, and whole tables with a checksum.

pyarrow's own `get_batch` trusts the file's block offsets, decompresses (a few bytes can become gigabytes), loads
dictionaries, and takes two reads. Here offsets are checked when the file is opened, and a compressed batch is refused
before it is decoded. Arrow verifies the flatbuffers first; reading them here, Python checks the bounds.

Arrow has no checksum. So each table has the xxh3-128 of its whole file in its schema's metadata, which Arrow writes
before the rows and again after them. The checksum is computed with placeholders in its place, which are then replaced
at both ends. Readers verify it before Arrow reads the file. A manipulated file may have a valid checksum, so a table is
also validated in full before it is used, and has plain columns only: no compression, no dictionaries, no views.
"""

import io
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from cache.store.json_checks import MAX_DESCRIPTION_BYTES, printable

ARROW_MAGIC = b"ARROW1"
FILE_START = ARROW_MAGIC + b"\0\0"
TAIL_BYTES = 4 + len(ARROW_MAGIC)  # the footer's length and the magic
BLOCK_DTYPE = np.dtype([("offset", "<i8"), ("head", "<i4"), ("pad", "<i4"), ("body", "<i8")])
_uint32, _int32, _uint16 = (struct.Struct(kind).unpack_from for kind in ("<I", "<i", "<H"))
#: Numbers of fields in Arrow's format/File.fbs and format/Message.fbs.
FOOTER_DICTIONARIES, FOOTER_BATCHES = 2, 3
MESSAGE_HEADER, MESSAGE_CUSTOM, BATCH_COMPRESSION = 2, 4, 3
CHECKSUM_KEY, _CHECKSUM_PREFIX = b"latentpress_checksum", b"xxh3-128:"
_CHECKSUM_PLACEHOLDER = _CHECKSUM_PREFIX + b"\xff" * 32  # bytes that no UTF-8 text contains
_CHECKSUM_PATTERN = re.compile(_CHECKSUM_PREFIX + rb"([0-9a-f]{32})")
_HASH_BYTES = 16 << 20  # bytes read at a time
_MAX_DEPTH = 4  # limit for the nesting of lists and records in a column


def find_footer(file: pa.NativeFile | BinaryIO) -> tuple[int, int]:
    """Return (offset, length) of a file's footer in bytes. Raises ValueError if the file does not have a footer."""
    size = file.seek(0, os.SEEK_END)
    if size < len(FILE_START) + TAIL_BYTES:
        raise ValueError(f"{size} bytes are too few for an Arrow file")
    file.seek(size - TAIL_BYTES)
    tail = file.read(TAIL_BYTES)
    (length,) = struct.unpack("<i", tail[:4])
    if tail[4:] != ARROW_MAGIC or not 0 < length <= min(size - TAIL_BYTES - len(FILE_START), MAX_DESCRIPTION_BYTES):
        raise ValueError("it has no footer")
    return size - TAIL_BYTES - length, length


def read_batch_index(file: pa.NativeFile) -> tuple[pa.Schema, np.ndarray]:
    """Return the schema at the end of the file, and (n, 2) the offset and length of each batch's message. Raises
    ValueError (Arrow's errors are ValueErrors) or OSError if the file is not a complete Arrow file."""
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
    return schema, np.stack([offset, head + body], axis=1)


def read_batch(data: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch of a message as a validated view. Raises ValueError or OSError if `data` is not the message of a
    batch, or if the batch is compressed."""
    message = pa.ipc.read_message(data)
    head = memoryview(message.metadata)
    root = _follow_offset(head, 0)
    header = _find_field(head, root, MESSAGE_HEADER)
    # Each of the two fields can declare a compression.
    if _find_field(head, _follow_offset(head, header), BATCH_COMPRESSION) or _find_field(head, root, MESSAGE_CUSTOM):
        raise ValueError("it is a compressed batch, or not a batch")
    batch = pa.ipc.read_record_batch(message, schema)
    # Arrow trusts offsets, so a changed offset would read outside of its buffer. The check takes 2 microseconds for one
    # row of a shard.
    batch.validate(full=True)
    return batch


def fill_placeholders(file: BinaryIO, schema: pa.Schema, values: Mapping[bytes, bytes]) -> None:
    """Replace placeholders in the metadata of a finished file by values of the same length that were not available
    before the rows were written. Arrow writes `schema` twice, before and after the rows."""
    for start, length in ((0, len(FILE_START) + schema.serialize().size), find_footer(file)):
        file.seek(start)
        data = file.read(length)
        for placeholder, value in values.items():
            assert data.count(placeholder) == 1 and len(placeholder) == len(value)
            data = data.replace(placeholder, value)
        file.seek(start)
        file.write(data)


def _follow_offset(data: Any, position: int) -> int:
    """Return the position that the offset at `position` refers to."""
    return position + _uint32(data, position)[0]


def _find_field(data: Any, table: int, number: int) -> int:
    """Return the position of field `number` in a flatbuffers table; 0 if the field is absent."""
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


@contextmanager
def open_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """Context with a writer of a table to `file`, a new file that is also readable. The checksum is filled in when the
    body ends."""
    schema = schema.with_metadata({**(schema.metadata or {}), CHECKSUM_KEY: _CHECKSUM_PLACEHOLDER})
    hashed = _HashingFile(file)
    with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema) as writer:
        yield writer
    checksum = _CHECKSUM_PREFIX + hashed.state.hexdigest().encode()
    fill_placeholders(file, schema, {_CHECKSUM_PLACEHOLDER: checksum})


def write_table(table: pa.Table, file: BinaryIO) -> None:
    """Write a whole table to a new file that is also readable."""
    with open_writer(file, table.schema) as writer:
        writer.write_table(table)


def hash_table(table: pa.Table) -> bytes:
    """Return the xxh3-128 of a table as an Arrow stream. The hash also depends on the table's chunks."""
    with open(os.devnull, "wb") as sink:
        hashed = _HashingFile(sink)
        with pa.ipc.new_stream(pa.PythonFile(hashed, "w"), table.schema) as writer:
            writer.write_table(table)
    return hashed.state.digest()


class _HashingFile(io.RawIOBase):
    """A file that passes on the bytes written to it, and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.state = file, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.state.update(data)
        return self._file.write(data)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()


def read_table(file: pa.NativeFile) -> pa.Table:
    """Return the table in `file`, as views if the file is memory-mapped. Raises one of cache.store.damage.PARSE_ERRORS
    if a byte differs from the byte written, or if the file is not a table."""
    verify_checksum(file)
    schema, spans = read_batch_index(file)
    for field in schema:
        if not _is_plain_type(field.type):
            raise ValueError(
                f"column {printable(field.name)} has the type {printable(field.type)}, which tables do not use"
            )
    rows = []
    for offset, length in spans.tolist():
        file.seek(offset)
        rows.append(read_batch(file.read_buffer(length), schema))
    metadata = {key: value for key, value in (schema.metadata or {}).items() if key != CHECKSUM_KEY}
    return pa.Table.from_batches(rows, schema).replace_schema_metadata(metadata or None)


def verify_checksum(file: pa.NativeFile) -> str:
    """Verify and return the checksum of a whole file. Raises ValueError if the file does not have a checksum, or if it
    does not match."""
    file.seek(0)
    start = file.read(len(FILE_START) + 8)
    if start[:-4] != FILE_START + b"\xff\xff\xff\xff":
        raise ValueError("it does not start as an Arrow file")
    # The first message is the schema.
    schema_end = len(start) + min(int.from_bytes(start[-4:], "little"), MAX_DESCRIPTION_BYTES)
    footer = find_footer(file)
    offsets, values = list[int](), set[bytes]()
    for offset, length in ((0, schema_end), footer):
        file.seek(offset)
        for match in _CHECKSUM_PATTERN.finditer(file.read(length)):
            offsets.append(offset + match.start())
            values.add(match[1])
    if not offsets:
        raise ValueError("it has no checksum")
    if len(offsets) != 2 or offsets[0] >= footer[0] or offsets[1] < footer[0] or len(values) != 1:
        raise ValueError("the schemas at its start and end differ")
    checksum = values.pop().decode()
    if _hash_file(file, offsets) != checksum:
        raise ValueError("its checksum does not match")
    return checksum


def _hash_file(file: pa.NativeFile, checksum_offsets: list[int]) -> str:
    """Hash all bytes, with placeholders in place of the checksums."""
    state, position = xxhash.xxh3_128(), 0
    for end in [*checksum_offsets, file.size()]:
        file.seek(position)
        while position < end:
            data = file.read_buffer(min(_HASH_BYTES, end - position))
            if not data.size:
                raise ValueError("it became shorter while it was read")
            state.update(data)
            position += data.size
        if end in checksum_offsets:
            state.update(_CHECKSUM_PLACEHOLDER)
            position += len(_CHECKSUM_PLACEHOLDER)
    return state.hexdigest()


def _is_plain_type(kind: pa.DataType, depth: int = 0) -> bool:
    """Whether values of a type are numbers, truth values, text or bytes, or lists and records of these. The memory of
    such a column is bounded by the bytes that it has in the file."""
    types = pa.types
    if types.is_list(kind) or types.is_struct(kind):
        inner = [kind.field(number) for number in range(kind.num_fields)]
        return bool(inner) and depth < _MAX_DEPTH and all(_is_plain_type(field.type, depth + 1) for field in inner)
    plain = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(kind) for test in (*plain, types.is_binary, types.is_large_binary)) or (
        types.is_null(kind) and not depth
    )
