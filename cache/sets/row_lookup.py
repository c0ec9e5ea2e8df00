"""Rows of a plan's table by their ids."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.identity import id_prefixes


class RowLookup(Mapping[str, dict[str, Any]]):
    """Rows of `table` by the 32 hex digits in its column `key`; of rows with equal ids the first. Rows are read one at
    a time: 16 bytes of memory a row and no Python objects."""

    def __init__(self, table: pa.Table, key: str) -> None:
        self._table, self._key = table, key
        prefixes = id_prefixes(table.column(key))
        self._order = np.argsort(prefixes, kind="stable")
        self._prefixes = prefixes[self._order]

    def __getitem__(self, name: str) -> dict[str, Any]:
        try:
            prefix = np.uint64(int(name[:16], 16))
        except ValueError as error:  # not an id
            raise KeyError(name) from error
        first, end = (np.searchsorted(self._prefixes, prefix, side) for side in ("left", "right"))
        for number in self._order[first:end].tolist():
            row = self._table.slice(number, 1)
            if row.column(self._key)[0].as_py() == name:
                return row.to_pylist()[0]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Every id in the table's order, repeated ids included."""
        for chunk in self._table.column(self._key).chunks:
            yield from chunk.to_pylist()

    def __len__(self) -> int:
        return self._table.num_rows
