"""For gc: the caches, plans and sets of a root that are in use, by the given configurations, by training sets, and
recently by others. Where a configuration has no plan, its use is not known, and that is an error.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import plans, set_lookup
from cache.sets.plans import Plan
from cache.sets.set_lookup import CONFIG_POINTER_PATTERN, current_plan, parse_set_path, read_pointer
from cache.store.files import Entry, walk
from cache.store.json_checks import printable
from cache.store.store import Store
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.encoding.feature_columns import item_table_name
from stages.maintenance.checks import set_pointer_paths, shards_of_set

CHECKPOINT_FOLDER = "checkpoints"  # in the folder of a training run


@dataclass
class GcRoots:
    """The things that gc keeps. since: files written at that time (seconds since 1970) or later are in use, whoever
    wrote them.

    caches: `<kind>/<fingerprint>` of the configurations. whole_caches: those of which every unit stays. units: active
    in their plans. units_of_others: active in plans of other configurations, whose caches are not known. sets,
    generations, datasets, reject_lists, item_tables: names. pointers: files that point at the sets of configurations.
    shards: paths that the sets refer to.
    """

    since: float
    caches: set[str] = field(default_factory=set)
    whole_caches: set[str] = field(default_factory=set)
    item_tables: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    units_of_others: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    pointers: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    generations: set[str] = field(default_factory=set)
    datasets: set[str] = field(default_factory=lambda: {VALIDATION})
    reject_lists: set[str] = field(default_factory=set)


def find_roots(store: Store, configs: Sequence[Config], entries: Iterable[Entry], since: float) -> GcRoots:
    """LatentpressError where one of the configurations has no plan or media table. DamageError where a pointer to a
    set leads nowhere below the root."""
    roots = GcRoots(since)
    written = {entry.name: entry.modified for entry in entries}
    used_plans = list[Plan]()
    for config, plan in [(config, current_plan(store, config)) for config in configs]:
        items = stage_registry.item_stages(config)
        stages = [*items, *stage_registry.required_stages(config)]
        roots.caches |= {f"{stage.kind}/{stage.fingerprint(config)}" for stage in stages}
        for needed in (plan, *(stage.find_plan(store, config) for stage in items)):
            roots.units |= _unit_ids(needed)
            if needed.info.get("items") == stage_registry.FEATURES.name:
                name = item_table_name(config, stage_registry.FEATURES.fingerprint(config), needed.active_sample_ids)
                roots.item_tables.add(name)
            used_plans.append(needed)
        roots.whole_caches |= {f"captions/{name}" for dataset in config.datasets for name in dataset.caption_sets}
        roots.datasets |= {dataset.id for dataset in config.datasets}
        roots.reject_lists.add(f"{config.model.family}-{config.model.task}")
        roots.pointers |= set(set_lookup.list_pointers(store, config))
    # The newest sets, those that configurations and their runs train on, recent sets, and the shards of all these.
    names = {name.split("/")[1] for name in written if name.startswith("sets/") and name.endswith("/set.json")}
    of_configs = {name for name in written if CONFIG_POINTER_PATTERN.fullmatch(name)}
    roots.pointers |= {name for name in of_configs if written[name] >= since}
    pointing = [rel for rel in set_pointer_paths(store) if rel not in of_configs - roots.pointers]
    used = {*(read_pointer(store, rel) for rel in pointing), *(_set_id(config.train.set) for config in configs)}
    used |= {name for config in configs for name in _sets_of_runs(Path(config.output), since)}
    used |= {name for name in names if written[f"sets/{name}/set.json"] >= since}
    roots.sets = used & names
    roots.shards = {path for name in roots.sets for path in shards_of_set(store, name)}

    all_plans = [plans.load_plan(store, name) for name in plans.list_plans(store)]
    keys = {plan.info["key"] for plan in used_plans}
    newest: dict[str, Plan] = {}  # of each other configuration, if it is recent
    for plan in all_plans:
        if plan.info["key"] not in keys and written.get(f"plans/{plan.name}/plan.json", since) >= since:
            newest[plan.info["key"]] = plan
    roots.units_of_others = {unit for plan in newest.values() for unit in _unit_ids(plan)}
    made_of = [store.read_json(f"sets/{name}/set.json").get("generation") for name in roots.sets]
    needing = [*used_plans, *newest.values(), *(plan for plan in all_plans if plan.name in made_of)]
    roots.generations = {plan.name for plan in needing}
    for plan in all_plans:  # earlier generations that hold what is active in these
        later = [other for other in needing if plan.name < other.name]
        if plan.name not in roots.generations and later and _holds_active(plan, later):
            roots.generations.add(plan.name)
    return roots


def _unit_ids(plan: Plan) -> set[str]:
    return {unit.unit_id for kind in plan.unit_kinds for unit in plan.units(kind)}


def _sets_of_runs(output: Path, since: float) -> set[str]:
    """The sets of training runs in which something was written recently: they may be running, or be resumed."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    sets = set()
    for settings in output.glob("*/config.yaml"):
        written = [0.0]
        for _, entry in walk(settings.parent):
            with suppress(OSError):  # removed meanwhile
                written.append(entry.stat().st_mtime)
        if max(written) < since:
            continue
        try:
            record = YAML(typ="safe").load(settings.read_text(encoding="utf-8"))
        except (YAMLError, OSError, ValueError) as error:
            if not (settings.parent / CHECKPOINT_FOLDER).is_dir():
                continue  # not a run's: a run writes it atomically
            raise LatentpressError(
                f"{settings} can't be read, so which training set that run needs is not known: {printable(error)}",
                "correct it, or move the run out of the output folder",
            ) from error
        train = record.get("train") if isinstance(record, dict) else None
        name = train.get("set") if isinstance(train, dict) else None
        sets.add(_set_id(name if isinstance(name, str) else ""))
    return sets


def _set_id(name: str) -> str:
    """Return the id of `train.set`, which may also be a path into this root."""
    return parse_set_path(name)[1] if "/" in name else name


def _holds_active(generation: Plan, later: Sequence[Plan]) -> bool:
    """Whether samples, texts or units of this generation are active in one of `later`."""
    held = [generation.own_table(table).column(key) for table, key in (("samples", "sample_id"), ("texts", "text_id"))]
    held.append(pc.list_flatten(generation.own_table("units").column("members")))
    wanted = [ids for plan in later for ids in (plan.active_sample_ids, plan.active_text_ids)]
    return any(pc.any(pc.is_in(mine, value_set=pa.array(ids))).as_py() for mine in held for ids in wanted)
