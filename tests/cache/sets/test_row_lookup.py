"""Rows of a plan by their ids."""

import pyarrow as pa

from cache.sets.row_lookup import RowLookup
from schemas.identity import hash_json


def test_an_unknown_name_has_no_row() -> None:
    ids = [hash_json(number) for number in range(5)]
    rows = RowLookup(pa.table({"id": ids, "n": range(5)}), "id")
    assert [rows[id]["n"] for id in ids] == [0, 1, 2, 3, 4] and rows.get(hash_json("x")) is None
    assert rows.get("not an id") is None and "" not in rows
