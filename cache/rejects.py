"""rejects/<stage>/<name>.arrow: every item set aside, with its reason and the way to fix it.

One file for each writer (a dataset for discover, a unit for an encoding stage), replaced whole, so that a
mended item leaves the list at the next run and no two machines write the same file.
"""

import pyarrow as pa

from cache import table_checks
from cache.damage import DamageError
from cache.store import Store
from schemas.tables import REJECTS_SCHEMA


def make_reject(stage: str, item: str, path: str, reason: str, message: str, retry: bool = False) -> dict:
    """One row of schemas.tables.REJECTS_SCHEMA. `retry`: the next run tries it again without being asked."""
    return {"stage": stage, "item": item, "path": path, "reason": reason, "message": message, "retry": retry}


def write_rejects(store: Store, stage: str, name: str, rows: list[dict] | pa.Table) -> None:
    """Replace the list `name` of `stage`, where it says otherwise; an empty one is removed. A long list comes as a
    table of schemas.tables.REJECTS_SCHEMA."""
    rel = f"rejects/{stage}/{name}.arrow"
    if len(rows):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=REJECTS_SCHEMA)
        table = table.sort_by([(key, "ascending") for key in ("item", "path", "reason")])
        if not _is_unchanged(store, rel, table):
            store.write_table(rel, table)
    elif store.exists(rel):
        store.remove(rel)


def _is_unchanged(store: Store, rel: str, table: pa.Table) -> bool:
    """Whether the list is there, whole, and the same."""
    try:
        return _read_table(store, rel).equals(table)
    except (FileNotFoundError, DamageError):
        return False


def read_undamaged(store: Store, stage: str, name: str) -> list[dict]:
    """The rows of a list that is about to be replaced: none of one that is damaged."""
    try:
        return read_list(store, stage, name).to_pylist()
    except DamageError:
        return []


def _read_table(store: Store, rel: str) -> pa.Table:
    return store.read_table(rel, table_checks.check_rejects)


def read_list(store: Store, stage: str, name: str) -> pa.Table:
    """The list `name` of `stage`; empty where nothing was set aside."""
    rel = f"rejects/{stage}/{name}.arrow"
    return _read_table(store, rel) if store.exists(rel) else REJECTS_SCHEMA.empty_table()


def read_stage(store: Store, stage: str, damaged: dict[str, DamageError] | None = None) -> dict[str, list[dict]]:
    """name -> rows, of everything that `stage` set aside. damaged: takes the lists that are; else they are errors."""
    found = {}
    for file in store.list_names(f"rejects/{stage}"):
        if file.endswith(".arrow"):
            name = file.removesuffix(".arrow")
            try:
                found[name] = _read_table(store, f"rejects/{stage}/{file}").to_pylist()
            except DamageError as damage:
                if damaged is None:
                    raise
                damaged[name] = damage
    return found
