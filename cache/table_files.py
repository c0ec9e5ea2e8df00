"""Tables as files: Arrow IPC, read with every byte compared with a checksum and every buffer validated.

Arrow has no checksum of its own, and believes the offsets that a file gives it. So each table carries the xxh3-128 of
its whole file in its schema's metadata, which Arrow writes before the rows and again behind them: written blank, and
filled in at both ends, the blanks being what the checksum is of. It is compared before Arrow sees anything of the file.
Whoever makes a file with intent makes its checksum too, so a table is then validated in full before it is used, and is
made of plain columns alone: nothing is compressed, no dictionaries, no views.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from cache import arrow_ipc, json_checks
from schemas.identity import hash_json

CHECKSUM_KEY, _CHECKSUM_PREFIX = b"latentpress_checksum", b"xxh3-128:"
_CHECKSUM_PLACEHOLDER = _CHECKSUM_PREFIX + b"\xff" * 32  # no text in UTF-8 holds these
_CHECKSUM_PATTERN = re.compile(_CHECKSUM_PREFIX + rb"([0-9a-f]{32})")
_HASH_BYTES = 16 << 20  # bytes hashed
_MAX_DEPTH = 4  # of lists and records in a column
JSON_CHECKSUM_KEY = "checksum"

ByteRange = tuple[int, int]  # offset and length


# -- Arrow --------------------------------------------------------------------------------------------------


@contextmanager
def open_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """A writer of a table to `file`, a new file that has a name. Its checksum is filled in when the body ends."""
    schema = schema.with_metadata({**(schema.metadata or {}), CHECKSUM_KEY: _CHECKSUM_PLACEHOLDER})
    hashed = _HashingFile(file)
    with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema) as writer:
        yield writer
    file.flush()
    arrow_ipc.fill_placeholders(
        file.name, schema, {_CHECKSUM_PLACEHOLDER: _CHECKSUM_PREFIX + hashed.state.hexdigest().encode()}
    )


class _HashingFile:
    """Passes on what is written to it, and hashes it."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.state = file, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.state.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None: ...

    def close(self) -> None: ...


def read_table(file: pa.NativeFile) -> tuple[pa.Table, str]:
    """The table in `file`, views of it where that is mapped, and its checksum: "" of one that an earlier release wrote.
    One of cache.damage.PARSE_ERRORS where a byte is not as it was written, or the file is no table."""
    found = verify_checksum(file)
    frames = arrow_ipc.read_batch_index(file)
    for field in frames.schema:
        if not _is_plain_type(field.type):
            raise ValueError(
                f"a column {json_checks.printable(field.name)} of type {json_checks.printable(field.type)}"
            )
    table = pa.Table.from_batches(
        [arrow_ipc.read_batch(file, place, frames.schema) for place in frames.ranges], frames.schema
    )
    metadata = {key: value for key, value in (frames.schema.metadata or {}).items() if key != CHECKSUM_KEY}
    return table.replace_schema_metadata(metadata or None), found


def verify_checksum(file: pa.NativeFile) -> str:
    """The checksum of a whole file, which it was compared with; "" where it has none. ValueError where it differs."""
    ends = _find_schema(file), arrow_ipc.find_footer(file)
    places, values = list[int](), set[bytes]()
    for place, length in ends:
        file.seek(place)
        for match in _CHECKSUM_PATTERN.finditer(file.read(length)):
            places.append(place + match.start())
            values.add(match[1])
    if not places:
        return ""
    if len(places) != 2 or places[0] >= ends[1][0] or places[1] < ends[1][0] or len(values) != 1:
        raise ValueError("its two ends differ")
    (value,) = values
    if _hash_file(file, places) != value.decode():
        raise ValueError("its checksum does not match")
    return value.decode()


def _find_schema(file: pa.NativeFile) -> ByteRange:
    """Where the first message of a file lies, which is its schema."""
    file.seek(0)
    start = file.read(len(arrow_ipc.FILE_START) + 8)
    if start[:-4] != arrow_ipc.FILE_START + b"\xff\xff\xff\xff":
        raise ValueError("it does not start as an Arrow file")
    return 0, len(start) + min(int.from_bytes(start[-4:], "little"), json_checks.MAX_DESCRIPTION_BYTES)


def _hash_file(file: pa.NativeFile, blanks: list[int]) -> str:
    """Of all bytes, those of the checksums being blank."""
    state, at = xxhash.xxh3_128(), 0
    for blank in [*blanks, file.size()]:
        file.seek(at)
        while at < blank:
            piece = file.read_buffer(min(_HASH_BYTES, blank - at))
            if not piece.size:
                raise ValueError("it is shorter than it was")
            state.update(piece)
            at += piece.size
        if blank in blanks:
            state.update(_CHECKSUM_PLACEHOLDER)
            at += len(_CHECKSUM_PLACEHOLDER)
    return state.hexdigest()


def _is_plain_type(kind: pa.DataType, depth: int = 0) -> bool:
    """Whether values of a type are numbers, truth values, text or bytes, or lists and records of these: what a column
    says, and takes in memory, is then bounded by the bytes that it has."""
    types = pa.types
    if types.is_list(kind) or types.is_struct(kind):
        inner = [kind.field(number) for number in range(kind.num_fields)]
        return bool(inner) and depth < _MAX_DEPTH and all(_is_plain_type(field.type, depth + 1) for field in inner)
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    bytes_too = (types.is_binary, types.is_large_binary)
    return any(test(kind) for test in (*known, *bytes_too)) or (types.is_null(kind) and not depth)


# -- JSON ---------------------------------------------------------------------------------------------------


def add_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` with the checksum of its values."""
    plain = {key: value for key, value in record.items() if key != JSON_CHECKSUM_KEY}
    return {**plain, JSON_CHECKSUM_KEY: hash_json(plain)}


def strip_checksum(value: Any) -> dict[str, Any]:
    """The inverse; ValueError where the values are not those that were sealed. What an earlier release wrote has no
    checksum."""
    record = dict(json_checks.check_object(value, "the whole"))
    found = record.pop(JSON_CHECKSUM_KEY, None)
    if found is not None and found != hash_json(record):
        raise ValueError("its checksum does not match")
    return record
