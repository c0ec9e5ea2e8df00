"""Shards as Arrow IPC files: one row a record batch, uncompressed, described in the schema's metadata.

The description (which rows succeeded) is known only at the end while Arrow writes the schema first, so it is
written blank and filled in, and rows are written as they are added. Keeping them in memory until then took 128 MiB,
or whatever a unit has, and as long again, since new memory costs more than the copy. Putting the description in a
last empty batch or in the footer alone would have hidden it from readers that know only schemas.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Self

import numpy as np
import pyarrow as pa
import xxhash

from cache import arrow_ipc, json_checks
from cache.damage import DamageError
from cache.files import explained
from cache.shard import (
    ARROW_SUFFIX,
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
from cache.tensors import NUMPY_DTYPES, Array

DESCRIPTION_KEY, DESCRIPTION_CHECKSUM_KEY = b"latentpress", b"latentpress_checksum"
#: Bytes of the description left for each member: enough to say of a quarter of them why they are set aside.
BYTES_PER_MEMBER = 64
#: What stands for a description and its checksum that are not known yet: no text in UTF-8 holds these.
PLACEHOLDER, CHECKSUM_PLACEHOLDER = b"\xff", b"\xfe" * 32
RESERVED_COLUMNS = ("id", "info", "checksum")


def is_reserved_name(name: str) -> bool:
    """Whether no tensor may be called so."""
    return name in RESERVED_COLUMNS or name.endswith("_shape")


def make_schema(columns: Mapping[str, str], metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """id, then two columns a tensor, then info and checksum. The dtype stands in the field's metadata."""
    fields = [pa.field("id", pa.string(), nullable=False)]
    for name, dtype in columns.items():
        assert not is_reserved_name(name), f"column name {name!r}"
        fields.append(pa.field(name, pa.large_binary(), metadata={"dtype": dtype}))
        fields.append(pa.field(f"{name}_shape", pa.list_(pa.int32())))
    fields += [
        pa.field("info", pa.string(), nullable=False),
        pa.field("checksum", pa.string(), nullable=False),
    ]
    return pa.schema(fields, metadata=metadata)


def _to_binary_array(data: memoryview) -> pa.LargeBinaryArray:
    """One value, a view."""
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, _offsets_buffer(data.nbytes), pa.py_buffer(data)]
    )


@lru_cache
def _offsets_buffer(size: int) -> pa.Buffer:
    return pa.py_buffer(np.array([0, size], "<i8").tobytes())


@lru_cache
def _shape_array(shape: tuple[int, ...] | None) -> pa.ListArray:
    """One value; rows of a bucket share it."""
    return pa.array([shape], pa.list_(pa.int32()))


def _to_memoryview(cell: pa.LargeBinaryArray) -> memoryview:
    """The inverse of `_to_binary_array`: a view. Arrow's own scalars copy (at 512 KiB a row, 6 times slower)."""
    _, offsets, content = cell.buffers()
    start, end = np.frombuffer(offsets, "<i8")[:2]
    return memoryview(content)[start:end] if end > start else memoryview(b"")


class ShardWriter:
    """Writes `<stem>.arrow`. `columns`: tensor name -> dtype. Rows are written as they are added, in that order."""

    def __init__(self, store: Store, stem: str, meta: ShardMeta, columns: Mapping[str, str]) -> None:
        self.store, self.rel, self.meta, self.columns = store, stem + ARROW_SUFFIX, meta, dict(columns)
        self._schema = make_schema(self.columns)
        self._ids: list[str] = []
        self._taken: set[str] = set()
        self._set_aside = list(meta.set_aside)
        self._room = len(canonical_json(build_description(meta, meta.ids, meta.set_aside))) + BYTES_PER_MEMBER * len(
            meta.ids
        )
        self._open()

    def _open(self) -> None:
        blank = {DESCRIPTION_KEY: PLACEHOLDER * self._room, DESCRIPTION_CHECKSUM_KEY: CHECKSUM_PLACEHOLDER}
        self._blank = self._schema.with_metadata(blank)
        self._file = self.store.open_temp(self.rel)
        self._out = pa.ipc.new_file(self._file, self._blank)

    def add(self, row: ShardRow) -> None:
        check_row(row, self.columns, self._taken)
        info = canonical_json(row.info)
        # One array made and cut takes a third of the time of three.
        texts = pa.array([row.id, info.decode(), row_checksum(row.id, info, row.tensors)])
        cells: list[pa.Array] = [texts[:1]]
        for name in self.columns:
            array = row.tensors.get(name)
            cells.append(pa.nulls(1, pa.large_binary()) if array is None else _to_binary_array(array.raw()))
            cells.append(_shape_array(None if array is None else array.shape))
        cells += [texts[1:2], texts[2:]]
        with explained(self.store.path(self.rel)):
            self._out.write_batch(pa.record_batch(cells, schema=self._schema))
        self._ids.append(row.id)
        self._taken.add(row.id)

    def set_aside(self, member: RejectedMember) -> None:
        self._set_aside.append(member)

    def finish(self) -> str:
        """Publish; returns the shard's relative path. StoreError where it can't be written."""
        described = canonical_json(build_description(self.meta, self._ids, self._set_aside))
        with explained(self.store.path(self.rel)):
            self._close()
            if len(described) > self._room:
                self._enlarge(len(described))
            self._describe(described.ljust(self._room))
        # Before this one appears: killed in between, the unit is done again. After it, two would stay.
        remove_other_format(self.store, self.rel)
        self.store.publish(self._file.name, self.rel)
        return self.rel

    def _close(self) -> None:
        self._out.close()
        self._file.close()

    def _enlarge(self, room: int) -> None:
        """Copy what was written behind a larger blank."""
        narrow, self._room = self._file, room
        try:
            with pa.memory_map(narrow.name) as source:
                self._open()
                batches = pa.ipc.open_file(source)
                for number in range(batches.num_record_batches):
                    self._out.write_batch(batches.get_batch(number))
                self._close()
        finally:
            self.store.discard_temp(narrow)

    def _describe(self, described: bytes) -> None:
        """Fill in the blanks."""
        checksum = xxhash.xxh3_128_hexdigest(described).encode()
        arrow_ipc.fill_placeholders(
            self._file.name, self._blank, {PLACEHOLDER * self._room: described, CHECKSUM_PLACEHOLDER: checksum}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.discard_temp(self._file)


class ShardReader(BaseShardReader):
    """Reads `rel`. Opening reads the end of the file only; a row costs one read."""

    def _open(self) -> None:
        self._frames = self.read_or_damage(
            lambda: arrow_ipc.read_batch_index(self.file), "it is not a whole Arrow file"
        )
        schema = self._frames.schema
        metadata = schema.metadata or {}
        described = metadata.get(DESCRIPTION_KEY, b"")
        if xxhash.xxh3_128_hexdigest(described).encode() != metadata.get(DESCRIPTION_CHECKSUM_KEY):
            raise DamageError(self.path, "its description is missing or changed")
        value = self.read_or_damage(lambda: json_checks.parse_json(described), "its description is no JSON")
        self.meta = parse_description(value, self.path)
        self.columns = self.read_or_damage(lambda: _parse_columns(schema), "its columns are not those of a shard")
        if len(self._frames.ranges) != len(self.meta.ids):
            count = len(self._frames.ranges)
            raise DamageError(self.path, f"it has {count} rows and says that it has {len(self.meta.ids)}")

    def _row(self, i: int) -> tuple[ShardRow, bytes, str]:
        batch = arrow_ipc.read_batch(self.file, self._frames.ranges[i], self._frames.schema)
        if batch.num_rows != 1:
            raise ValueError(f"{batch.num_rows} rows in one batch")
        tensors = {}
        for number, (name, dtype) in enumerate(self.columns.items()):
            content, sizes = batch.column(1 + 2 * number), batch.column(2 + 2 * number)
            if not sizes.null_count:
                tensors[name] = Array(dtype, json_checks.check_shape(sizes[0].as_py()), _to_memoryview(content))
            if sizes.null_count != content.null_count:
                raise ValueError(f"{name} has bytes or a shape, and not both")
        id, info, checksum = (_read_text(batch.column(place)) for place in (0, -2, -1))
        stored = info.encode()
        return ShardRow(id, tensors, json_checks.parse_json(stored)), stored, checksum

    def _check_file(self) -> None:
        """Arrow writes the schema twice; a file is read by the one at its end, a stream by the one at its
        start, and a stranger may read this file as a stream."""
        self.file.seek(0)
        if self.file.read(len(arrow_ipc.FILE_START)) != arrow_ipc.FILE_START:
            raise DamageError(self.path, "it does not start as an Arrow file")
        schema = self.read_or_damage(lambda: pa.ipc.read_schema(self.file), "the schema at its start can't be read")
        if not schema.equals(self._frames.schema, check_metadata=True):
            raise DamageError(self.path, "the schemas at its start and end differ")


def _read_text(cell: pa.StringArray) -> str:
    return json_checks.check_text(cell[0].as_py(), "what should be text")


def _parse_columns(schema: pa.Schema) -> dict[str, str]:
    """Tensor name -> dtype; ValueError or KeyError where the schema is not a shard's."""
    tensors = [field for field in schema if field.type == pa.large_binary()]
    columns = {
        json_checks.check_name(field.name, "a column"): (field.metadata or {})[b"dtype"].decode() for field in tensors
    }
    if any(is_reserved_name(name) for name in columns) or not set(columns.values()) <= set(NUMPY_DTYPES):
        raise ValueError(f"columns {json_checks.printable(columns)}")
    if not schema.remove_metadata().equals(make_schema(columns), check_metadata=True):
        raise ValueError(f"columns {json_checks.printable(schema.names)}")
    return columns
