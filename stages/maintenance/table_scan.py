"""Every table under a root, and every JSON file beside one: read whole, compared with its checksum, its values checked.

What is damaged is made again by the program that wrote it, from what that was made of: a plan from the media tables, a
set from plan and shards, a list of what was set aside by its stage. `verify
--repair` does so for plans and sets.
"""

from collections.abc import Callable

from cache import plans, table_checks
from cache.damage import DamageError, rebuild_program
from cache.exported_set import ExportedSet
from cache.layout import is_project_file
from cache.opening import read_pointer
from cache.store import Store
from cache.trainset import TABLE_CHECKS, TrainSet, read_set_table
from stages.discovery import media_table
from stages.maintenance.shard_checks import shards_of_set

DamageByPath = dict[str, list[DamageError]]  # by path


def find_damaged_tables(store: Store) -> tuple[int, DamageByPath]:
    """How many files were looked at, and what is wrong with them. What is removed meanwhile is not looked at."""
    found = DamageByPath()
    names = [name for top in ("media", "plans", "sets", "rejects") for name in _table_paths(store, top)]
    for name in names:
        look = _table_check(store, name)
        try:
            look()
        except FileNotFoundError:
            continue
        except DamageError as damage:
            found.setdefault(store.relative(damage.path), []).append(damage)
    return len(names), found


def _table_paths(store: Store, top: str) -> list[str]:
    """Of tables and the JSON files that make them exist; then what such a file says is there and is not."""
    names = [f"{top}/{name}" for name in store.list_names(top) if is_project_file(f"{top}/{name}")]
    folders = {name.rpartition("/")[0] for name in names if name.endswith(("/plan.json", "/set.json"))}
    wanted = {"plans": plans.PLAN_TABLES, "sets": TABLE_CHECKS}.get(top, ())
    making = [name for name in names if top in ("plans", "sets") and name.count("/") == 2]
    kept = [name for name in names if name not in making or name.rpartition("/")[0] in folders]
    return sorted({*kept, *(f"{folder}/{table}.arrow" for folder in folders for table in wanted)})


def _table_check(store: Store, rel: str) -> Callable[[], object]:
    """What reads the file at `rel` as the programs do."""
    top, name, file = f"{rel}//".split("/")[:3]
    table = file.removesuffix(".arrow")
    if top == "media":
        return lambda: store.read_table(rel, media_table.check_media_table)
    if top == "rejects":
        return lambda: store.read_table(rel, table_checks.check_rejects)
    if top == "plans":
        known = table in plans.PLAN_TABLES
        return lambda: plans.read_plan_table(store, name, table) if known else plans.load_plan(store, name)
    if not file:
        return lambda: read_pointer(store, rel)
    return lambda: read_set_table(store, name, table) if table in TABLE_CHECKS else _check_set(store, name)


def _check_set(store: Store, name: str) -> None:
    """That its description and its tables, where each by itself is sound, go together."""
    meta = store.read_json(f"sets/{name}/set.json")
    for table in TABLE_CHECKS:
        try:
            read_set_table(store, name, table)
        except DamageError:
            return
    shards_of_set(store, name)
    (ExportedSet if "export" in meta else TrainSet)(store, name, meta).close()


def rebuild_commands(paths: DamageByPath) -> list[str]:
    """What makes these files again, in the order in which it is to be run."""
    order = ["discover", "bucket", "encode-text", "encode-latents", "encode-vision", "index"]
    programs = {rebuild_program(path) for path in paths}
    known = [f"latentpress {name}" for name in order if name in programs]
    return known + [f"latentpress {name}" for name in sorted(programs - {*order})]
