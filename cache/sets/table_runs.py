"""Runs of equal values in a table's columns."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.order.schedule import Ints


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
