"""rejects/<stage>/<name>.arrow: every item set aside, with its reason and the way to fix it.

One file for each writer (a dataset for discover, a unit for an encoding stage), replaced whole, so that a
mended item leaves the list at the next run and no two machines write the same file.
"""

import pyarrow as pa

from cache.store import Store
from schemas.tables import REJECTS


def reject(stage: str, item: str, path: str, reason: str, message: str, retry: bool = False) -> dict:
    """One row of schemas.tables.REJECTS. `retry`: the next run tries it again without being asked."""
    return {"stage": stage, "item": item, "path": path, "reason": reason, "message": message, "retry": retry}


def write(store: Store, stage: str, name: str, rows: list[dict]) -> None:
    """Replace the list `name` of `stage`, where it says otherwise; an empty one is removed."""
    rel = f"rejects/{stage}/{name}.arrow"
    if rows:
        rows = sorted(rows, key=lambda row: (row["item"], row["path"], row["reason"]))
        table = pa.Table.from_pylist(rows, schema=REJECTS)
        if not store.exists(rel) or not store.read_table(rel).equals(table):
            store.write_table(rel, table)
    elif store.exists(rel):
        store.remove(rel)


def read(store: Store, stage: str) -> dict[str, list[dict]]:
    """name -> rows, of everything that `stage` set aside."""
    found = [name for name in store.names(f"rejects/{stage}") if name.endswith(".arrow")]
    return {name.removesuffix(".arrow"): store.read_table(f"rejects/{stage}/{name}").to_pylist() for name in found}
