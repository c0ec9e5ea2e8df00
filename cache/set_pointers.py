"""Which training set is used: the one that the configuration makes, or another that `train.set` names.

A root may be shared by several configurations. Each set that is published is pointed at twice: as the newest of its
family and task, and as the one that its configuration makes, by a name made of the configuration's settings
(`schemas/recipe.py`) and of the encoders' weights. A machine that trains may hold no more than the transformer, so
weights are compared as far as the checkpoint at hand has them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from cache.compatibility import bucket_side_multiple
from cache.damage import DamageError
from cache.json_checks import printable
from cache.opening import CONFIG_POINTER_PATTERN, find_set, newest_pointer, newest_set, open_set, read_pointer
from cache.store import Store
from cache.trainset import SetError, SetNotFound, TrainSet
from cache.weights import WeightsError, fingerprint_weights, local_folder
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.identity import hash_json
from schemas.recipe import build_recipe

#: Whose weights the shards of each kind are made with. The last is part of no checkpoint, and not of every set.
ENCODER_NAMES = {"text": "text encoder", "latents": "autoencoder", "vision": "vision model"}
MAX_DIFFERENCES = 6  # differences that a message names
MAX_VALUE_CHARS = 60  # characters of a value in a message
RUN_HINT = "Run `latentpress run`, which makes what is missing and indexes it"

JsonDict = dict[str, Any]


class WeightsMismatch(SetError):
    """A set that was named, and was encoded with other weights than those of the checkpoint."""


def open_configured_set(config: Config, warn: Callable[[str], None]) -> TrainSet:
    """The set that `train.set` names. Raises SetNotFound where it is "current" and this configuration has no set yet.

    A set that is named by its id is used as it is, with a warning where the configuration would make another. Raises
    WeightsMismatch where the checkpoint's folder holds other encoders than the set was made with.
    """
    family, task = config.model.family, config.model.task
    if config.train.set == "current":
        store = Store(config.root)
        return open_set(store, find_configured_id(store, config), family, task)
    data = find_set(config.root, config.train.set, family, task)
    _check_named_set(data, config, warn)
    return data


def find_configured_id(store: Store, config: Config) -> str:
    """The id of the set that the configuration makes; SetNotFound says what it lacks, or how the newest set differs."""
    mine, weights = build_recipe(config, bucket_side_multiple(config.model)), local_weights(config.model, store)
    own = _find_configured_sets(store, mine, weights)
    found = [name for name in own.values() if store.exists(_set_json_path(name))]
    if len(found) > 1:
        raise SetError(
            f"sets {', '.join(found)} were made by this configuration with different weights of the encoders, and "
            f"{config.model.source} does not hold them",
            "Name one of the sets: train.set: ID.",
        )
    if found:
        return found[0]
    if own:
        gone = store.path(f"sets/{next(iter(own.values()))}")
        raise SetNotFound(f"{gone}, the set of this configuration, is not there", f"{RUN_HINT}.")
    newest = newest_set(store, config.model.family, config.model.task)
    differ = _describe_differences(store, newest, mine, weights)
    raise SetNotFound(
        f"no training set under {store.path('sets')} is what this configuration makes; the newest of "
        f"{config.model.family} {config.model.task}, {newest}, was made otherwise: {_join_first(differ)}",
        f"{RUN_HINT}; or, to use that set as it is, name it: train.set: {newest}.",
    )


def list_pointers(store: Store, config: Config) -> list[str]:
    """The files that point at the sets of this configuration."""
    return list(
        _find_configured_sets(
            store, build_recipe(config, bucket_side_multiple(config.model)), local_weights(config.model, store)
        )
    )


def config_pointer(record: Mapping[str, Any]) -> str | None:
    """The file that points at the set which the configuration of this one makes; None where set.json does not say."""
    made, weights = record.get("recipe"), _recorded_weights(record)
    return f"{_pointer_prefix(made)}{hash_json(weights)[:16]}.json" if isinstance(made, dict) and weights else None


def is_current(store: Store, record: Mapping[str, Any]) -> bool:
    """Whether a published set is already that of its configuration."""
    rel = config_pointer(record)
    return rel is not None and _points_to(store, rel, record["id"])


def update_pointers(store: Store, record: Mapping[str, Any]) -> None:
    """Make a published set the newest of its family and task, and that of its configuration."""
    for rel in filter(None, (config_pointer(record), newest_pointer(record["family"], record["task"]))):
        if not _points_to(store, rel, record["id"]):
            store.publish_json(rel, {"id": record["id"]})


def _points_to(store: Store, rel: str, name: str) -> bool:
    """Whether the pointer at `rel` names the set."""
    try:
        return store.read_json(rel) == {"id": name}
    except (FileNotFoundError, DamageError):
        return False


def local_weights(model: Model, memo: Store) -> dict[str, JsonDict]:
    """kind -> what names the weights of its encoder, where the checkpoint has them here. Of a repository nothing is
    fetched; where its commit is not known, it is left out."""
    parts = {"text": model.family_spec.text_components, "latents": model.family_spec.latent_components}
    found = dict[str, JsonDict]()
    if local_folder(model.source) is not None:
        for kind, folders in parts.items():
            with suppress(WeightsError):
                found[kind] = fingerprint_weights(model.source, folders, None, memo)
        return found
    found = {kind: {"repo": model.source, "parts": sorted(folders)} for kind, folders in parts.items()}
    with suppress(WeightsError):
        commit = fingerprint_weights(model.source, (), model.revision, memo)["commit"]
        found = {kind: {**row, "commit": commit} for kind, row in found.items()}
    return found


def _set_json_path(name: str) -> str:
    return f"sets/{name}/set.json"


def _pointer_prefix(made: Mapping[str, Any]) -> str:
    return f"sets/current-{hash_json(dict(made))[:16]}-"


def _find_configured_sets(store: Store, mine: JsonDict, weights: Mapping[str, JsonDict]) -> dict[str, str]:
    """Pointer -> id of the sets that a recipe makes with these weights, as far as they are known."""
    found = {}
    for rel in (f"sets/{name}" for name in store.list_names("sets")):
        if rel.startswith(_pointer_prefix(mine)) and CONFIG_POINTER_PATTERN.fullmatch(rel):
            name = read_pointer(store, rel)
            there = store.exists(_set_json_path(name))
            if not there or not _find_other_weights(store.read_json(_set_json_path(name)), weights):
                found[rel] = name
    return found


def _recorded_weights(record: Mapping[str, Any]) -> JsonDict:
    """kind -> what names the weights that a set was made with; nothing where its set.json does not say."""
    made = record.get("provenance")
    rows = {kind: made[kind] for kind in ENCODER_NAMES if kind in made} if isinstance(made, dict) else {}
    found = {kind: row.get("weights") for kind, row in rows.items() if isinstance(row, dict)}
    whole = found.keys() >= {"text", "latents"} and all(isinstance(row, dict) for row in found.values())
    return found if whole else {}


def _find_other_weights(record: Mapping[str, Any], weights: Mapping[str, JsonDict]) -> list[str]:
    """Kinds of shards that were not made with `weights`, of those that are known."""
    made = _recorded_weights(record)
    return [kind for kind, mine in weights.items() if kind in made and not mine.items() <= made[kind].items()]


def _check_named_set(data: TrainSet, config: Config, warn: Callable[[str], None]) -> None:
    """Of a set that was named: refuse other weights, tell of other settings."""
    try:
        weights = local_weights(config.model, Store(config.root))
        mine = build_recipe(config, bucket_side_multiple(config.model)) if config.datasets else None
    except WeightsError:
        return  # the checkpoint is not here: nothing to compare with
    made = _recorded_weights(data.meta)
    for kind in _find_other_weights(data.meta, weights):
        what = f"set {data.id} was made with another {ENCODER_NAMES[kind]} than that of {config.model.source}"
        if "content" in weights[kind] and "content" in made[kind]:
            raise WeightsMismatch(
                f"{what}: what is trained on it would not fit that checkpoint",
                "Correct model.path or train.set; or give a folder that holds the transformer alone.",
            )
        warn(f"{what}, by name: {printable(str(made[kind]))}; whether it is the same is not known")
    if mine is None:
        return
    recorded = data.meta.get("recipe")
    differ = diff_recipes(recorded, mine) if isinstance(recorded, dict) else []
    data.recipe_differences = differ
    if differ:
        warn(f"set {data.id} is used as it was made, since train.set names it: {_join_first(differ)}")


def _describe_differences(store: Store, name: str, mine: JsonDict, weights: Mapping[str, JsonDict]) -> list[str]:
    """In words, what tells the set `name` from that of a configuration."""
    if not store.exists(_set_json_path(name)):
        return ["its set.json is not there"]
    record = store.read_json(_set_json_path(name))
    if not isinstance(record.get("recipe"), dict):
        return ["it does not say by which configuration (an older release made it)"]
    other = [f"model.path: another {ENCODER_NAMES[kind]}" for kind in _find_other_weights(record, weights)]
    return diff_recipes(record["recipe"], mine) + other or ["nothing, and only the file that points at it is missing"]


def diff_recipes(made: JsonDict, mine: JsonDict) -> list[str]:
    """In words, how two recipes differ, option by option."""
    theirs, ours = dict(_flatten("", made)), dict(_flatten("", mine))
    told, whole = list[str](), tuple[str, ...]()
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key, ...) == ours.get(key, ...) or key.startswith(whole):
            continue
        if _LIST_ITEM in (theirs.get(key), ours.get(key)):
            told.append(f"{_option_name(key)} is in the {'configuration' if key in ours else 'set'} alone")
            whole += (f"{key}.",)
        else:
            values = _format_value(theirs.get(key)), _format_value(ours.get(key))
            told.append(f"{_option_name(key)} is {values[0]} in the set and {values[1]} in the configuration")
    return told


_LIST_ITEM = object()  # in place of a value: an item of a list, or a section, begins here


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting. Items of a list go by their id or name, which is how --set names them."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(item.get("id") or item.get("name")): item for item in value}
        yield from ((f"{key}.{name}", _LIST_ITEM) for name in value)
    if not isinstance(value, dict):
        yield key, value
        return
    yield from ((name, _LIST_ITEM) for name, inner in value.items() if not key and isinstance(inner, dict))
    for name, inner in value.items():
        yield from _flatten(f"{key}.{name}" if key else str(name), inner)


def _option_name(key: str) -> str:
    """The option as it is called in the configuration, where it is one."""
    return printable(key.removeprefix("plan.").replace("latents.settings.", "latents."))


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}...")


def _join_first(differ: list[str]) -> str:
    more = f"; and {len(differ) - MAX_DIFFERENCES} more" if len(differ) > MAX_DIFFERENCES else ""
    return "; ".join(differ[:MAX_DIFFERENCES]) + more
