"""rejects/<stage>/<name>.arrow: every rejected item, with its reason and the way to fix it.

Each writer (discover for a dataset, an encoding stage for a unit) replaces one separate file as a whole, so a
corrected item leaves the list at the next run and no two machines write the same file.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pyarrow as pa

from cache.sets.table_checks import check_rejects
from cache.store.damage import DamageError
from cache.store.store import FILES_AT_ONCE, Store
from schemas.tables import REJECTS_SCHEMA

LIST_SUFFIX = ".arrow"


def make_reject(stage: str, item: str, path: str, reason: str, message: str, retry: bool = False) -> dict:
    """One row of schemas.tables.REJECTS_SCHEMA. retry: whether the next run tries the item again."""
    return {"stage": stage, "item": item, "path": path, "reason": reason, "message": message, "retry": retry}


def write_rejects(store: Store, stage: str, name: str, rows: list[dict] | pa.Table) -> None:
    """Replace the list `name` of `stage` if it changed; an empty list is removed. rows: table of REJECTS_SCHEMA."""
    rel = f"rejects/{stage}/{name}.arrow"
    if len(rows):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=REJECTS_SCHEMA)
        table = table.sort_by([(key, "ascending") for key in ("item", "path", "reason")])
        with suppress(FileNotFoundError, DamageError):
            if store.read_table(rel, check_rejects).equals(table):
                return
        store.write_table(rel, table)
    elif store.exists(rel):
        store.remove(rel)


def read_undamaged(store: Store, stage: str, name: str) -> list[dict]:
    """Return the rows of a list that is about to be replaced; no rows if the list is damaged."""
    try:
        return read_list(store, stage, name).to_pylist()
    except DamageError:
        return []


def read_list(store: Store, stage: str, name: str) -> pa.Table:
    """Return the list `name` of `stage`; empty if no item was rejected."""
    try:
        return store.read_table(f"rejects/{stage}/{name}.arrow", check_rejects)
    except FileNotFoundError:
        return REJECTS_SCHEMA.empty_table()


def read_stage(store: Store, stage: str, damaged: dict[str, DamageError] | None = None) -> dict[str, list[dict]]:
    """name -> rows of every list of `stage`. damaged: receives the errors of damaged lists instead of raising them."""
    prefix = f"rejects/{stage}"
    names = [name.removesuffix(LIST_SUFFIX) for name in store.list_names(prefix) if name.endswith(LIST_SUFFIX)]

    def read(name: str) -> list[dict]:
        try:
            return read_list(store, stage, name).to_pylist()
        except DamageError as damage:
            if damaged is None:
                raise
            damaged[name] = damage
            return []

    with ThreadPoolExecutor(1 if store.root is not None else FILES_AT_ONCE) as threads:
        lists = dict(zip(names, threads.map(read, names), strict=True))
    return {name: rows for name, rows in lists.items() if rows}
