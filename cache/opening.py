"""Finds and opens training sets: by id, by the pointers `sets/current-*.json`, or under a path or URL."""

import re

from cache.damage import DamageError
from cache.exported_set import ExportedSet
from cache.json_checks import PATH_NAME_PATTERN, printable
from cache.store import Store
from cache.trainset import SetError, SetNotFound, TrainSet
from schemas.tables import SET_VERSIONS

#: Pointers to the set of a configuration: cache/set_pointers.py
CONFIG_POINTER_PATTERN = re.compile(r"sets/current-[0-9a-f]{16}-[0-9a-f]{16}\.json", re.ASCII)


def find_set(root: str, name: str, family: str, task: str) -> TrainSet:
    """The set that `train.set` names: "current", the id of one under `root`, or, with a "/" in it, the path or URL
    of another root or an export ("s3://bucket/export", its current set) or of one set there (".../sets/<id>")."""
    if "/" in name:
        root, name = parse_set_path(name)
    return open_set(Store(root), name, family, task)


def open_set(store: Store, set_id: str, family: str, task: str) -> TrainSet:
    """The set `set_id`, or the newest of this family and task for "current". Raises SetError otherwise."""
    if set_id == "current":
        set_id = newest_set(store, family, task)
    if not PATH_NAME_PATTERN.fullmatch(set_id):
        raise SetError(f"{printable(repr(set_id))} can't be the name of a training set", "Correct train.set.")
    rel = f"sets/{set_id}/set.json"
    if not store.exists(rel):
        names = sorted({name.split("/")[0] for name in store.list_names("sets") if name.endswith("/set.json")})
        what = f"no training set {set_id!r} under {store.path('sets')}; there are: {', '.join(names) or 'none'}"
        raise SetError(what, "Correct train.set, or run `latentpress index`.")
    meta = store.read_json(rel)
    if meta.get("format_version") not in SET_VERSIONS:
        what = f"set {set_id} has format version {meta.get('format_version')!r}"
        known = " and ".join(map(str, SET_VERSIONS))
        raise SetError(f"{what}; this release reads {known}", "Run `latentpress index` with this release.")
    if (meta.get("family"), meta.get("task")) != (family, task):
        what = f"set {set_id} was made for {meta.get('family')} {meta.get('task')}"
        step = "Correct train.set or model.flavour."
        raise SetError(f"{what}; the configuration trains {family} {task}", step)
    if meta.get("id") != set_id:
        step = "Run `latentpress index`, which writes it again; copy an export again."
        raise SetError(f"{store.path(rel)} belongs to set {printable(repr(meta.get('id')))}", step)
    return (ExportedSet if "export" in meta else TrainSet)(store, set_id, meta)


def parse_set_path(name: str) -> tuple[str, str]:
    """(root, set) of a `train.set` that is a path or URL."""
    top, there, id = name.rstrip("/").rpartition("/sets/")
    return (top, id) if there else (name, "current")


def newest_pointer(family: str, task: str) -> str:
    """The file that names the newest set of a family and task."""
    return f"sets/current-{family}-{task}.json"


def newest_set(store: Store, family: str, task: str) -> str:
    """The id of the newest set of this family and task, of any configuration."""
    rel = newest_pointer(family, task)
    if not store.exists(rel):
        others = sorted(
            name.removeprefix("current-").removesuffix(".json")
            for name in store.list_names("sets")
            if name.startswith("current-") and not CONFIG_POINTER_PATTERN.fullmatch(f"sets/{name}")
        )
        raise SetNotFound(
            f"no training set for {family} {task} under {store.path('sets')}; there are sets for: "
            f"{', '.join(others) or 'none'}",
            "Run `latentpress index` (or `latentpress run`, which does every stage before it).",
        )
    return read_pointer(store, rel)


def read_pointer(store: Store, rel: str) -> str:
    """The id of the set that a pointer names. DamageError where it can't be one."""
    named = store.read_json(rel).get("id")
    if not isinstance(named, str) or not PATH_NAME_PATTERN.fullmatch(named):
        raise DamageError(store.path(rel), f"it names {printable(repr(named))}, which can't be a training set")
    return named
