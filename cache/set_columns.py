"""Values of a set's memory-mapped tables without Arrow's objects, and without a copy of a column.

Arrow makes an object for each value that is asked for: ten of them for each sample took as long as copying 1 MiB. An
index into a memoryview takes a tenth of a microsecond; numpy's fancy indexing pays from twenty rows on.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, TypeVar

import pyarrow as pa

View = TypeVar("View")


class _Column(ABC, Generic[View]):
    """A column's chunks as `View`s, and the chunk in which a row is."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = [0, *accumulate(map(len, chunks))]
        self._views = [self._open(chunk) for chunk in chunks]

    @abstractmethod
    def _open(self, chunk: pa.Array) -> View:
        """What `get` looks into."""

    def _find(self, row: int) -> tuple[View, int]:
        """The row's chunk and its number there; IndexError where there is no such row."""
        if not 0 <= row < self._starts[-1]:
            raise IndexError(f"row {row} of {self._starts[-1]}")
        if len(self._views) == 1:
            return self._views[0], row
        number = bisect_right(self._starts, row) - 1
        return self._views[number], row - self._starts[number]


class IntColumn(_Column[tuple[memoryview, memoryview | None, int]]):
    """Of int32, with or without nulls."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        super().__init__(column)
        self.number: Callable[[int], int] = self._number
        if len(self._views) == 1:
            self.number = self._views[0][0].__getitem__

    def _open(self, chunk: pa.Array) -> tuple[memoryview, memoryview | None, int]:
        valid, _ = chunk.buffers()
        return _numbers(chunk), (_view(valid) if chunk.null_count else None), chunk.offset

    def get(self, row: int) -> int | None:
        (values, valid, offset), row = self._find(row)
        return values[row] if valid is None or _bit(valid, row + offset) else None

    def _number(self, row: int) -> int:
        """As `get`, of a column without nulls."""
        (values, _, _), row = self._find(row)
        return values[row]


class BoolColumn(_Column[tuple[memoryview, int]]):
    """Of truth values without nulls."""

    def _open(self, chunk: pa.Array) -> tuple[memoryview, int]:
        return _view(chunk.buffers()[1]), chunk.offset

    def get(self, row: int) -> bool:
        (bits, offset), row = self._find(row)
        return _bit(bits, row + offset)


class ListColumn(_Column[tuple[memoryview, memoryview]]):
    """Of lists of int32 without nulls."""

    def _open(self, chunk: pa.Array) -> tuple[memoryview, memoryview]:
        return _view(chunk.buffers()[1]).cast("i")[chunk.offset :], _numbers(chunk.values)

    def length(self, row: int) -> int:
        (ends, _), row = self._find(row)
        return ends[row + 1] - ends[row]

    def get(self, row: int, place: int) -> int:
        """The number at a place of the row's list; IndexError where it is shorter."""
        (ends, values), row = self._find(row)
        if not 0 <= place < ends[row + 1] - ends[row]:
            raise IndexError(f"place {place} of a list of {ends[row + 1] - ends[row]}")
        return values[ends[row] + place]


class TextColumn(_Column[tuple[memoryview, memoryview]]):
    """Of texts without nulls."""

    def _open(self, chunk: pa.Array) -> tuple[memoryview, memoryview]:
        _, ends, data = chunk.buffers()
        return _view(ends).cast("i")[chunk.offset :], _view(data)

    def get(self, row: int) -> bytes:
        """The text of a row, in UTF-8."""
        (ends, data), row = self._find(row)
        return data[ends[row] : ends[row + 1]].tobytes()


def _view(buffer: pa.Buffer | None) -> memoryview:
    return memoryview(b"" if buffer is None else buffer).cast("B")


def _numbers(chunk: pa.Array) -> memoryview:
    size = 4 * (chunk.offset + len(chunk))
    return _view(chunk.buffers()[1])[:size].cast("i")[chunk.offset :]


def _bit(bits: memoryview, place: int) -> bool:
    return bool(bits[place >> 3] >> (place & 7) & 1)
