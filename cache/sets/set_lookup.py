"""Finds the published plan that a configuration uses, and finds and opens training sets: the set that the configuration
makes, or the set that `train.set` names.

Several configurations may share a root. Two pointers name a published set: one to the newest set of its family and
task, and one to the set of its configuration, in a file named after the configuration's settings (`schemas/recipe.py`)
and the encoders' weights. A machine that trains may hold only the transformer, so only the weights in this
machine's checkpoint are compared.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cache.models.compatibility import bucket_side_multiple
from cache.models.places import fingerprint_parts
from cache.models.weights import UnknownCommit, WeightsError, local_folder
from cache.sets import plans
from cache.sets.table_checks import SetPointer, SetRecord
from cache.sets.trainset import SetError, SetNotFound, TrainSet
from cache.store.damage import DamageError
from cache.store.json_checks import PATH_NAME_PATTERN, printable
from cache.store.store import Store
from schemas.activities import activity
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import hash_json
from schemas.recipe import build_recipe, plan_key

#: Files that point to the set of a configuration.
CONFIG_POINTER_PATTERN = re.compile(r"sets/current-[0-9a-f]{16}-[0-9a-f]{16}\.json", re.ASCII)
#: The model that makes each kind of shard. The vision model is not part of a checkpoint, and not every set uses it.
ENCODER_NAMES = {"text": "text encoder", "latents": "autoencoder", "vision": "vision model"}
MAX_DIFFERENCES = 6  # differences in a message
MAX_VALUE_CHARS = 60  # characters of a value in a message
_LIST_ITEM = object()  # in place of a value: the start of a section or of an item of a list
RUN_HINT = "Run `latentpress run`, which runs the missing stages and indexes the set"

JsonDict = dict[str, Any]


class NoPlan(LatentpressError):
    """The configuration does not have a plan."""


def current_plan(store: Store, config: Config) -> plans.Plan:
    """Return the plan of this configuration. Raises NoPlan if the plan does not exist yet."""
    with activity(f"reading the plan in {store.path('plans')}"):
        plan = plans.newest_plan(store, plan_key(config, bucket_side_multiple(config.model)))
    if plan is None:
        raise NoPlan(
            "this configuration does not have a plan (it was not planned, or its datasets, model or validation "
            "changed)",
            "run `latentpress discover`, then `latentpress bucket`",
        )
    return plan


class WeightsMismatch(SetError):
    """The named set was encoded with different weights than the checkpoint's weights."""


def find_set(root: str, name: str, family: str, task: str) -> TrainSet:
    """Open the set that `train.set` names. name: "current", the id of a set under `root`, or, if it has a "/", the path
    or URL of another root or an export ("s3://bucket/export", for its current set) or of a set in it (".../sets/<id>").
    """
    if "/" not in name:
        return open_set(Store(root), name, family, task)
    root, name = parse_set_path(name)
    step = "Correct train.set: it must be the path of a root, of an export, or of a set in a root or an export."
    if "://" not in root and not os.path.isdir(root):
        raise SetNotFound(f"the folder {root} does not exist", step)
    try:
        return open_set(Store(root), name, family, task)
    except SetNotFound as error:
        raise SetNotFound(error.message, step) from error


def open_set(store: Store, set_id: str, family: str, task: str) -> TrainSet:
    """Open a set. set_id: its id, or "current" for the newest set of this family and task. Raises SetError."""
    if set_id == "current":
        set_id = newest_set(store, family, task)
    if not PATH_NAME_PATTERN.fullmatch(set_id):
        raise SetError(f"{printable(repr(set_id))} is not a valid name of a training set", "Correct train.set.")
    rel = f"sets/{set_id}/set.json"
    if not store.exists(rel):
        names = sorted({name.split("/")[0] for name in store.list_names("sets") if name.endswith("/set.json")})
        problem = f"no training set {set_id!r} under {store.path('sets')}; available: {', '.join(names) or 'none'}"
        raise SetError(problem, "Correct train.set, or run `latentpress index`.")
    meta = store.read_record(rel, SetRecord)
    if (meta.family, meta.task) != (family, task):
        problem = f"set {set_id} is for {meta.family} {meta.task}, but the configuration trains {family} {task}"
        raise SetError(problem, "Correct train.set or model.flavour.")
    if meta.id != set_id:
        step = "Run `latentpress index`, which writes it again; if the set was copied, copy it again."
        raise SetError(f"{store.path(rel)} belongs to set {meta.id!r}", step)
    return TrainSet(store, set_id, meta)


def parse_set_path(name: str) -> tuple[str, str]:
    """Divide a path or URL in `train.set` into (root, set id)."""
    root, separator, set_id = name.rstrip("/").rpartition("/sets/")
    return (root, set_id) if separator else (name, "current")


def newest_pointer(family: str, task: str) -> str:
    """The file that names the newest set of a family and task."""
    return f"sets/current-{family}-{task}.json"


def newest_set(store: Store, family: str, task: str) -> str:
    """The id of the newest set of this family and task, of any configuration."""
    rel = newest_pointer(family, task)
    if not store.exists(rel):
        available = sorted(
            name.removeprefix("current-").removesuffix(".json")
            for name in store.list_names("sets")
            if name.startswith("current-") and not CONFIG_POINTER_PATTERN.fullmatch(f"sets/{name}")
        )
        raise SetNotFound(
            f"no training set for {family} {task} under {store.path('sets')}"
            + (f"; available: sets for {', '.join(available)}" if available else ""),
            "Run `latentpress index`, or `latentpress run` for all stages before it.",
        )
    return read_pointer(store, rel)


def read_pointer(store: Store, rel: str) -> str:
    """The id of the set that a pointer names."""
    return store.read_record(rel, SetPointer).id


def open_configured_set(config: Config, warn: Callable[[str], object]) -> TrainSet:
    """Return the set given by `train.set`. Raises SetNotFound if `train.set` is "current" and the configuration does
    not have a set yet. A set given by its id is used unchanged, with a warning if the configuration would make a
    different set. Raises WeightsMismatch if the encoders in the checkpoint's folder differ from the encoders that made
    the set.
    """
    family, task = config.model.family, config.model.task
    if config.train.set == "current":
        store = Store(config.root)
        return open_set(store, find_configured_id(store, config), family, task)
    data = find_set(config.root, config.train.set, family, task)
    try:
        weights = local_weights(config.model, Store(config.root))
        recipe = _build_recipe(config) if config.datasets else None
    except WeightsError:
        return data  # without the checkpoint, weights can't be compared
    for kind in _find_changed_encoders(data.meta, weights):
        recorded = _recorded_weights(data.meta)[kind]
        problem = f"set {data.id} and {config.model.source} have different {ENCODER_NAMES[kind]}s"
        if "content" in weights[kind] and "content" in recorded:
            raise WeightsMismatch(
                f"{problem}: weights trained on the set would not fit the checkpoint",
                "Correct model.path or train.set; or set model.path to a folder that contains only the transformer.",
            )
        encoder = f"{ENCODER_NAMES[kind]} {printable(str(recorded))}"
        warn(f"set {data.id} was made with the {encoder}; {config.model.source} may have different weights")
    if recipe is not None and data.meta.recipe:
        data.recipe_differences = diff_recipes(data.meta.recipe, recipe)
    if data.recipe_differences:
        differences = _join_first(data.recipe_differences)
        warn(f"train.set names set {data.id}, which differs from the set of this configuration: {differences}")
    return data


def find_configured_id(store: Store, config: Config) -> str:
    """Return the id of the set that the configuration makes. Raises SetNotFound, with the reason, if the set does not
    exist."""
    recipe, weights = _build_recipe(config), local_weights(config.model, store)
    pointers = _find_pointers(store, recipe, weights)
    names = [name for name in pointers.values() if store.exists(f"sets/{name}/set.json")]
    if len(names) > 1:
        raise SetError(
            f"this configuration made the sets {', '.join(names)} with different encoders, and {config.model.source} "
            "does not contain the encoders",
            "Set train.set to the id of a set.",
        )
    if names:
        return names[0]
    if pointers:
        missing_set = store.path(f"sets/{next(iter(pointers.values()))}")
        raise SetNotFound(f"{missing_set}, the set of this configuration, does not exist", f"{RUN_HINT}.")
    newest = newest_set(store, config.model.family, config.model.task)
    path = f"sets/{newest}/set.json"
    differences = ["its set.json is missing"]
    if store.exists(path):
        record = store.read_record(path, SetRecord)
        changed_encoders = [
            f"model.path: different {ENCODER_NAMES[kind]}" for kind in _find_changed_encoders(record, weights)
        ]
        differences = diff_recipes(record.recipe, recipe) + changed_encoders
    differences = differences or ["only the file that points to it is missing"]
    raise SetNotFound(
        f"{store.path('sets')} does not contain the training set of this configuration; the newest set for "
        f"{config.model.family} {config.model.task}, {newest}, differs: {_join_first(differences)}",
        f"{RUN_HINT}; or use the newest set unchanged with train.set: {newest}.",
    )


def list_pointers(store: Store, config: Config) -> list[str]:
    """The files that point to the sets of this configuration."""
    return list(_find_pointers(store, _build_recipe(config), local_weights(config.model, store)))


def config_pointer(record: SetRecord) -> str:
    """The file that points to the newest set of this set's configuration."""
    return f"{_pointer_prefix(record.recipe)}{hash_json(_recorded_weights(record))[:16]}.json"


def is_current(store: Store, record: SetRecord) -> bool:
    """Whether a published set is already recorded as the set of its configuration."""
    return _points_to(store, config_pointer(record), record.id)


def update_pointers(store: Store, record: SetRecord) -> None:
    """Make a published set the newest set of its family and task, and the current set of its configuration."""
    for rel in (config_pointer(record), newest_pointer(record.family, record.task)):
        if not _points_to(store, rel, record.id):
            store.publish_record(rel, SetPointer(id=record.id))


def _points_to(store: Store, rel: str, set_id: str) -> bool:
    try:
        return read_pointer(store, rel) == set_id
    except (FileNotFoundError, DamageError):
        return False


def local_weights(model: Model, memo: Store) -> dict[str, JsonDict]:
    """Kind of shard -> fingerprint of its encoder's weights, if it is known without a download."""
    components = {"text": model.family_spec.text_components, "latents": model.family_spec.latent_components}
    fingerprints = dict[str, JsonDict]()
    local_folder(model.source)  # an error if it is neither a folder nor a repository
    for kind, parts in components.items():
        try:
            fingerprints[kind] = fingerprint_parts(model, parts, memo)
        except UnknownCommit:
            if not any(getattr(model, part, None) for part in parts):
                fingerprints[kind] = {"repo": model.source, "parts": sorted(parts)}
        except WeightsError:  # a folder without these parts, or a file of another machine
            continue
    return fingerprints


def _build_recipe(config: Config) -> JsonDict:
    return build_recipe(config, bucket_side_multiple(config.model))


def _pointer_prefix(recipe: Mapping[str, Any]) -> str:
    return f"sets/current-{hash_json(dict(recipe))[:16]}-"


def _find_pointers(store: Store, recipe: JsonDict, weights: Mapping[str, JsonDict]) -> dict[str, str]:
    """Pointer -> id for the sets of a recipe whose known weights equal these weights."""
    pointers = {}
    for rel in (f"sets/{name}" for name in store.list_names("sets")):
        if rel.startswith(_pointer_prefix(recipe)) and CONFIG_POINTER_PATTERN.fullmatch(rel):
            set_id = read_pointer(store, rel)
            path = f"sets/{set_id}/set.json"
            if not store.exists(path) or not _find_changed_encoders(store.read_record(path, SetRecord), weights):
                pointers[rel] = set_id
    return pointers


def _recorded_weights(record: SetRecord) -> JsonDict:
    """Kind of shard -> fingerprint of the weights that made a set's shards."""
    recorded = {kind: record.provenance[kind].weights for kind in ENCODER_NAMES if kind in record.provenance}
    return {kind: weights for kind, weights in recorded.items() if weights is not None}


def _find_changed_encoders(record: SetRecord, weights: Mapping[str, JsonDict]) -> list[str]:
    """Return the kinds of shards whose recorded weights differ from `weights`."""
    recorded = _recorded_weights(record)
    return [kind for kind, local in weights.items() if kind in recorded and not local.items() <= recorded[kind].items()]


def diff_recipes(recorded: JsonDict, recipe: JsonDict) -> list[str]:
    """Describe the options in which a set's recipe differs from the configuration's recipe."""
    theirs, ours = dict(_flatten("", recorded)), dict(_flatten("", recipe))
    differences, covered = list[str](), tuple[str, ...]()
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key, ...) == ours.get(key, ...) or key.startswith(covered):
            continue
        option = printable(key.removeprefix("plan.").replace("latents.settings.", "latents."))
        if _LIST_ITEM in (theirs.get(key), ours.get(key)):
            differences.append(f"{option} is only in the {'configuration' if key in ours else 'set'}")
            covered += (f"{key}.",)
        else:
            values = _format_value(theirs.get(key)), _format_value(ours.get(key))
            differences.append(f"{option} is {values[0]} in the set and {values[1]} in the configuration")
    return differences


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting. Items of a list are named by their id or name, as in --set."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(item.get("id") or item.get("name")): item for item in value}
        yield from ((f"{key}.{name}", _LIST_ITEM) for name in value)
    if not isinstance(value, dict):
        yield key, value
        return
    yield from ((name, _LIST_ITEM) for name, inner in value.items() if not key and isinstance(inner, dict))
    for name, inner in value.items():
        yield from _flatten(f"{key}.{name}" if key else str(name), inner)


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}...")


def _join_first(differences: list[str]) -> str:
    more = f"; and {len(differences) - MAX_DIFFERENCES} more" if len(differences) > MAX_DIFFERENCES else ""
    return "; ".join(differences[:MAX_DIFFERENCES]) + more
