"""gc: list what nothing uses any longer, biggest first, and with --yes remove it.

In use is what the given configurations need; the newest training set of each family and task, and those that a
configuration names or that a run trained on recently; and whatever was written within --keep-days, since another
configuration may share the root. Unfinished work stays, too: a set, plan or media table of the last hour, temporary
files, and the folders that a stage writes to. Files outside this project's layout (cache/store/layout.py) are never
touched.

Killed at any moment, it leaves a sound root: of a set or plan the file that makes it exist is removed first, of a tar
the tar before its sidecar, and the rest is still unused.
"""

import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.sets import plans, set_lookup
from cache.sets.plans import Plan
from cache.sets.set_lookup import CONFIG_POINTER_PATTERN, current_plan, parse_set_path, read_pointer
from cache.shards import shard
from cache.store.damage import DamageError
from cache.store.files import Entry, StoreError, walk
from cache.store.json_checks import printable
from cache.store.layout import STAGE_PROGRAMS, is_project_file
from cache.store.store import STALE, Store
from schemas.cli.console import NOT_DIVIDED, Console, Options, Progress, Report, make_app
from schemas.config.loading import load_config
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.encoding.feature_columns import item_table_name
from stages.encoding.stage import refuse_partition
from stages.encoding.stage_options import UsageError
from stages.maintenance.checks import set_pointer_paths, shards_of_set

DAY_S = 24 * 3600
KEEP_DAYS = 30.0
IN_PROGRESS_S = 3600.0  # seconds in which a set or plan gets all its files and is pointed at
MIB = 1 << 20
#: Top folders in the order of removal: what refers to others first.
REMOVAL_ORDER = ("sets", "plans", *stage_registry.SHARD_KINDS, "rejects", "jobs", "items", "media", "damaged", "")
REMOVED_FIRST, REMOVED_LAST = ("set.json", "plan.json"), ("provenance.json",)  # of one folder
CHECKPOINT_FOLDER = "checkpoints"  # in the folder of a training run


@dataclass
class UnusedItem:
    """A folder or file that is removed as a whole."""

    path: str
    description: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    def row(self, now: float) -> dict[str, Any]:
        newest = max(entry.modified for entry in self.entries)
        days = max(0, int((now - newest) / DAY_S))
        mib = round(self.total_bytes / MIB, 2)
        return {"mib": mib, "days_old": days, "files": len(self.entries), "path": self.path, "what": self.description}


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is listed.")] = False,
    keep_days: Annotated[
        float,
        typer.Option(min=0, max=36_500, metavar="N", help="Keep what was written in the last N days, used or not."),
    ] = KEEP_DAYS,
    also: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Another configuration of this root. Repeatable.")
    ] = None,
) -> Report:
    refuse_partition(options, "gc")
    store = Store(config.root)
    configs = [config]
    for path in also or ():
        configs.append(other := load_config(path))
        if Store(other.root).path("") != store.path(""):
            problem = f"{path} has the root {other.root}, not {store.url}"
            raise UsageError(problem, "give --also configurations of this root")
    now = time.time()
    unused = UnusedFiles(store, configs, now - keep_days * DAY_S)
    items = unused.items
    report = Report(program="gc", dry_run=options.dry_run)
    report.details = {
        "unused": [item.row(now) for item in items] or f"nothing, of what was written more than {keep_days:g} days ago",
        "unused_mib": round(sum(item.total_bytes for item in items) / MIB, 2),
        "kept_mib": round(unused.kept_bytes / MIB, 2),
    }
    if unused.other_files:
        size = sum(entry.size for entry in unused.other_files)
        report.details["other_files"] = f"{len(unused.other_files)} files, {round(size / MIB, 2)} MiB: left alone"
    if not yes or options.dry_run:
        report.remaining = len(items) if options.dry_run else 0
        arguments = [f"--keep-days {keep_days:g}"] if keep_days != KEEP_DAYS else []
        arguments += [*(f"--also {shlex.quote(str(path))}" for path in also or ()), "--yes"]
        report.next_steps = [f"latentpress gc {' '.join(arguments)}"] if items else []
        return report
    # Listed again: what came into use meanwhile stays.
    still = {entry for item in UnusedFiles(store, configs, now - keep_days * DAY_S).items for entry in item.entries}
    for item in items:
        item.entries = [entry for entry in item.entries if entry in still]
        report.done += len(item.entries)
    with console.progress(report.done, "remove", "files") as progress:
        for item in sorted(items, key=lambda item: REMOVAL_ORDER.index(item.path.partition("/")[0])):
            if item.entries:
                console.log(f"removing {item.path}")
                _remove_item(store, item, unused.active_folders, progress)
    report.details["removed_mib"] = round(sum(item.total_bytes for item in items) / MIB, 2)
    return report


class UnusedFiles:
    """The files that nothing uses and that were last written before `since`, of files with a name that this project
    gives; all others are a user's. LatentpressError where one of the configurations has no plan.

    items: what nothing uses, biggest first. kept_bytes: of the rest of the layout. other_files: outside the layout.
    active_folders: those that stages write to, which stay even if empty.
    """

    def __init__(self, store: Store, configs: Sequence[Config], since: float) -> None:
        listed = store.list_files()
        self.other_files = [entry for entry in listed if not is_project_file(entry.name)]
        entries = [entry for entry in listed if is_project_file(entry.name)]
        self._roots = roots = find_roots(store, configs, entries, since)
        #: Folder of two levels (a cache, a plan, a set) -> when anything was last written in it.
        self._newest: dict[str, float] = {}
        for entry in entries:
            folder = _cache_folder(entry.name)
            self._newest[folder] = max(self._newest.get(folder, 0), entry.modified)
        self.kept_bytes = 0
        unused: dict[str, list[Entry]] = {}
        kept: set[str] = set()  # folders that keep some of their files
        for entry in entries:
            folder = _cache_folder(entry.name)
            if self._is_unused(entry):
                unused.setdefault(folder, []).append(entry)
            else:
                kept.add(folder)
                self.kept_bytes += entry.size
        self.items = [UnusedItem(name, self._describe(store, name, name in kept), unused[name]) for name in unused]
        stale = [entry for entry in store.list_files(temporaries=True) if entry.modified < time.time() - STALE]
        self.items += [UnusedItem("", "files that killed processes left half written", stale)] if stale else []
        self.items.sort(key=lambda item: (-item.total_bytes, item.path))
        # A stage may just have made these folders, for a file that is not there yet.
        lists = {f"{STAGE_PROGRAMS[cache.partition('/')[0]]}/{cache.partition('/')[2]}" for cache in roots.caches}
        self.active_folders = roots.caches | {f"rejects/{name}" for name in (*lists, "discover", "bucket")}

    def _is_unused(self, entry: Entry) -> bool:
        roots = self._roots
        top, _, rest = entry.name.partition("/")
        name, _, file = rest.partition("/")
        if name == "edits" and top == "captions":
            return False
        if top in stage_registry.SHARD_KINDS:
            return self._is_unused_shard(f"{top}/{name}", file, entry)
        if top == "rejects":
            return entry.modified < roots.since and not self._is_used_list(name, file)
        if top == "items":
            return entry.modified < roots.since and name.removesuffix(shard.ARROW_SUFFIX) not in roots.item_tables
        if top == "damaged":
            return entry.modified < roots.since
        if top == "jobs":
            return entry.modified < min(roots.since, time.time() - IN_PROGRESS_S)
        if CONFIG_POINTER_PATTERN.fullmatch(entry.name):
            return entry.modified < roots.since and entry.name not in roots.pointers
        if not file or top not in ("sets", "plans", "media"):  # pointers to sets, weights/, an export's shards
            return False
        used = {"sets": roots.sets, "plans": roots.generations, "media": roots.datasets}[top]
        old = self._newest[_cache_folder(entry.name)] < min(roots.since, time.time() - IN_PROGRESS_S)
        return old and name not in used

    def _is_unused_shard(self, cache: str, file: str, entry: Entry) -> bool:
        """A shard, a tar's sidecar or provenance.json. In a used cache only units that no plan has any longer."""
        roots, unit = self._roots, shard.unit_name(file.removesuffix(".json"))
        if not file or entry.name.removesuffix(".json") in roots.shards or unit in roots.units_of_others:
            return False
        if cache in roots.whole_caches:
            return False
        if cache in roots.caches:
            return file not in REMOVED_LAST and unit not in roots.units and entry.modified < roots.since
        referred = file in REMOVED_LAST and any(path.startswith(f"{cache}/") for path in roots.shards)
        return self._newest[cache] < roots.since and not referred

    def _is_used_list(self, stage: str, file: str) -> bool:
        """A list of what was set aside: an encoding stage has one for each unit, others for each dataset or task."""
        roots, name = self._roots, file.removesuffix(shard.ARROW_SUFFIX)
        kinds = {program: kind for kind, program in STAGE_PROGRAMS.items()}
        if stage in kinds:
            fingerprint, _, unit = name.partition("/")
            cache = f"{kinds[stage]}/{fingerprint}"
            # Without a unit it is all lists of a cache, merged.
            if unit in roots.units_of_others or cache in roots.whole_caches:
                return True
            return cache in roots.caches and (not unit or unit in roots.units)
        return name in (roots.datasets if stage == "discover" else roots.reject_lists)

    def _describe(self, store: Store, folder: str, partly: bool) -> str:
        """Describe what an item is and why it is not used. partly: the folder keeps other files."""
        top = folder.partition("/")[0]
        if top in stage_registry.SHARD_KINDS:
            if folder in self._roots.caches:
                why = "units that no plan has any longer"
            else:
                why = "what no training set holds" if partly else "no configuration given uses it"
            try:
                record = store.read_json(f"{folder}/provenance.json")
            except (FileNotFoundError, StoreError, DamageError):
                return f"a cache of unknown origin: {why}"
            words = [record.get(key) for key in ("encoder", "autoencoder", "precision", "posterior", "decoder")]
            weights = record.get("weights")
            if isinstance(weights, dict):
                words.append(weights.get("repo") or f"weights {str(weights.get('content', 'unknown'))[:8]}")
            made_by = f"{record.get('stage', 'a cache')} ({', '.join(str(word) for word in words if word)})"
            return f"{printable(made_by)}: {why}"  # it may have been imported, so its content is not trusted
        return {
            "sets": "a training set that no configuration given makes, and not the newest of its family and task",
            "plans": "a plan that nothing is made of",
            "rejects": "lists of what was set aside, of caches or datasets that are not used",
            "media": "the media table of a dataset that no configuration given names",
            "items": "tables of items that no configuration given has",
            "jobs": "reports of jobs that ended",
            "damaged": "damaged shards and plans that verify --repair or bucket set aside",
        }[top]


def _cache_folder(name: str) -> str:
    """The folder of two levels that a file belongs to, as latents/<fingerprint>."""
    return "/".join(name.split("/")[:-1][:2])


def _remove_item(store: Store, item: UnusedItem, active_folders: set[str], progress: Progress) -> None:
    if not item.path:
        store.remove_stale_temps(STALE)
        progress.advance(len(item.entries))
        return

    def rank(entry: Entry) -> tuple[int, str]:
        """First what makes a folder or a shard exist, last what describes it."""
        file = entry.name.rpartition("/")[2]
        if file in REMOVED_FIRST:
            return 0, entry.name
        return (3 if file in REMOVED_LAST else 2 if file.endswith(shard.SIDECAR_SUFFIX) else 1), entry.name

    for entry in sorted(item.entries, key=rank):
        store.remove(entry.name)
        progress.advance()
    folders = {item.path}
    if item.path.partition("/")[0] == "rejects":  # the folder of each cache, as another one may be in use
        folders = {entry.name.rpartition("/")[0] for entry in item.entries}
    for folder in folders - active_folders:
        store.remove_empty_folders(folder)


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
                assert config.features is not None
                fingerprint = stage_registry.FEATURES.fingerprint(config)
                name = item_table_name(config.features, fingerprint, needed.active_sample_ids)
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
        if plan.name in roots.generations or not later:
            continue
        own = (("samples", "sample_id"), ("texts", "text_id"))
        held = [plan.own_table(table).column(key) for table, key in own]
        held.append(pc.list_flatten(plan.own_table("units").column("members")))
        wanted = pa.concat_arrays([ids for other in later for ids in (other.active_sample_ids, other.active_text_ids)])
        if any(pc.any(pc.is_in(ids, value_set=wanted)).as_py() for ids in held):
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


app = make_app(
    "gc",
    "List what nothing uses any longer, with sizes; with --yes remove it.",
    run,
    examples=["--also other.yaml --keep-days 7", "--yes"],
    unused=NOT_DIVIDED,
)

if __name__ == "__main__":
    app()
