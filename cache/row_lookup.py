"""A table's rows by id: looked up one at a time, so that a million of them cost 16 bytes each and no Python objects."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.identity import id_prefixes

RowDict = dict[str, Any]


class RowLookup(Mapping[str, RowDict]):
    """Rows of `table` by the 32 hex digits in its column `key`; of rows with equal ids the first."""

    def __init__(self, table: pa.Table, key: str) -> None:
        self._table, self._key = table, key
        given = id_prefixes(table.column(key))
        self._order = np.argsort(given, kind="stable")
        self._heads = given[self._order]

    def __getitem__(self, name: str) -> RowDict:
        head = np.uint64(int(name[:16], 16))
        start = int(np.searchsorted(self._heads, head))
        for place in range(start, len(self._heads)):
            if self._heads[place] != head:
                break
            row = self._table.slice(int(self._order[place]), 1)
            if row.column(self._key)[0].as_py() == name:
                return row.to_pylist()[0]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Every id in the table's order, equal ones as often as they stand there."""
        for chunk in self._table.column(self._key).chunks:
            yield from chunk.to_pylist()

    def __len__(self) -> int:
        return self._table.num_rows
