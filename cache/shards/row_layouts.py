"""The places of a row's parts in the bytes of its Arrow message, without Arrow's objects for each row.

Arrow reads a row through a message, a batch, an array for each column and a scalar for each value: 150 microseconds,
in which 2 MiB are copied. Of rows with tensors of the same shapes, however, the message's metadata are the same bytes,
and so are the offsets and shapes in its body. So the first such row is read and validated by Arrow, and its layout is
kept under exactly these bytes; a row whose bytes are others is read by Arrow again. What is left in a row is its id,
its info, its checksum and the tensors' numbers, which the checksum covers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from cache.shards.shard import pack_length, pack_tensor_head
from cache.store.json_checks import check_shape

MAX_LAYOUTS = 1 << 14  # of one list of columns, about 2 KiB each; a length of a text is a layout of its own
_PREFIX_BYTES = 8  # of a message: a mark and the length of its metadata

BytesSpan = tuple[int, int]  # first byte and the byte after the last


class TensorSpan(NamedTuple):
    """A tensor in a row: `size` bytes, `start` bytes after the row's own start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The positions of a row's parts, counted from its start. tensors: sorted by name.

    heads: what the row's checksum covers before the bytes of each tensor. id, info, checksum: (0, 0) where they are not
    in the row's own bytes. end: after the last part.
    """

    tensors: tuple[TensorSpan, ...]
    heads: tuple[bytes, ...] = ()
    id: BytesSpan = (0, 0)
    info: BytesSpan = (0, 0)
    checksum: BytesSpan = (0, 0)
    end: int = 0

    def start_hash(self, id: bytes, info: bytes) -> xxhash.xxh3_128:
        """Begin `cache.shards.shard.row_checksum`; each tensor's head and bytes follow, in order."""
        return xxhash.xxh3_128(b"".join((pack_length(len(id)), id, pack_length(len(info)), info)))


class RowLayouts:
    """The layouts of Arrow messages of one row with these columns. Threads may share it."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = dict(columns)
        #: metadata -> what in a message with this metadata is neither text nor numbers of a tensor.
        self._fixed: dict[bytes, list[BytesSpan]] = {}
        self._layouts: dict[tuple[bytes, bytes], RowLayout] = {}

    def find(self, data: memoryview, start: int) -> RowLayout | None:
        """The layout of the message at `start`; None where no row with the same bytes was learnt."""
        head = data[start : start + _metadata_end(data, start)].tobytes()
        fixed = self._fixed.get(head)
        if fixed is None:
            return None
        return self._layouts.get((head, b"".join([data[start + first : start + end] for first, end in fixed])))

    def learn(self, message: pa.Buffer, batch: pa.RecordBatch) -> RowLayout | None:
        """The layout of a validated batch that Arrow read from `message`, kept for the next; None for what is not
        written as our writer does: it is read by Arrow each time."""
        data = memoryview(message).cast("B")
        described = describe_row(batch, self._columns, message.address, message.size)
        if described is None:
            return None
        fixed, layout = described
        if len(self._layouts) >= MAX_LAYOUTS:
            self._fixed, self._layouts = {}, {}
        head = data[: _metadata_end(data, 0)].tobytes()
        known = self._fixed.setdefault(head, fixed)
        if known != fixed:
            return None
        return self._layouts.setdefault((head, b"".join([data[first:end] for first, end in fixed])), layout)


@lru_cache(maxsize=64)
def layouts_of(columns: tuple[tuple[str, str], ...]) -> RowLayouts:
    """The layouts of all shards with these columns; few kinds of shards are read in one process."""
    return RowLayouts(dict(columns))


def _metadata_end(data: memoryview, start: int) -> int:
    return _PREFIX_BYTES + int.from_bytes(data[start + 4 : start + _PREFIX_BYTES], "little")


def describe_row(
    batch: pa.RecordBatch, columns: Mapping[str, str], address: int, size: int
) -> tuple[list[BytesSpan], RowLayout] | None:
    """The fixed bytes and the layout of a validated batch of one row, a view into `size` bytes at `address`."""
    fixed: list[BytesSpan] = []

    def span_of(buffer: pa.Buffer | None) -> BytesSpan:
        assert buffer is not None
        return buffer.address - address, buffer.address - address + buffer.size

    def keep(buffers: Sequence[pa.Buffer | None]) -> None:
        fixed.extend(span_of(buffer) for buffer in buffers if buffer is not None and buffer.size)

    def values(number: int, offset: str) -> BytesSpan:
        """The bytes of a text or of a tensor; its offsets and validity are fixed."""
        *before, data = batch.column(number).buffers()
        keep(before)
        first, end = (int(offset_value) for offset_value in np.frombuffer(before[-1], offset)[:2])
        begin = span_of(data)[0]
        return begin + first, begin + end

    try:
        id = values(0, "<i4")
        tensors = []
        for number, (name, dtype) in enumerate(columns.items()):
            content, sizes = batch.column(1 + 2 * number), batch.column(2 + 2 * number)
            keep(sizes.buffers())
            if sizes.null_count or content.null_count:
                keep(content.buffers())
                if sizes.null_count != content.null_count:
                    return None
                continue
            start, end = values(1 + 2 * number, "<i8")
            tensors.append(TensorSpan(name, dtype, check_shape(sizes[0].as_py()), start, end - start))
        info, checksum = (values(batch.num_columns - number, "<i4") for number in (2, 1))
    except (AssertionError, TypeError):  # a buffer that an empty value does without
        return None
    spans = [*fixed, id, info, checksum, *((span.start, span.start + span.size) for span in tensors)]
    end = max(span[1] for span in spans)
    if not tensors or min(span[0] for span in spans) < 0 or end > size:  # Arrow copied a part to align it
        return None
    tensors.sort()
    heads = tuple(pack_tensor_head(span.name, span.dtype, span.shape, span.size) for span in tensors)
    return sorted(set(fixed)), RowLayout(tuple(tensors), heads, id, info, checksum, end)


def view_layout(tensors: Mapping[str, Any], address: int) -> RowLayout:
    """The layout of tensors (`cache.shards.tensors.Array`) that are views into memory, counted from `address`."""
    spans = []
    for name, array in sorted(tensors.items()):
        start = np.frombuffer(array.data, np.uint8).ctypes.data - address if array.nbytes else 0
        spans.append(TensorSpan(name, array.dtype, array.shape, start, array.nbytes))
    return RowLayout(tuple(spans), end=max((span.start + span.size for span in spans), default=0))
