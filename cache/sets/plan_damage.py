"""Damaged plan generations: found, and moved away, so that what they held is planned again."""

from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa

from cache.sets.plans import PLAN_TABLES, list_plans, load_plan, read_plan_table
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.tables import UNITS_SCHEMA


def find_damage(store: Store, name: str) -> DamageError | None:
    """The first damage found in generation `name`."""
    try:
        load_plan(store, name)
        for what in PLAN_TABLES:
            read_plan_table(store, name, what)
    except DamageError as damage:
        return damage
    return None


def quarantine(store: Store, name: str) -> str:
    """Move a generation to damaged/plans/, its plan.json first; returns its new folder."""
    taken, number = {kept.partition("/")[0] for kept in store.list_names("damaged/plans")}, 1
    while f"{name}.{number}" in taken:
        number += 1
    kept = f"damaged/plans/{name}.{number}"
    for file in ("plan.json", *(f"{what}.arrow" for what in PLAN_TABLES)):
        with suppress(FileNotFoundError):
            store.move(f"plans/{name}/{file}", f"{kept}/{file}")
    store.remove_empty_folders(f"plans/{name}")
    return kept


def quarantine_damaged(store: Store, warn: Callable[[str], object], dry_run: bool = False) -> None:
    """Move damaged plans away, so that what they held is planned again; a dry run raises the damage. Unit ids are made
    of their members' ids, so the shards of units that are planned again stay in use."""
    for name in list_plans(store):
        if damage := find_damage(store, name):
            if dry_run:
                raise damage
            warn(f"{damage.message}; this plan is kept as {quarantine(store, name)} and planned again")


def all_units(store: Store) -> pa.Table:
    """Table of schemas.tables.UNITS_SCHEMA: the units of all undamaged generations, of any settings."""
    names = [name for name in list_plans(store) if find_damage(store, name) is None]
    return pa.concat_tables([UNITS_SCHEMA.empty_table(), *(read_plan_table(store, name, "units") for name in names)])
