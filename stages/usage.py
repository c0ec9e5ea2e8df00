"""What of a root is in use, for gc: by the configurations given, by training sets, and by others not long ago.

Nothing is unused for want of knowledge: where a configuration has no plan, nothing is looked for at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache import current, generations
from cache.files import Entry
from cache.generations import Generation
from cache.opening import OF_CONFIGURATION, located
from cache.store import Store
from cache.untrusted import shown
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from stages import encoders
from stages.plan import current_plan
from stages.soundness import current_sets, shards_of

CHECKPOINTS = "checkpoints"  # in the folder of a training run


@dataclass
class Use:
    """What is needed. since: what was written at that time (seconds since 1970) or later is in use, whoever wrote it.

    caches: `<kind>/<fingerprint>` of the configurations. units: active in their plans. elsewhere: units active in plans
    of others, whose caches are not known. sets, generations, datasets, reject_lists: by name. pointers: files that
    point at the sets of configurations. shards: paths that the sets name.
    """

    since: float
    caches: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    pointers: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    generations: set[str] = field(default_factory=set)
    datasets: set[str] = field(default_factory=lambda: {VALIDATION})
    reject_lists: set[str] = field(default_factory=set)


def use(store: Store, configs: Sequence[Config], entries: Iterable[Entry], since: float) -> Use:
    """LatentpressError where one of the configurations has no plan."""
    found = Use(since)
    written = {entry.name: entry.modified for entry in entries}
    plans = [current_plan(store, config) for config in configs]
    for config, plan in zip(configs, plans, strict=True):
        found.caches |= {f"{stage.kind}/{stage.fingerprint(config)}" for stage in encoders.wanted(config)}
        found.units |= _units(plan)
        found.datasets |= {dataset.id for dataset in config.datasets}
        found.reject_lists.add(f"{config.model.family}-{config.model.task}")
    _sets(store, configs, written, found)
    others = _others(store, written, {plan.info["key"] for plan in plans}, since)
    for plan in others:
        found.elsewhere |= _units(plan)
    made_of = [store.read_json(f"sets/{name}/set.json").get("generation") for name in found.sets]
    held = [generations.load(store, name) for name in generations.names(store) if name in made_of]
    found.generations = _generations(store, [*plans, *others, *held])
    return found


def _units(plan: Generation) -> set[str]:
    return {unit.unit_id for kind in ("text", "latents") for unit in plan.units(kind)}


def _sets(store: Store, configs: Sequence[Config], written: dict[str, float], found: Use) -> None:
    """The newest sets, those that configurations and their runs train on, and new ones; and what they are made of."""
    names = {name.split("/")[1] for name in written if name.startswith("sets/") and name.endswith("/set.json")}
    every = {name for name in written if OF_CONFIGURATION.fullmatch(name)}
    found.pointers = {name for name in every if written[name] >= found.since}
    for config in configs:
        found.pointers |= set(current.pointers(store, config))
    used = {*current_sets(store, every - found.pointers), *(_id(config.train.set) for config in configs)}
    for config in configs:
        used |= _sets_of_runs(Path(config.output), found.since)
    used |= {name for name in names if written[f"sets/{name}/set.json"] >= found.since}
    found.sets = used & names
    for name in found.sets:
        found.shards |= set(shards_of(store, name))


def _sets_of_runs(output: Path, since: float) -> set[str]:
    """The sets of training runs in which something was written lately: they may be running, or be resumed."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    found = set()
    for settings in output.glob("*/config.yaml"):
        folders = [settings.parent, *settings.parent.rglob("*")]
        if max(path.stat().st_mtime for path in folders if path.exists()) < since:
            continue
        try:
            record = YAML(typ="safe").load(settings.read_text(encoding="utf-8"))
        except (YAMLError, OSError, ValueError) as error:
            if not (settings.parent / CHECKPOINTS).is_dir():
                continue  # no run's: a run writes it whole
            raise LatentpressError(
                f"{settings} can't be read, so which training set that run needs is not known: {shown(error)}",
                "mend it, or move the run away from the output folder",
            ) from error
        found.add(_id(_set_of(record)))
    return found


def _id(name: str) -> str:
    """Of what `train.set` names, which may be a path into this root as well."""
    return located(name)[1] if "/" in name else name


def _set_of(record: object) -> str:
    """The set that a run's configuration names; "" where it is the configuration of something else."""
    train = record.get("train") if isinstance(record, dict) else None
    name = train.get("set") if isinstance(train, dict) else None
    return name if isinstance(name, str) else ""


def _others(store: Store, written: dict[str, float], keys: set[str], since: float) -> list[Generation]:
    """Of each other configuration the newest plan, where that is not older than `since`."""
    found: dict[str, Generation] = {}
    for name in generations.names(store):
        plan = generations.load(store, name)
        if plan.info["key"] not in keys and written.get(f"plans/{name}/plan.json", since) >= since:
            found[plan.info["key"]] = plan
    return list(found.values())


def _generations(store: Store, plans: Sequence[Generation]) -> set[str]:
    """The generations that `plans` are read from: themselves, and the earlier ones that hold what is active in them."""
    needed = {plan.name for plan in plans}
    for name in generations.names(store):
        later = [plan for plan in plans if name < plan.name]
        if name not in needed and later and _holds(generations.load(store, name), later):
            needed.add(name)
    return needed


def _holds(generation: Generation, plans: Sequence[Generation]) -> bool:
    """Whether samples, texts or units of this generation are active in one of `plans`."""
    own = [generation.own(table).column(key) for table, key in (("samples", "sample_id"), ("texts", "text_id"))]
    own.append(pc.list_flatten(generation.own("units").column("members")))
    wanted = [ids for plan in plans for ids in (plan.active_samples, plan.active_texts)]
    return any(pc.any(pc.is_in(mine, value_set=pa.array(ids))).as_py() for mine in own for ids in wanted)
