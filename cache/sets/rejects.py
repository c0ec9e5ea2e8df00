"""rejects/<stage>/<name>.arrow: every item set aside, with its reason and the way to fix it.

Each writer (discover for a dataset, an encoding stage for a unit) has a file of its own and replaces all of it, so a
mended item leaves the list at the next run and no two machines write the same file. On an object store the lists of an
encoding stage's cache are also kept together, in rejects/<stage>/<fingerprint>.arrow, so that they take few requests.
"""

from collections.abc import Mapping
from contextlib import suppress

import pyarrow as pa

from cache.sets.table_checks import check_merged_rejects, check_rejects
from cache.store import arrow_ipc
from cache.store.damage import DamageError, as_damage, until_sound
from cache.store.files import Entry
from cache.store.store import Store
from schemas.tables import MERGED_REJECTS_SCHEMA, REJECTS_SCHEMA

LIST_SUFFIX = ".arrow"
MIN_UNMERGED = 16  # lists that are read by a request each before they are merged


def make_reject(stage: str, item: str, path: str, reason: str, message: str, retry: bool = False) -> dict:
    """One row of schemas.tables.REJECTS_SCHEMA. retry: whether the next run tries the item again."""
    return {"stage": stage, "item": item, "path": path, "reason": reason, "message": message, "retry": retry}


def write_rejects(store: Store, stage: str, name: str, rows: list[dict] | pa.Table) -> None:
    """Replace the list `name` of `stage` where it changed; an empty list is removed. rows: of REJECTS_SCHEMA."""
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
    """The rows of a list that is about to be replaced; none where it is damaged."""
    try:
        return read_list(store, stage, name).to_pylist()
    except DamageError:
        return []


def read_list(store: Store, stage: str, name: str) -> pa.Table:
    """The list `name` of `stage`; empty where nothing was set aside."""
    try:
        return store.read_table(f"rejects/{stage}/{name}.arrow", check_rejects)
    except FileNotFoundError:
        return REJECTS_SCHEMA.empty_table()


def read_stage(
    store: Store, stage: str, damaged: dict[str, DamageError] | None = None, merge: bool = False
) -> dict[str, list[dict]]:
    """name -> rows of every list of `stage`. damaged: receives the errors of damaged lists instead of raising them.

    On an object store lists that were read before are taken from one merged list, so that a thousand lists take few
    requests. merge: write that anew where MIN_UNMERGED lists or more are not in it.
    """
    prefix = f"rejects/{stage}"
    files = [entry for entry in store.list_files(prefix) if entry.name.endswith(LIST_SUFFIX)]
    merged = _read_merged(store, prefix) if store.root is None and files else {}
    lists = {entry: merged[key] for entry in files if (key := (entry.name, entry.version)) in merged}
    missing = [entry._replace(name=f"{prefix}/{entry.name}") for entry in files if entry not in lists]
    for entry, data in store.read_files(missing):
        name = entry.name.removeprefix(f"{prefix}/")
        try:
            lists[entry._replace(name=name)] = _parse_list(store, entry.name, [data]).to_pylist()
        except DamageError as damage:
            if damaged is None:
                raise
            damaged[name.removesuffix(LIST_SUFFIX)] = damage
    if merge and store.root is None and len(missing) >= MIN_UNMERGED:
        _write_merged(store, prefix, lists)
    return {entry.name.removesuffix(LIST_SUFFIX): rows for entry, rows in sorted(lists.items())}


def _parse_list(store: Store, rel: str, answers: list[bytes]) -> pa.Table:
    """The list `rel` from the answer that is here, or from those that are asked for where it is damaged."""

    def parse() -> pa.Table:
        with as_damage(store.path(rel), "it is not as it was written"):
            table = arrow_ipc.read_table(pa.BufferReader(answers.pop() if answers else store.read_bytes(rel)))
        with as_damage(store.path(rel), "its values can't be right"):
            check_rejects(table)
        return table

    return until_sound(store.remote_url, parse)


def _read_merged(store: Store, prefix: str) -> dict[tuple[str, str], list[dict]]:
    """(name, version of its object) -> rows of each list that was merged."""
    lists: dict[tuple[str, str], list[dict]] = {}
    with suppress(FileNotFoundError, DamageError):  # it can be made again at any time
        for row in store.read_table(f"{prefix}{LIST_SUFFIX}", check_merged_rejects).to_pylist():
            lists.setdefault((row.pop("list"), row.pop("version")), []).append(row)
    return lists


def _write_merged(store: Store, prefix: str, lists: Mapping[Entry, list[dict]]) -> None:
    """Several programs may do so at the same time: of whichever stays, each list is whole and named by its version."""
    merged = [row | {"list": entry.name, "version": entry.version} for entry, rows in lists.items() for row in rows]
    kept = [row for row in merged if row["version"]]
    store.write_table(f"{prefix}{LIST_SUFFIX}", pa.Table.from_pylist(kept, schema=MERGED_REJECTS_SCHEMA))
