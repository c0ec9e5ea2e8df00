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

from cache.compatibility import side_multiple
from cache.damage import DamageError
from cache.opening import OF_CONFIGURATION, find_set, newest_of, open_set, pointed_at, pointer
from cache.store import Store
from cache.trainset import NoSet, SetError, TrainSet
from cache.untrusted import shown
from cache.weights import WeightsError, fingerprint_of, local
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.identity import hash_json
from schemas.recipe import recipe

#: Whose weights the shards of each kind are made with. The last is part of no checkpoint, and not of every set.
ENCODERS = {"text": "text encoder", "latents": "autoencoder", "vision": "vision model"}
LISTED = 6  # differences that a message names
WIDTH = 60  # characters of a value in a message
MAKE = "Run `latentpress run`, which makes what is missing and indexes it"

Row = dict[str, Any]


class OtherWeights(SetError):
    """A set that was named, and was encoded with other weights than those of the checkpoint."""


def choose(config: Config, warn: Callable[[str], None]) -> TrainSet:
    """The set that `train.set` means. NoSet where that is "current" and there is none that the configuration makes.

    A set that is named is used as it is: `warn` is told where the configuration would make another. OtherWeights where
    the checkpoint's folder holds other encoders than it was made with.
    """
    family, task = config.model.family, config.model.task
    if config.train.set == "current":
        store = Store(config.root)
        return open_set(store, find(store, config), family, task)
    data = find_set(config.root, config.train.set, family, task)
    _compare(data, config, warn)
    return data


def find(store: Store, config: Config) -> str:
    """The id of the set that the configuration makes; NoSet says what it lacks, or how the newest set differs."""
    mine, weights = recipe(config, side_multiple(config.model)), weights_at_hand(config.model, store)
    own = _own(store, mine, weights)
    found = [name for name in own.values() if store.exists(_description(name))]
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
        raise NoSet(f"{gone}, the set of this configuration, is not there", f"{MAKE}.")
    newest = newest_of(store, config.model.family, config.model.task)
    differ = _differences(store, newest, mine, weights)
    raise NoSet(
        f"no training set under {store.path('sets')} is what this configuration makes; the newest of "
        f"{config.model.family} {config.model.task}, {newest}, was made otherwise: {_listed(differ)}",
        f"{MAKE}; or, to use that set as it is, name it: train.set: {newest}.",
    )


def pointers(store: Store, config: Config) -> list[str]:
    """The files that point at the sets of this configuration."""
    return list(_own(store, recipe(config, side_multiple(config.model)), weights_at_hand(config.model, store)))


def own_pointer(record: Mapping[str, Any]) -> str | None:
    """The file that points at the set which the configuration of this one makes; None where set.json does not say."""
    made, weights = record.get("recipe"), _weights(record)
    return f"{_start(made)}{hash_json(weights)[:16]}.json" if isinstance(made, dict) and weights else None


def is_pointed_at(store: Store, record: Mapping[str, Any]) -> bool:
    """Whether a published set is already that of its configuration."""
    rel = own_pointer(record)
    return rel is not None and _names(store, rel, record["id"])


def point(store: Store, record: Mapping[str, Any]) -> None:
    """Make a published set the newest of its family and task, and that of its configuration."""
    for rel in filter(None, (own_pointer(record), pointer(record["family"], record["task"]))):
        if not _names(store, rel, record["id"]):
            store.publish_json(rel, {"id": record["id"]})


def _names(store: Store, rel: str, name: str) -> bool:
    """Whether the pointer at `rel` names the set."""
    try:
        return store.read_json(rel) == {"id": name}
    except (FileNotFoundError, DamageError):
        return False


def weights_at_hand(model: Model, memo: Store) -> dict[str, Row]:
    """kind -> what names the weights of its encoder, where the checkpoint has them here. Of a repository nothing is
    fetched; where its commit is not known, it is left out."""
    parts = {"text": model.spec.text_parts, "latents": model.spec.latent_parts}
    found = dict[str, Row]()
    if local(model.source) is not None:
        for kind, folders in parts.items():
            with suppress(WeightsError):
                found[kind] = fingerprint_of(model.source, folders, None, memo)
        return found
    found = {kind: {"repo": model.source, "parts": sorted(folders)} for kind, folders in parts.items()}
    with suppress(WeightsError):
        commit = fingerprint_of(model.source, (), model.revision, memo)["commit"]
        found = {kind: {**row, "commit": commit} for kind, row in found.items()}
    return found


def _description(name: str) -> str:
    return f"sets/{name}/set.json"


def _start(made: Mapping[str, Any]) -> str:
    return f"sets/current-{hash_json(dict(made))[:16]}-"


def _own(store: Store, mine: Row, weights: Mapping[str, Row]) -> dict[str, str]:
    """Pointer -> id of the sets that a recipe makes with these weights, as far as they are known."""
    found = {}
    for rel in (f"sets/{name}" for name in store.names("sets")):
        if rel.startswith(_start(mine)) and OF_CONFIGURATION.fullmatch(rel):
            name = pointed_at(store, rel)
            there = store.exists(_description(name))
            if not there or not _other_weights(store.read_json(_description(name)), weights):
                found[rel] = name
    return found


def _weights(record: Mapping[str, Any]) -> Row:
    """kind -> what names the weights that a set was made with; nothing where its set.json does not say."""
    made = record.get("provenance")
    rows = {kind: made[kind] for kind in ENCODERS if kind in made} if isinstance(made, dict) else {}
    found = {kind: row.get("weights") for kind, row in rows.items() if isinstance(row, dict)}
    whole = found.keys() >= {"text", "latents"} and all(isinstance(row, dict) for row in found.values())
    return found if whole else {}


def _other_weights(record: Mapping[str, Any], weights: Mapping[str, Row]) -> list[str]:
    """Kinds of shards that were not made with `weights`, of those that are known."""
    made = _weights(record)
    return [kind for kind, mine in weights.items() if kind in made and not mine.items() <= made[kind].items()]


def _compare(data: TrainSet, config: Config, warn: Callable[[str], None]) -> None:
    """Of a set that was named: refuse other weights, tell of other settings."""
    try:
        weights = weights_at_hand(config.model, Store(config.root))
        mine = recipe(config, side_multiple(config.model)) if config.datasets else None
    except WeightsError:
        return  # the checkpoint is not here: nothing to compare with
    made = _weights(data.meta)
    for kind in _other_weights(data.meta, weights):
        what = f"set {data.id} was made with another {ENCODERS[kind]} than that of {config.model.source}"
        if "content" in weights[kind] and "content" in made[kind]:
            raise OtherWeights(
                f"{what}: what is trained on it would not fit that checkpoint",
                "Correct model.path or train.set; or give a folder that holds the transformer alone.",
            )
        warn(f"{what}, by name: {shown(str(made[kind]))}; whether it is the same is not known")
    if mine is None:
        return
    recorded = data.meta.get("recipe")
    differ = differences(recorded, mine) if isinstance(recorded, dict) else []
    data.otherwise = differ
    if differ:
        warn(f"set {data.id} is used as it was made, since train.set names it: {_listed(differ)}")


def _differences(store: Store, name: str, mine: Row, weights: Mapping[str, Row]) -> list[str]:
    """In words, what tells the set `name` from that of a configuration."""
    if not store.exists(_description(name)):
        return ["its set.json is not there"]
    record = store.read_json(_description(name))
    if not isinstance(record.get("recipe"), dict):
        return ["it does not say by which configuration (an older release made it)"]
    other = [f"model.path: another {ENCODERS[kind]}" for kind in _other_weights(record, weights)]
    return differences(record["recipe"], mine) + other or ["nothing, and only the file that points at it is missing"]


def differences(made: Row, mine: Row) -> list[str]:
    """In words, how two recipes differ, option by option."""
    theirs, ours = dict(_flat("", made)), dict(_flat("", mine))
    told, whole = list[str](), tuple[str, ...]()
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key, ...) == ours.get(key, ...) or key.startswith(whole):
            continue
        if _ITEM in (theirs.get(key), ours.get(key)):
            told.append(f"{_option(key)} is in the {'configuration' if key in ours else 'set'} alone")
            whole += (f"{key}.",)
        else:
            values = _told(theirs.get(key)), _told(ours.get(key))
            told.append(f"{_option(key)} is {values[0]} in the set and {values[1]} in the configuration")
    return told


_ITEM = object()  # in place of a value: an item of a list, or a section, begins here


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting. Items of a list go by their id or name, which is how --set names them."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(item.get("id") or item.get("name")): item for item in value}
        yield from ((f"{key}.{name}", _ITEM) for name in value)
    if not isinstance(value, dict):
        yield key, value
        return
    yield from ((name, _ITEM) for name, inner in value.items() if not key and isinstance(inner, dict))
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}" if key else str(name), inner)


def _option(key: str) -> str:
    """The option as it is called in the configuration, where it is one."""
    return shown(key.removeprefix("plan.").replace("latents.settings.", "latents."))


def _told(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return shown(text if len(text) <= WIDTH else f"{text[:WIDTH]}...")


def _listed(differ: list[str]) -> str:
    more = f"; and {len(differ) - LISTED} more" if len(differ) > LISTED else ""
    return "; ".join(differ[:LISTED]) + more
