"""What of a root is in use, for gc: by the configurations given, by training sets, and by others not long ago.

Nothing is unused for want of knowledge: where a configuration has no plan, nothing is looked for at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache import plans, set_pointers
from cache.files import Entry
from cache.json_checks import printable
from cache.opening import CONFIG_POINTER_PATTERN, parse_set_path
from cache.plans import Plan
from cache.store import Store
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.maintenance.shard_checks import current_set_ids, shards_of_set
from stages.planning.plan_lookup import current_plan

CHECKPOINT_FOLDER = "checkpoints"  # in the folder of a training run


@dataclass
class GcRoots:
    """What is needed. since: what was written at that time (seconds since 1970) or later is in use, whoever wrote it.

    caches: `<kind>/<fingerprint>` of the configurations. units: active in their plans. elsewhere: units active in plans
    of others, whose caches are not known. sets, generations, datasets, reject_lists: by name. pointers: files that
    point at the sets of configurations. shards: paths that the sets name.
    """

    since: float
    caches: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    units_of_others: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    pointers: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    generations: set[str] = field(default_factory=set)
    datasets: set[str] = field(default_factory=lambda: {VALIDATION})
    reject_lists: set[str] = field(default_factory=set)


def find_roots(store: Store, configs: Sequence[Config], entries: Iterable[Entry], since: float) -> GcRoots:
    """LatentpressError where one of the configurations has no plan."""
    found = GcRoots(since)
    written = {entry.name: entry.modified for entry in entries}
    own = [current_plan(store, config) for config in configs]
    for config, plan in zip(configs, own, strict=True):
        found.caches |= {
            f"{stage.kind}/{stage.fingerprint(config)}" for stage in stage_registry.required_stages(config)
        }
        found.units |= _unit_ids(plan)
        found.datasets |= {dataset.id for dataset in config.datasets}
        found.reject_lists.add(f"{config.model.family}-{config.model.task}")
    _find_sets(store, configs, written, found)
    others = _recent_plans(store, written, {plan.info["key"] for plan in own}, since)
    for plan in others:
        found.units_of_others |= _unit_ids(plan)
    made_of = [store.read_json(f"sets/{name}/set.json").get("generation") for name in found.sets]
    held = [plans.load_plan(store, name) for name in plans.list_plans(store) if name in made_of]
    found.generations = _needed_generations(store, [*own, *others, *held])
    return found


def _unit_ids(plan: Plan) -> set[str]:
    return {unit.unit_id for kind in ("text", "latents") for unit in plan.units(kind)}


def _find_sets(store: Store, configs: Sequence[Config], written: dict[str, float], found: GcRoots) -> None:
    """The newest sets, those that configurations and their runs train on, and new ones; and what they are made of."""
    names = {name.split("/")[1] for name in written if name.startswith("sets/") and name.endswith("/set.json")}
    every = {name for name in written if CONFIG_POINTER_PATTERN.fullmatch(name)}
    found.pointers = {name for name in every if written[name] >= found.since}
    for config in configs:
        found.pointers |= set(set_pointers.list_pointers(store, config))
    used = {*current_set_ids(store, every - found.pointers), *(_set_id(config.train.set) for config in configs)}
    for config in configs:
        used |= _sets_of_runs(Path(config.output), found.since)
    used |= {name for name in names if written[f"sets/{name}/set.json"] >= found.since}
    found.sets = used & names
    for name in found.sets:
        found.shards |= set(shards_of_set(store, name))


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
            if not (settings.parent / CHECKPOINT_FOLDER).is_dir():
                continue  # no run's: a run writes it whole
            raise LatentpressError(
                f"{settings} can't be read, so which training set that run needs is not known: {printable(error)}",
                "mend it, or move the run away from the output folder",
            ) from error
        found.add(_set_id(_set_of_run(record)))
    return found


def _set_id(name: str) -> str:
    """Of what `train.set` names, which may be a path into this root as well."""
    return parse_set_path(name)[1] if "/" in name else name


def _set_of_run(record: object) -> str:
    """The set that a run's configuration names; "" where it is the configuration of something else."""
    train = record.get("train") if isinstance(record, dict) else None
    name = train.get("set") if isinstance(train, dict) else None
    return name if isinstance(name, str) else ""


def _recent_plans(store: Store, written: dict[str, float], keys: set[str], since: float) -> list[Plan]:
    """Of each other configuration the newest plan, where that is not older than `since`."""
    found: dict[str, Plan] = {}
    for name in plans.list_plans(store):
        plan = plans.load_plan(store, name)
        if plan.info["key"] not in keys and written.get(f"plans/{name}/plan.json", since) >= since:
            found[plan.info["key"]] = plan
    return list(found.values())


def _needed_generations(store: Store, needing: Sequence[Plan]) -> set[str]:
    """The generations that plans are read from: themselves, and the earlier ones that hold what is active in them."""
    needed = {plan.name for plan in needing}
    for name in plans.list_plans(store):
        later = [plan for plan in needing if name < plan.name]
        if name not in needed and later and _holds_active(plans.load_plan(store, name), later):
            needed.add(name)
    return needed


def _holds_active(generation: Plan, later: Sequence[Plan]) -> bool:
    """Whether samples, texts or units of this generation are active in one of `later`."""
    own = [generation.own_table(table).column(key) for table, key in (("samples", "sample_id"), ("texts", "text_id"))]
    own.append(pc.list_flatten(generation.own_table("units").column("members")))
    wanted = [ids for plan in later for ids in (plan.active_sample_ids, plan.active_text_ids)]
    return any(pc.any(pc.is_in(mine, value_set=pa.array(ids))).as_py() for mine in own for ids in wanted)
