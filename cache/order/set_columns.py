"""Values of a set's memory-mapped tables without Arrow's objects, and without a copy of a column.

Arrow makes an object for each value that is asked for: ten of them for each sample took as long as copying 1 MiB. An
index into a memoryview takes a tenth of a microsecond; numpy's fancy indexing pays from twenty rows on. And of whole
columns the runs of equal values.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

View = TypeVar("View")
Ints = NDArray[np.int64]


class _Column(ABC, Generic[View]):
    """A column's chunks as `View`s, and the chunk in which a row is."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = [0, *accumulate(map(len, chunks))]
        self._views = [self._open(chunk) for chunk in chunks]

    @abstractmethod
    def _open(self, chunk: pa.Array) -> View:
        """The parts of a chunk that `get` looks into."""

    def _find(self, row: int) -> tuple[View, int]:
        """The row's chunk and its number there; IndexError where there is no such row."""
        if not 0 <= row < self._starts[-1]:
            raise IndexError(f"row {row} of {self._starts[-1]}")
        if len(self._views) == 1:
            return self._views[0], row
        number = bisect_right(self._starts, row) - 1
        return self._views[number], row - self._starts[number]

    def _split(self, rows: Ints) -> Iterator[tuple[View, Ints, Ints]]:
        """Yield for each chunk that has some of `rows`: its view, which of them, and their numbers there."""
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(chunk).tolist():
            members = np.flatnonzero(chunk == number)
            yield self._views[number], members, rows[members] - self._starts[number]


class IntColumn(_Column[tuple[memoryview, memoryview | None, int]]):
    """Numbers, int32, with or without nulls."""

    def _open(self, chunk: pa.Array) -> tuple[memoryview, memoryview | None, int]:
        valid, _ = chunk.buffers()
        return _numbers(chunk), (_view(valid) if chunk.null_count else None), chunk.offset

    def get(self, row: int) -> int:
        """The number of a row, of a column without nulls."""
        (values, _, _), row = self._find(row)
        return values[row]

    def between(self, first: int, last: int) -> NDArray[np.int32]:
        """(last - first,) the numbers of rows from `first` to below `last`, of a column without nulls: a view where
        they are in one chunk."""
        parts = [np.frombuffer(self._views[0][0] if self._views else b"", np.int32)[:0]]
        for start, (values, _, _) in zip(self._starts, self._views, strict=False):
            if start < last and first < start + len(values):
                parts.append(np.frombuffer(values, np.int32)[max(0, first - start) : last - start])
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def take(self, rows: Ints, null: int = -1) -> Ints:
        """(n,) the number of each row, and `null` for null."""
        numbers_taken = np.empty(len(rows), np.int64)
        for (values, valid, offset), members, at in self._split(rows):
            stored = np.frombuffer(values, np.int32)[at]
            if valid is not None:
                bits = np.frombuffer(valid, np.uint8)[(at + offset) >> 3] >> ((at + offset) & 7) & 1
                stored = np.where(bits, stored, null)
            numbers_taken[members] = stored
        return numbers_taken


class BoolColumn(_Column[tuple[memoryview, int]]):
    """Truth values without nulls."""

    def _open(self, chunk: pa.Array) -> tuple[memoryview, int]:
        return _view(chunk.buffers()[1]), chunk.offset

    def get(self, row: int) -> bool:
        (bits, offset), row = self._find(row)
        return _bit(bits, row + offset)


class ListColumn(_Column[tuple[memoryview, memoryview]]):
    """Lists of int32 without nulls."""

    def _open(self, chunk: pa.Array) -> tuple[memoryview, memoryview]:
        return _view(chunk.buffers()[1]).cast("i")[chunk.offset :], _numbers(chunk.values)

    def get(self, row: int) -> list[int]:
        (ends, values), row = self._find(row)
        return values[ends[row] : ends[row + 1]].tolist()

    def lengths(self, rows: Ints) -> Ints:
        """(n,) the length of each row's list."""
        lengths = np.empty(len(rows), np.int64)
        for (ends, _), members, at in self._split(rows):
            all_ends = np.frombuffer(ends, np.int32)
            lengths[members] = all_ends[at + 1] - all_ends[at]
        return lengths

    def take(self, rows: Ints, places: Ints) -> Ints:
        """(n,) the number at a place of each row's list, which must have it."""
        numbers_taken = np.empty(len(rows), np.int64)
        for (ends, values), members, at in self._split(rows):
            numbers_taken[members] = np.frombuffer(values, np.int32)[
                np.frombuffer(ends, np.int32)[at] + places[members]
            ]
        return numbers_taken


class TextColumn(_Column[tuple[memoryview, memoryview]]):
    """Texts without nulls."""

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


def _bit(bits: memoryview, number: int) -> bool:
    return bool(bits[number >> 3] >> (number & 7) & 1)


def find_runs(table: pa.Table, keys: tuple[str, ...]) -> list[tuple[tuple, int, int]]:
    """(values of `keys`, first row, row after the last) of each run of rows in which they are equal."""
    with ThreadPoolExecutor(2) as pool:
        starts = np.unique(np.concatenate([*pool.map(_run_starts, (table.column(key) for key in keys))]))
    columns = [table.column(key).take(pa.array(starts)).to_pylist() for key in keys]
    runs: list[tuple[tuple, int, int]] = []
    bounds = pairwise([*starts.tolist(), table.num_rows])
    for (start, stop), values in zip(bounds, zip(*columns, strict=True), strict=True):
        if runs and runs[-1][0] == values:  # a chunk ended within the run
            start = runs.pop()[1]
        runs.append((values, start, stop))
    return runs


def _run_starts(column: pa.ChunkedArray) -> Ints:
    """Rows at which a run of equal values, or a chunk, begins."""
    firsts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    starts = [np.zeros(0, np.int64)]
    for first, chunk in zip(firsts, column.chunks, strict=False):
        ends = np.asarray(pc.run_end_encode(chunk).run_ends)
        starts.append(first + np.concatenate([[0], ends[:-1]]) if len(chunk) else starts[0])
    return np.concatenate(starts)
