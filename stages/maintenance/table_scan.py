"""Check every table under a root and the JSON files of plans and sets: checksums, and the values that they hold.

The program that wrote a damaged file makes it again: bucket a plan, index a set, an encoding stage its rejects.
`verify --repair` does so for plans and sets.
"""

from cache.sets import plans, table_checks
from cache.sets.exported_set import ExportedSet
from cache.sets.set_files import TABLE_CHECKS, read_set_table
from cache.sets.set_lookup import read_pointer
from cache.sets.trainset import TrainSet
from cache.store.damage import ENCODE_PROGRAMS, DamageError, rebuild_program
from cache.store.layout import is_project_file
from cache.store.store import Store
from stages.discovery import media_table
from stages.maintenance.shard_checks import shards_of_set

DamageByPath = dict[str, list[DamageError]]


def find_damaged_tables(store: Store) -> tuple[int, DamageByPath]:
    """How many files were checked, and what is wrong with them. A file that is removed meanwhile is skipped."""
    found = DamageByPath()
    names = [name for top in ("media", "plans", "sets", "rejects") for name in _table_paths(store, top)]
    for name in names:
        try:
            _check_file(store, name)
        except FileNotFoundError:
            continue
        except DamageError as damage:
            found.setdefault(store.relative(damage.path), []).append(damage)
    return len(names), found


def _table_paths(store: Store, top: str) -> list[str]:
    """The project's files under `top`. Of plans and sets only those that have their plan.json or set.json, and for
    these also the tables that are missing."""
    names = [f"{top}/{name}" for name in store.list_names(top) if is_project_file(f"{top}/{name}")]
    if top not in ("plans", "sets"):
        return names
    folders = {name.rpartition("/")[0] for name in names if name.endswith(("/plan.json", "/set.json"))}
    of_folders = (name for name in names if name.count("/") == 2 or top == "sets")  # a plan's number is read once
    finished = (name for name in of_folders if name.count("/") != 2 or name.rpartition("/")[0] in folders)
    tables = plans.PLAN_TABLES if top == "plans" else TABLE_CHECKS
    return sorted({*finished, *(f"{folder}/{table}.arrow" for folder in folders for table in tables)})


def _check_file(store: Store, rel: str) -> None:
    """Read the file at `rel` as the programs do."""
    top, name, file = f"{rel}//".split("/")[:3]
    table = file.removesuffix(".arrow")
    if top == "media":
        store.read_table(rel, media_table.check_media_table)
    elif top == "rejects":
        merged = name in ENCODE_PROGRAMS.values() and rel.count("/") == 2
        store.read_table(rel, table_checks.check_merged_rejects if merged else table_checks.check_rejects)
    elif top == "plans":
        if table in plans.PLAN_TABLES:
            plans.read_plan_table(store, name, table)
        else:
            plans.load_plan(store, name)
    elif not file:
        read_pointer(store, rel)
    elif table in TABLE_CHECKS:
        read_set_table(store, name, table)
    else:  # set.json: it must fit its tables, where each of these is sound
        meta = store.read_json(f"sets/{name}/set.json")
        for table in TABLE_CHECKS:
            try:
                read_set_table(store, name, table)
            except DamageError:
                return
        shards_of_set(store, name)
        (ExportedSet if "export" in meta else TrainSet)(store, name, meta).close()


def rebuild_commands(paths: DamageByPath) -> list[str]:
    """The commands that make these files again, in the order in which to run them."""
    order = ["discover", "bucket", "encode-text", "encode-latents", "encode-vision", "index"]
    programs = {rebuild_program(path) for path in paths}
    known = [f"latentpress {name}" for name in order if name in programs]
    return known + [f"latentpress {name}" for name in sorted(programs - {*order})]
