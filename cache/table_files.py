"""Tables as files: Arrow IPC, of which every byte is compared with a checksum and every buffer validated.

Arrow has no checksum and trusts a file's offsets. So each table has the xxh3-128 of its whole file in its schema's
metadata, which Arrow writes before the rows and again after them. It is written as placeholders, of which the checksum
is computed, and filled in at both ends; readers compare it before Arrow sees the file. A file made with intent has a
matching checksum too, so a table is also validated in full before it is used, and has plain columns only: no
compression, no dictionaries, no views.
"""

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from cache import arrow_ipc
from cache.json_checks import MAX_DESCRIPTION_BYTES, check_object, printable
from schemas.identity import hash_json

CHECKSUM_KEY, _CHECKSUM_PREFIX = b"latentpress_checksum", b"xxh3-128:"
_CHECKSUM_PLACEHOLDER = _CHECKSUM_PREFIX + b"\xff" * 32  # no text in UTF-8 holds these
_CHECKSUM_PATTERN = re.compile(_CHECKSUM_PREFIX + rb"([0-9a-f]{32})")
_HASH_BYTES = 16 << 20  # read at a time
_MAX_DEPTH = 4  # of nested lists and records in a column
JSON_CHECKSUM_KEY = "checksum"


@contextmanager
def open_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """A writer of a table to `file`, a new file with a name. The checksum is filled in when the body ends."""
    schema = schema.with_metadata({**(schema.metadata or {}), CHECKSUM_KEY: _CHECKSUM_PLACEHOLDER})
    hashed = _HashingFile(file)
    with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema) as writer:
        yield writer
    file.flush()
    checksum = _CHECKSUM_PREFIX + hashed.state.hexdigest().encode()
    arrow_ipc.fill_placeholders(file.name, schema, {_CHECKSUM_PLACEHOLDER: checksum})


def hash_table(table: pa.Table) -> bytes:
    """The xxh3-128 of a table as an Arrow stream, which depends on its chunks too."""
    with open(os.devnull, "wb") as sink:
        hashed = _HashingFile(sink)
        with pa.ipc.new_stream(pa.PythonFile(hashed, "w"), table.schema) as writer:
            writer.write_table(table)
    return hashed.state.digest()


class _HashingFile(io.RawIOBase):
    """Passes on what is written to it, and hashes it."""

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
    """The table in `file`, as views where the file is mapped. One of cache.damage.PARSE_ERRORS where a byte is not as
    it was written, or the file is no table."""
    verify_checksum(file)
    batches = arrow_ipc.read_batch_index(file)
    for field in batches.schema:
        if not _is_plain_type(field.type):
            raise ValueError(f"a column {printable(field.name)} of type {printable(field.type)}")
    rows = [arrow_ipc.read_batch(file, span, batches.schema) for span in batches.ranges]
    metadata = {key: value for key, value in (batches.schema.metadata or {}).items() if key != CHECKSUM_KEY}
    return pa.Table.from_batches(rows, batches.schema).replace_schema_metadata(metadata or None)


def verify_checksum(file: pa.NativeFile) -> str:
    """The checksum of a whole file, "" where an earlier release wrote none. ValueError where it does not match."""
    file.seek(0)
    start = file.read(len(arrow_ipc.FILE_START) + 8)
    if start[:-4] != arrow_ipc.FILE_START + b"\xff\xff\xff\xff":
        raise ValueError("it does not start as an Arrow file")
    # The first message is the schema.
    schema_end = len(start) + min(int.from_bytes(start[-4:], "little"), MAX_DESCRIPTION_BYTES)
    footer = arrow_ipc.find_footer(file)
    offsets, values = list[int](), set[bytes]()
    for offset, length in ((0, schema_end), footer):
        file.seek(offset)
        for match in _CHECKSUM_PATTERN.finditer(file.read(length)):
            offsets.append(offset + match.start())
            values.add(match[1])
    if not offsets:
        return ""
    if len(offsets) != 2 or offsets[0] >= footer[0] or offsets[1] < footer[0] or len(values) != 1:
        raise ValueError("its two ends differ")
    checksum = values.pop().decode()
    if _hash_file(file, offsets) != checksum:
        raise ValueError("its checksum does not match")
    return checksum


def _hash_file(file: pa.NativeFile, checksum_offsets: list[int]) -> str:
    """Of all bytes, with placeholders in place of the checksums."""
    state, position = xxhash.xxh3_128(), 0
    for end in [*checksum_offsets, file.size()]:
        file.seek(position)
        while position < end:
            data = file.read_buffer(min(_HASH_BYTES, end - position))
            if not data.size:
                raise ValueError("it is shorter than it was")
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


def add_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with the checksum of its values."""
    plain = {key: value for key, value in record.items() if key != JSON_CHECKSUM_KEY}
    return {**plain, JSON_CHECKSUM_KEY: hash_json(plain)}


def strip_checksum(value: Any) -> dict[str, Any]:
    """The inverse of `add_checksum`; ValueError where values changed. Records of earlier releases have no checksum."""
    record = dict(check_object(value, "the JSON"))
    found = record.pop(JSON_CHECKSUM_KEY, None)
    if found is not None and found != hash_json(record):
        raise ValueError("its checksum does not match")
    return record
