"""Values computed from the tables of a large set, slice by slice, equal the results of a plain loop."""

from itertools import groupby, pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.order.set_columns import find_runs
from cache.sets import table_checks
from schemas.tables import INDEX_SCHEMA

ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.5, 1.0]), st.integers(0, 1)), max_size=40)


def in_chunks(table: pa.Table, cuts: list[int]) -> pa.Table:
    """The same rows in several chunks, some of them empty."""
    bounds = [0, *sorted(min(cut, len(table)) for cut in cuts), len(table)]
    return pa.concat_tables([table.slice(first, stop - first) for first, stop in pairwise(bounds)])


@settings(max_examples=60, deadline=None)
@given(ROWS, st.lists(st.integers(0, 40), max_size=4))
def test_runs_of_equal_values(rows: list[tuple], cuts: list[int]) -> None:
    schema = pa.schema([("bucket", pa.string()), ("weight", pa.float64()), ("repeats", pa.int32())])
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
    expected, first = [], 0
    for values, members in groupby(rows):
        count = len(list(members))
        expected.append((values, first, first + count))
        first += count
    assert find_runs(in_chunks(table, cuts), tuple(schema.names)) == expected


def test_a_column_is_checked_in_every_chunk() -> None:
    row = {"sample_id": "a", "role": "train", "dataset": "d", "bucket": "64x32@1", "repeats": 0, "weight": 1.0}
    row |= {"regularization": False, "shard": 0, "row": 0, "texts": [0], "null_text": None}
    valid = pa.Table.from_pylist([row] * 3, INDEX_SCHEMA)
    table_checks.check_index(pa.concat_tables([valid, valid]))
    table_checks.check_index(valid.slice(0, 0))
    for name, value in (("role", "x"), ("bucket", "x"), ("weight", float("nan")), ("repeats", -1)):
        invalid = pa.Table.from_pylist([row, row | {name: value}, row], INDEX_SCHEMA)
        for table in (pa.concat_tables([valid, invalid]), pa.concat_tables([invalid, valid])):
            with pytest.raises(ValueError):
                table_checks.check_index(table)
