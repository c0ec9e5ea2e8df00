"""gc: list unused files of a root, biggest first, and remove them with --yes.

Files in use: all files that the given configurations need; the newest training set of each family and task; the sets
that a configuration names or that a run trained on recently; and every file written within --keep-days, because another
configuration may share the root. Unfinished work also stays: a set, plan or media table of the last hour, recent
temporary files, and the folders that a stage writes to. Files outside this project's layout (cache/store/layout.py) are
never touched.

A gc that is killed leaves a valid root: it removes the set.json or plan.json of a folder first, because a set or plan
exists only with that file, and a tar before its sidecar. The next gc removes the remaining files.
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

from cache.sets import plans
from cache.sets.plans import Plan
from cache.sets.set_lookup import CONFIG_POINTER_PATTERN, current_plan, list_pointers, parse_set_path, read_pointer
from cache.sets.table_checks import Provenance, SetRecord
from cache.shards import shard
from cache.store.damage import DamageError
from cache.store.files import Entry, StoreError, walk
from cache.store.json_checks import printable
from cache.store.layout import STAGE_PROGRAMS, is_project_file
from cache.store.store import STALE_S, Store
from schemas.cli.console import NOT_COMPUTING, Console, Options, Progress, Report, make_app
from schemas.config.loading import load_config, read_text
from schemas.config.pipeline import VALIDATION, Config
from schemas.config.yaml_editor import value_at
from schemas.config.yaml_reader import parse_yaml
from schemas.errors import LatentpressError, UsageError
from stages.encoding import stage_registry
from stages.encoding.item_plans import item_table_name
from stages.maintenance.checks import set_pointer_paths, shards_of_set

DAY_S = 24 * 3600
KEEP_DAYS = 30.0
IN_PROGRESS_S = 3600.0  # maximum time between the first file of a set or plan and the pointer to it
MIB = 1 << 20
#: Top folders in the order of removal: a folder is before the folders that it refers to.
REMOVAL_ORDER = ("sets", "plans", *stage_registry.SHARD_KINDS, "rejects", "jobs", "items", "media", "damaged", "")
FIRST_FILES, LAST_FILES = ("set.json", "plan.json"), ("provenance.json",)  # removed first and last in a folder
CACHE_KINDS = {program: kind for kind, program in STAGE_PROGRAMS.items()}
DESCRIPTIONS = {
    "": "incomplete files of killed processes",
    "sets": "a training set that the given configurations do not use, not the newest of its family and task",
    "plans": "a plan that no training set or configuration uses",
    "rejects": "lists of rejects of unused caches or datasets",
    "media": "the media table of a dataset that is not in the given configurations",
    "items": "feature tables that the given configurations do not use",
    "jobs": "reports of finished jobs",
    "damaged": "damaged shards and plans that verify --repair or bucket moved here",
}


@dataclass
class UnusedItem:
    """Unused files of one folder. path: the folder, "" for temporary files of all folders."""

    path: str
    description: str
    entries: list[Entry]

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    def row(self, time_now: float) -> dict[str, Any]:
        newest = max(entry.modified for entry in self.entries)
        days = max(0, int((time_now - newest) / DAY_S))
        mib = round(self.total_bytes / MIB, 2)
        return {"mib": mib, "days_old": days, "files": len(self.entries), "path": self.path, "what": self.description}


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the listed files.")] = False,
    keep_days: Annotated[
        float,
        typer.Option(min=0, max=36_500, metavar="N", help="Keep files of the last N days even if they are unused."),
    ] = KEEP_DAYS,
    also: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Another configuration with the same root. Repeatable."),
    ] = None,
) -> Report:
    store = Store(config.root)
    configs = [config]
    for path in also or ():
        configs.append(extra_config := load_config(path))
        if Store(extra_config.root).path("") != store.path(""):
            problem = f"--also {path}: its root is {extra_config.root}, not {store.url}"
            raise UsageError(problem, "use --also only for configurations with the same root")
    time_now = time.time()
    since = time_now - keep_days * DAY_S
    entries = store.list_files()
    project_files = [entry for entry in entries if is_project_file(entry.name)]
    needed = find_needed(store, configs, project_files, since)
    items = list_unused(store, project_files, needed, since)
    report = Report(program="gc", dry_run=options.dry_run)
    report.details = {
        "unused": [item.row(time_now) for item in items] or f"no files older than {keep_days:g} days",
        "unused_mib": round(sum(item.total_bytes for item in items) / MIB, 2),
    }
    kept_bytes = sum(entry.size for entry in project_files) - sum(item.total_bytes for item in items if item.path)
    report.details["kept_mib"] = round(kept_bytes / MIB, 2)
    if user_files := [entry for entry in entries if not is_project_file(entry.name)]:
        size = sum(entry.size for entry in user_files)
        report.details["other_files"] = f"{len(user_files)} files, {round(size / MIB, 2)} MiB: not listed, always kept"
    if not yes or options.dry_run:
        report.remaining = len(items) if options.dry_run else 0
        arguments = [f"--keep-days {keep_days:g}"] if keep_days != KEEP_DAYS else []
        arguments += [*(f"--also {shlex.quote(str(path))}" for path in also or ()), "--yes"]
        report.next_steps = [f"latentpress gc {' '.join(arguments)}"] if items else []
        return report
    report.done = sum(len(item.entries) for item in items)
    with console.progress(report.done, "remove", "files") as progress:
        for item in sorted(items, key=lambda item: REMOVAL_ORDER.index(item.path.partition("/")[0])):
            console.log(f"removing {item.path or DESCRIPTIONS['']}")
            _remove_item(store, item, progress)
    report.details["removed_mib"] = round(sum(item.total_bytes for item in items) / MIB, 2)
    return report


def list_unused(store: Store, entries: Sequence[Entry], needed: "Needed", since: float) -> list[UnusedItem]:
    """Unused files last written before `since`, in folders, biggest first. entries: files of the project's layout."""
    newest: dict[str, float] = {}  # folder of two levels (a cache, a plan, a set) -> time of the last write
    for entry in entries:
        newest[_folder(entry.name)] = max(newest.get(_folder(entry.name), 0), entry.modified)
    time_now, unused, kept_folders = time.time(), dict[str, list[Entry]](), set[str]()
    for entry in entries:
        folder = _folder(entry.name)
        top = folder.partition("/")[0]
        # All files of a plan, a set, a media table or a cache of another configuration have the age of the newest.
        has_one_age = top in ("sets", "plans", "media", *stage_registry.SHARD_KINDS) and "/" in folder
        modified = newest[folder] if has_one_age and folder not in needed.caches else entry.modified
        limit = min(since, time_now - IN_PROGRESS_S) if top in ("sets", "plans", "media", "jobs") else since
        if modified < limit and not needed.includes(entry.name):
            unused.setdefault(folder, []).append(entry)
        else:
            kept_folders.add(folder)
    items = []
    for folder, files in unused.items():
        description = DESCRIPTIONS.get(folder.partition("/")[0])
        if description is None:
            reason = "shards in no training set" if folder in kept_folders else "no given configuration uses it"
            reason = "units that are not in a plan any longer" if folder in needed.caches else reason
            description = f"{_describe_cache(store, folder)}: {reason}"
        items.append(UnusedItem(folder, description, files))
    if stale := [entry for entry in store.list_files(temporaries=True) if entry.modified < time_now - STALE_S]:
        items.append(UnusedItem("", DESCRIPTIONS[""], stale))
    return sorted(items, key=lambda item: (-item.total_bytes, item.path))


def _describe_cache(store: Store, folder: str) -> str:
    """Stage and models of a cache, from provenance.json. The file is untrusted, because a cache may be a copy."""
    try:
        record = store.read_record(f"{folder}/provenance.json", Provenance)
    except (FileNotFoundError, StoreError, DamageError):
        return "a cache of unknown origin"
    words = [record.encoder, record.autoencoder, record.precision, record.posterior, record.decoder]
    if weights := record.weights:
        words.append(weights.get("repo") or f"weights {str(weights.get('content', 'unknown'))[:8]}")
    return printable(f"{record.stage} ({', '.join(str(word) for word in words if word)})")


def _folder(name: str) -> str:
    """The first two folders of a file's path, such as latents/<fingerprint>."""
    return "/".join(name.split("/")[:-1][:2])


def _remove_item(store: Store, item: UnusedItem, progress: Progress) -> None:
    if not item.path:
        store.remove_stale_temps(STALE_S)
        progress.advance(len(item.entries))
        return

    def rank(entry: Entry) -> tuple[int, str]:
        """Order of removal: files that make a set or plan exist, shards, sidecars, provenance.json."""
        file = entry.name.rpartition("/")[2]
        if file in FIRST_FILES:
            return 0, entry.name
        return (3 if file in LAST_FILES else 2 if file.endswith(shard.SIDECAR_SUFFIX) else 1), entry.name

    for entry in sorted(item.entries, key=rank):
        store.remove(entry.name)
        progress.advance()
    top = item.path.partition("/")[0]
    folders = {entry.name.rpartition("/")[0] for entry in item.entries} if top == "rejects" else {item.path}
    for folder in folders:
        store.remove_empty_folders(folder)


@dataclass
class Needed:
    """Files that gc keeps.

    caches: `<kind>/<fingerprint>` of the given configurations. whole_caches: caches whose units all stay. units: active
    units in the plans of the given configurations. other_units: active units in recent plans of other configurations,
    kept in every cache. shards: paths that the kept sets refer to. names: kept folders of sets, plans and media tables;
    kept lists of rejects, tables of items and pointers.
    """

    caches: set[str] = field(default_factory=set)
    whole_caches: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    other_units: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=lambda: {f"media/{VALIDATION}"})

    def includes(self, name: str) -> bool:
        """Whether a file of this project is kept at any age."""
        top, _, path_in_top = name.partition("/")
        folder, _, file = path_in_top.partition("/")
        if top in stage_registry.SHARD_KINDS:
            if folder == "edits":
                return True
            cache, path = f"{top}/{folder}", name.removesuffix(".json")
            if file in LAST_FILES:
                return self._has_cache(cache) or any(path.startswith(f"{cache}/") for path in self.shards)
            unit = shard.unit_name(file.removesuffix(".json"))
            is_active = unit in self.other_units or (cache in self.caches and unit in self.units)
            return path in self.shards or cache in self.whole_caches or is_active
        if top == "rejects" and folder in CACHE_KINDS:  # a cache's lists are small: they stay until the cache goes
            return self._has_cache(f"{CACHE_KINDS[folder]}/{file.partition('/')[0]}")
        if top in ("damaged", "jobs"):
            return False
        if CONFIG_POINTER_PATTERN.fullmatch(name) or top in ("rejects", "items"):
            return name in self.names
        # All other files directly in sets/ or plans/, and files in weights/, are kept.
        return not file or top not in ("sets", "plans", "media") or f"{top}/{folder}" in self.names

    def _has_cache(self, cache: str) -> bool:
        return cache in self.caches or cache in self.whole_caches


def find_needed(store: Store, configs: Sequence[Config], entries: Iterable[Entry], since: float) -> Needed:
    """Collect the files in use. since: time in seconds since 1970; files written at that time or later are in use.
    LatentpressError if a configuration has no plan or media table; DamageError if a pointer to a set is invalid."""
    needed, used_plans = Needed(), list[Plan]()
    write_times = {entry.name: entry.modified for entry in entries}
    for config, plan in [(config, current_plan(store, config)) for config in configs]:
        items = stage_registry.item_stages(config)
        stages = [*items, *stage_registry.required_stages(config)]
        needed.caches |= {f"{stage.kind}/{stage.fingerprint(config)}" for stage in stages}
        used_plans += [plan, *(stage.find_plan(store, config) for stage in items)]
        if config.features is not None:
            features = stage_registry.FEATURES
            ids = features.find_plan(store, config).active_sample_ids
            name = item_table_name(config.features, features.fingerprint(config), ids)
            needed.names.add(f"items/{name}{shard.ARROW_SUFFIX}")
        needed.whole_caches |= {f"captions/{name}" for dataset in config.datasets for name in dataset.caption_sets}
        for dataset in config.datasets:
            needed.names |= {f"media/{dataset.id}", f"rejects/discover/{dataset.id}{shard.ARROW_SUFFIX}"}
        needed.names.add(f"rejects/bucket/{config.model.family}-{config.model.task}{shard.ARROW_SUFFIX}")
        needed.names |= set(list_pointers(store, config))
    needed.units = {unit for plan in used_plans for unit in _unit_ids(plan)}
    sets = _find_sets(store, configs, write_times, needed.names, since)
    needed.shards = {path for name in sets for path in shards_of_set(store, name)}

    all_plans = [plans.load_plan(store, name) for name in plans.list_plans(store)]
    keys = {plan.info.key for plan in used_plans}
    newest: dict[str, Plan] = {}  # key of another configuration -> its newest recent plan
    for plan in all_plans:
        if plan.info.key not in keys and write_times.get(f"plans/{plan.name}/plan.json", since) >= since:
            newest[plan.info.key] = plan
    needed.other_units = {unit for plan in newest.values() for unit in _unit_ids(plan)}
    set_generations = [store.read_record(f"sets/{name}/set.json", SetRecord).generation for name in sets]
    used_plans += [*newest.values(), *(plan for plan in all_plans if plan.name in set_generations)]
    generations = {plan.name for plan in used_plans}
    for plan in all_plans:  # earlier generations that hold samples, texts or units of the used plans
        later_plans = [used_plan for used_plan in used_plans if plan.name < used_plan.name]
        if plan.name in generations or not later_plans:
            continue
        id_columns = (("samples", "sample_id"), ("texts", "text_id"))
        plan_ids = [plan.own_table(table).column(key) for table, key in id_columns]
        plan_ids.append(pc.list_flatten(plan.own_table("units").column("members")))
        active_ids = pa.concat_arrays([ids for p in later_plans for ids in (p.active_sample_ids, p.active_text_ids)])
        if any(pc.any(pc.is_in(ids, value_set=active_ids)).as_py() for ids in plan_ids):
            generations.add(plan.name)
    needed.names |= {f"sets/{name}" for name in sets} | {f"plans/{name}" for name in generations}
    return needed


def _find_sets(
    store: Store, configs: Sequence[Config], write_times: dict[str, float], pointers: set[str], since: float
) -> set[str]:
    """The newest sets, the sets that configurations and their runs train on, and recent sets. pointers: names of the
    configurations' pointers; recent pointers of all configurations are added to it."""
    all_sets = {name.split("/")[1] for name in write_times if name.startswith("sets/") and name.endswith("/set.json")}
    config_pointers = {name for name in write_times if CONFIG_POINTER_PATTERN.fullmatch(name)}
    pointers |= {name for name in config_pointers if write_times[name] >= since}
    used_pointers = [name for name in set_pointer_paths(store) if name not in config_pointers - pointers]
    sets = {*(read_pointer(store, name) for name in used_pointers), *(_set_id(config.train.set) for config in configs)}
    sets |= {name for config in configs for name in _sets_of_runs(Path(config.output), since)}
    sets |= {name for name in all_sets if write_times[f"sets/{name}/set.json"] >= since}
    return sets & all_sets


def _unit_ids(plan: Plan) -> set[str]:
    return {unit.unit_id for kind in plan.unit_kinds for unit in plan.units(kind)}


def _sets_of_runs(output: Path, since: float) -> set[str]:
    """The sets of training runs with recent files, because such a run may still train or be resumed."""
    sets = set()
    for settings in output.glob("*/config.yaml"):
        write_times = [0.0]
        for _, entry in walk(settings.parent):
            with suppress(OSError):  # removed by another process
                write_times.append(entry.stat().st_mtime)
        if max(write_times) < since:
            continue
        try:
            name = value_at(parse_yaml(read_text(settings)).value, ("train", "set"))
        except ValueError as error:
            raise LatentpressError(
                f"{settings} cannot be read, so the training set of this run is unknown: {printable(error)}",
                "correct the file, or move the run out of the output folder",
            ) from error
        sets.add(_set_id(name if isinstance(name, str) else ""))
    return sets


def _set_id(name: str) -> str:
    """Return the set's id. name: value of `train.set`: an id or a path into this root."""
    return parse_set_path(name)[1] if "/" in name else name


app = make_app(
    "gc",
    "List files that are not used any longer, with sizes; with --yes remove them.",
    run,
    examples=["--also other.yaml --keep-days 7", "--yes"],
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()
