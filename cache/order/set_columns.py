"""Columns of a set's memory-mapped tables as numpy views, without an Arrow object for each value, and runs of equal
values in columns.

A set's tables have one chunk, unless a column of ids has more than 2 GiB. In this case, columns of numbers are copied.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class IntColumn:
    """A column of int32 numbers, with or without nulls."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._chunk = _one_chunk(column)
        _, values = self._chunk.buffers()
        without_nulls = pa.Array.from_buffers(pa.int32(), len(self._chunk), [None, values], offset=self._chunk.offset)
        self._values: NDArray[np.int32] = np.asarray(without_nulls)

    def get(self, row: int) -> int:
        """Return the number in a row. The column must not have nulls."""
        return int(self._values[row])

    def between(self, first: int, last: int) -> NDArray[np.int32]:
        """Return (last - first,) the numbers in the rows from `first` to below `last`, as a view. The column must not
        have nulls."""
        return self._values[first:last]

    def take(self, rows: Ints, null: int = -1) -> Ints:
        """Return (n,) the number in each row. null: number in place of a null."""
        numbers = self._values[rows].astype(np.int64)
        if self._chunk.null_count:
            numbers[np.asarray(self._chunk.take(pa.array(rows)).is_null())] = null
        return numbers


class ListColumn:
    """A column of lists of int32, without nulls."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        lists = _one_chunk(column)
        self._ends, self._values = np.asarray(lists.offsets), np.asarray(lists.values)

    def get(self, row: int) -> list[int]:
        return self._values[self._ends[row] : self._ends[row + 1]].tolist()

    def lengths(self, rows: Ints) -> Ints:
        """Return (n,) the length of the list in each row."""
        return (self._ends[rows + 1] - self._ends[rows]).astype(np.int64)

    def take(self, rows: Ints, places: Ints) -> Ints:
        """Return (n,) the number at position `places` of the list in each row. places: (n,) valid positions."""
        return self._values[self._ends[rows] + places].astype(np.int64)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def find_runs(table: pa.Table, keys: tuple[str, ...]) -> list[tuple[tuple, int, int]]:
    """Return the runs of consecutive rows with equal values in the columns `keys`: (values, first row, row after the
    last row) for each run."""
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
    """Return the rows at which a run of equal values or a chunk begins."""
    firsts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    starts = [np.zeros(0, np.int64)]
    for first, chunk in zip(firsts, column.chunks, strict=False):
        ends = np.asarray(pc.run_end_encode(chunk).run_ends)
        starts.append(first + np.concatenate([[0], ends[:-1]]) if len(chunk) else starts[0])
    return np.concatenate(starts)
