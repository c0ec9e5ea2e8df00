"""Files and tables that a source lists, and its listing by path."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.discovery.sources.columns import LISTING_SCHEMA

Row = dict[str, Any]


def put(folder: Path, *names: str) -> None:
    """Files that contain their names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def write_table(folder: Path, rows: list[Row], kind: str = "csv") -> Path:
    path = folder / f"table.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def listed(source: Any) -> dict[str, Row]:
    tables = [LISTING_SCHEMA.empty_table(), *source.scan()]
    rows = pa.concat_tables(tables, promote_options="permissive").to_pylist()
    assert len({row["path"] for row in rows}) == len(rows)
    return {row["path"]: row for row in rows}


def reason(row: Row) -> str | None:
    return row["problem"] and row["problem"].partition(":")[0]
