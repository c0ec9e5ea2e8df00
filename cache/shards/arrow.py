"""Shards as Arrow IPC files: one row a record batch, uncompressed, described in the schema's metadata.

The description (which rows succeeded) is known only at the end, while Arrow writes the schema first. So it is written
blank and filled in at the end, and rows are written as they are added. Keeping them in memory until then took the
memory of the whole unit (128 MiB) and twice the time, since new memory costs more than the copy. A description in the
footer alone or in a last empty batch would not be found by readers of the schema.
"""

import struct
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import pyarrow as pa
import xxhash

from cache.shards import shard
from cache.shards.tensors import NUMPY_DTYPES, Array
from cache.store import arrow_ipc
from cache.store.damage import DamageError, as_damage
from cache.store.json_checks import check_name, check_shape, check_text, printable
from schemas.json_records import parse_json

DESCRIPTION_KEY, DESCRIPTION_CHECKSUM_KEY = b"latentpress", b"latentpress_checksum"
#: Bytes of the description reserved for each member: enough for the reasons if a quarter of the members are rejected.
BYTES_PER_MEMBER = 64
#: In place of a description and its checksum until they are known: bytes that no text in UTF-8 has.
PLACEHOLDER, CHECKSUM_PLACEHOLDER = b"\xff", b"\xfe" * 32
RESERVED_COLUMNS = ("id", "info", "checksum")


def is_reserved_name(name: str) -> bool:
    """Whether this name can't be the name of a tensor."""
    return name in RESERVED_COLUMNS or name.endswith("_shape")


def make_schema(columns: Mapping[str, str]) -> pa.Schema:
    """id, two columns for each tensor, info, checksum. The dtype is in the metadata of the tensor's field."""
    fields = [pa.field("id", pa.string(), nullable=False)]
    for name, dtype in columns.items():
        assert not is_reserved_name(name), f"column name {name!r}"
        fields.append(pa.field(name, pa.large_binary(), metadata={"dtype": dtype}))
        fields.append(pa.field(f"{name}_shape", pa.list_(pa.int32())))
    fields += [pa.field(name, pa.string(), nullable=False) for name in ("info", "checksum")]
    return pa.schema(fields)


@lru_cache
def _shape_array(shape: tuple[int, ...] | None) -> pa.ListArray:
    """An array of one value; rows of a bucket share it."""
    return pa.array([shape], pa.list_(pa.int32()))


class ShardWriter(shard.BaseShardWriter):
    """Writes `<stem>.arrow`."""

    suffix = shard.ARROW_SUFFIX
    _room = 0  # bytes reserved for the description

    def _open(self) -> None:
        if not self._room:
            described = shard.canonical_json(shard.build_description(self.meta, self.meta.ids, self.meta.rejects))
            self._room = len(described) + BYTES_PER_MEMBER * len(self.meta.ids)
        self._schema = make_schema(self.columns)
        blank = {DESCRIPTION_KEY: PLACEHOLDER * self._room, DESCRIPTION_CHECKSUM_KEY: CHECKSUM_PLACEHOLDER}
        self._blank_schema = self._schema.with_metadata(blank)
        self._file = self.store.open_temp(self.rel)
        self._out = pa.ipc.new_file(self._file, self._blank_schema)

    def _write(self, row: shard.ShardRow, info: bytes, checksum: str) -> None:
        # Slices of one array: a third of the time that three arrays take.
        texts = pa.array([row.id, info.decode(), checksum])
        cells: list[pa.Array] = [texts[:1]]
        for name in self.columns:
            array = row.tensors.get(name)
            if array is None:
                cells += [pa.nulls(1, pa.large_binary()), _shape_array(None)]
            else:  # a view
                buffers = [None, pa.py_buffer(struct.pack("<2q", 0, array.nbytes)), pa.py_buffer(array.raw())]
                cells += [pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, buffers), _shape_array(array.shape)]
        cells += [texts[1:2], texts[2:]]
        self._out.write_batch(pa.record_batch(cells, schema=self._schema))

    def finish(self) -> str:
        described = shard.canonical_json(shard.build_description(self.meta, self._ids, self._rejects))
        with self.store.writing(self.rel):
            self._out.close()
            if len(described) > self._room:
                self._enlarge(len(described))
            described = described.ljust(self._room)
            checksum = xxhash.xxh3_128_hexdigest(described).encode()
            values = {PLACEHOLDER * self._room: described, CHECKSUM_PLACEHOLDER: checksum}
            arrow_ipc.fill_placeholders(self._file, self._blank_schema, values)
        # Remove the other format first: a kill in between then means that the unit is encoded again, not two shards.
        shard.remove_other_format(self.store, self.rel)
        self.store.publish(self._file, self.rel)
        return self.rel

    def _enlarge(self, room: int) -> None:
        """Copy the rows into a new file with more room for the description."""
        narrow, self._room = self._file, room
        try:
            narrow.flush()
            self._open()
            batches = pa.ipc.open_file(pa.PythonFile(narrow, "r"))
            for number in range(batches.num_record_batches):
                self._out.write_batch(batches.get_batch(number))
            self._out.close()
        finally:
            self.store.discard_temp(narrow)


class ShardReader(shard.BaseShardReader):
    """Reads an Arrow shard. Opening reads only the end of the file; a row takes one read."""

    def _open(self) -> None:
        with as_damage(self.path, "it is not a complete Arrow file"):
            self._schema, self._spans = arrow_ipc.read_batch_index(self.file)
        metadata = self._schema.metadata or {}
        described = metadata.get(DESCRIPTION_KEY, b"")
        if xxhash.xxh3_128_hexdigest(described).encode() != metadata.get(DESCRIPTION_CHECKSUM_KEY):
            raise DamageError(self.path, "its description is missing or changed")
        with as_damage(self.path, "its description is not JSON"):
            value = parse_json(described)
        self.meta = shard.parse_description(value, self.path)
        with as_damage(self.path, "its columns are not the columns of a shard"):
            tensors = [field for field in self._schema if field.type == pa.large_binary()]
            self.columns = {
                check_name(column.name, "a column"): (column.metadata or {})[b"dtype"].decode() for column in tensors
            }
            if any(map(is_reserved_name, self.columns)) or not set(self.columns.values()) <= set(NUMPY_DTYPES):
                raise ValueError(f"columns {printable(self.columns)}")
            if not self._schema.remove_metadata().equals(make_schema(self.columns), check_metadata=True):
                raise ValueError(f"columns {printable(self._schema.names)}")
        if (count := len(self._spans)) != len(self.meta.ids):
            raise DamageError(self.path, f"it has {count} rows, but its description has {len(self.meta.ids)} row ids")

    def _row(self, i: int) -> tuple[shard.ShardRow, bytes, str]:
        offset, length = self._spans[i].tolist()
        self.file.seek(offset)
        message = self.file.read_buffer(length)
        batch = arrow_ipc.read_batch(message, self._schema)
        if batch.num_rows != 1:
            raise ValueError(f"{batch.num_rows} rows in one batch")
        tensors = {}
        for number, (name, dtype) in enumerate(self.columns.items()):
            content, sizes = batch.column(1 + 2 * number), batch.column(2 + 2 * number)
            if not sizes.null_count:
                # A view. Arrow's own scalars copy (at 512 KiB a row, 6 times slower).
                _, offsets, data = content.buffers()
                start, end = np.frombuffer(offsets, "<i8")[:2]
                view = memoryview(data)[start:end] if end > start else memoryview(b"")
                tensors[name] = Array(dtype, check_shape(sizes[0].as_py()), view)
            if sizes.null_count != content.null_count:
                raise ValueError(f"{name} lacks its bytes or its shape")
        id, info, checksum = (check_text(batch.column(number)[0].as_py(), "a value") for number in (0, -2, -1))
        stored = info.encode()
        return shard.ShardRow(id, tensors, parse_json(stored)), stored, checksum

    def _check_file(self) -> None:
        """Arrow writes the schema twice: files are read by the one at the end, streams by the one at the start, and
        another program may read this file as a stream."""
        self.file.seek(0)
        if self.file.read(len(arrow_ipc.FILE_START)) != arrow_ipc.FILE_START:
            raise DamageError(self.path, "it does not start as an Arrow file")
        with as_damage(self.path, "the schema at its start can't be read"):
            schema = pa.ipc.read_schema(self.file)
        if not schema.equals(self._schema, check_metadata=True):
            raise DamageError(self.path, "the schemas at its start and end differ")
