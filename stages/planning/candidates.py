"""The items of a dataset during planning: the remaining items, and the items that a rule dropped."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.datasets import Dataset
from schemas.config.filters import Filter
from schemas.errors import LatentpressError
from schemas.tables import REJECTS_SCHEMA


def message_column(*parts: Any) -> pa.Array:
    """A column of sentences. parts: texts, numbers (shown with at most two decimals), or columns of these, which are
    joined."""

    def to_text(part: Any) -> Any:
        if isinstance(part, str):
            return part
        if isinstance(part, int | float):
            return f"{part:g}"
        values = pa.array(part) if isinstance(part, np.ndarray) else part
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        return (pc.round(values, 2) if pa.types.is_floating(values.type) else values).cast(pa.string())

    return pc.binary_join_element_wise(*map(to_text, parts), "")


class CandidateItems:
    """Rows of schemas.tables.MEDIA_SCHEMA: items, or the pictures and clips of items.

    values: name -> (n,) array with an entry for each row, which is dropped together with the row. rejects: tables of
    REJECTS_SCHEMA, one for each rule that dropped items.
    """

    def __init__(self, dataset: str, table: pa.Table) -> None:
        self.dataset, self.table = dataset, table
        self.values: dict[str, np.ndarray] = {}
        self.rejects: list[pa.Table] = []

    def __len__(self) -> int:
        return self.table.num_rows

    def column(self, name: str) -> pa.Array:
        return self.table.column(name).combine_chunks()

    def numbers(self, name: str) -> np.ndarray:
        """(n,) a numeric column; null becomes 0 for integers and NaN for floats."""
        column = self.table.column(name)
        return pc.fill_null(column, float("nan") if pa.types.is_floating(column.type) else 0).to_numpy()

    def sizes(self, prefix: str = "") -> pa.Array:
        """(n,) "WIDTHxHEIGHT" of the items. prefix: "source_" or "mask_" for the sizes of their sources or masks."""
        return message_column(self.column(f"{prefix}width"), "x", self.column(f"{prefix}height"))

    @property
    def videos(self) -> np.ndarray:
        return pc.equal(self.table.column("kind"), "video").to_numpy()

    def take(self, rows: np.ndarray) -> "CandidateItems":
        """A subset of the rows with their values. Rows that are dropped from the subset are also recorded in this
        object's `rejects`. rows: (m,) indices."""
        subset = CandidateItems(self.dataset, self.table)
        subset.values, subset.rejects = self.values, self.rejects
        if not np.array_equal(rows, np.arange(len(self))):
            subset.table = self.table.take(pa.array(rows))
            subset.values = {name: values[rows] for name, values in self.values.items()}
        return subset

    def drop(
        self, dropped: np.ndarray, reason: str, message: str | Callable[["CandidateItems"], pa.Array]
    ) -> np.ndarray:
        """Drop rows, and record the reason. Returns (n,) whether each row remains.

        dropped: (n,) whether to drop each row. message: text after "PATH: ": one text for all rows, or a function from
            the dropped items to a column of texts.
        """
        if dropped.any():
            rejected = self.take(np.flatnonzero(dropped))
            path = rejected.column("path")
            columns = {
                "stage": pa.repeat("bucket", len(rejected)),
                "item": message_column(f"{self.dataset}/", path),
                "path": path,
                "reason": pa.repeat(reason, len(rejected)),
                "message": message_column(path, ": ", message if isinstance(message, str) else message(rejected)),
                "retry": pa.repeat(False, len(rejected)),
            }
            self.rejects.append(pa.table(columns, schema=REJECTS_SCHEMA))
            self.table = self.table.filter(pa.array(~dropped))
            self.values = {name: values[~dropped] for name, values in self.values.items()}
        return ~dropped


def passes_filter(dataset: Dataset, option: str, table: pa.Table) -> np.ndarray:
    """(n,) whether each row of a media table passes the dataset's filter; all rows pass if it is not set. option: name
    of the option with the filter."""
    filter = getattr(dataset, option)
    if filter is None:
        return np.ones(len(table), bool)
    try:
        return np.asarray(Filter(filter).mask(table))
    except ValueError as error:
        raise LatentpressError(f"datasets.{dataset.id}.{option}: {error}", "correct the filter") from error


def drop_duplicate_ids(table: pa.Table, key: str) -> pa.Table:
    """The table with only the first row of each id. key: name of the column with ids."""
    if identity.count_distinct(table.column(key)) == table.num_rows:
        return table
    return first_rows(table, key)


def first_rows(table: pa.Table, *key: str) -> pa.Table:
    """The table with only the first row of each distinct combination of values. key: names of the combined columns."""
    values = pc.binary_join_element_wise(*(table.column(name) for name in key), "|").combine_chunks()
    # Codes are numbered in the order of first occurrence.
    codes = np.asarray(values.dictionary_encode().indices)
    highest_before = np.maximum.accumulate(np.append(-1, codes[:-1]))
    return table.filter(pa.array(codes > highest_before))
