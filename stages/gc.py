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
IN_PROGRESS_S = 3600.0  # seconds in which a set or plan gets all its files and is pointed at
MIB = 1 << 20
#: Top folders in the order of removal: what refers to others first.
REMOVAL_ORDER = ("sets", "plans", *stage_registry.SHARD_KINDS, "rejects", "jobs", "items", "media", "damaged", "")
REMOVED_FIRST, REMOVED_LAST = ("set.json", "plan.json"), ("provenance.json",)  # of one folder
KINDS = {program: kind for kind, program in STAGE_PROGRAMS.items()}  # of the caches, by the program that makes them
DESCRIPTIONS = {
    "": "files that killed processes left half written",
    "sets": "a training set that no configuration given makes, and not the newest of its family and task",
    "plans": "a plan that nothing is made of",
    "rejects": "lists of rejected items, of caches or datasets that are not used",
    "media": "the media table of a dataset that no configuration given names",
    "items": "tables of items that no configuration given has",
    "jobs": "reports of jobs that ended",
    "damaged": "damaged shards and plans that verify --repair or bucket moved to damaged/",
}


@dataclass
class UnusedItem:
    """Files of one folder that are removed together. path: the folder, "" for temporary files of any."""

    path: str
    description: str
    entries: list[Entry]

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
    store = Store(config.root)
    configs = [config]
    for path in also or ():
        configs.append(other := load_config(path))
        if Store(other.root).path("") != store.path(""):
            problem = f"{path} has the root {other.root}, not {store.url}"
            raise UsageError(problem, "give --also configurations of this root")
    now = time.time()
    since = now - keep_days * DAY_S
    listed = store.list_files()
    ours = [entry for entry in listed if is_project_file(entry.name)]
    needed = find_needed(store, configs, ours, since)
    items = list_unused(store, ours, needed, since)
    report = Report(program="gc", dry_run=options.dry_run)
    report.details = {
        "unused": [item.row(now) for item in items] or f"nothing, of what was written more than {keep_days:g} days ago",
        "unused_mib": round(sum(item.total_bytes for item in items) / MIB, 2),
    }
    kept = sum(entry.size for entry in ours) - sum(item.total_bytes for item in items if item.path)
    report.details["kept_mib"] = round(kept / MIB, 2)
    if others := [entry for entry in listed if not is_project_file(entry.name)]:
        size = sum(entry.size for entry in others)
        report.details["other_files"] = f"{len(others)} files, {round(size / MIB, 2)} MiB: left alone"
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
    """What nothing uses and was last written before `since`, biggest first. entries: files with a name that this
    project gives; all others are a user's."""
    newest: dict[str, float] = {}  # folder of two levels (a cache, a plan, a set) -> when it was last written to
    for entry in entries:
        newest[_folder(entry.name)] = max(newest.get(_folder(entry.name), 0), entry.modified)
    now, unused, kept_folders = time.time(), dict[str, list[Entry]](), set[str]()
    for entry in entries:
        folder = _folder(entry.name)
        top = folder.partition("/")[0]
        # What a plan, a set, a media table or a cache of another configuration consists of is of one age.
        together = top in ("sets", "plans", "media", *stage_registry.SHARD_KINDS) and "/" in folder
        age = newest[folder] if together and folder not in needed.caches else entry.modified
        limit = min(since, now - IN_PROGRESS_S) if top in ("sets", "plans", "media", "jobs") else since
        if age < limit and not needed.includes(entry.name):
            unused.setdefault(folder, []).append(entry)
        else:
            kept_folders.add(folder)
    items = []
    for folder, files in unused.items():
        description = DESCRIPTIONS.get(folder.partition("/")[0])
        if description is None:
            why = "what no training set holds" if folder in kept_folders else "no configuration given uses it"
            why = "units that no plan has any longer" if folder in needed.caches else why
            description = f"{_describe_cache(store, folder)}: {why}"
        items.append(UnusedItem(folder, description, files))
    if stale := [entry for entry in store.list_files(temporaries=True) if entry.modified < now - STALE_S]:
        items.append(UnusedItem("", DESCRIPTIONS[""], stale))
    return sorted(items, key=lambda item: (-item.total_bytes, item.path))


def _describe_cache(store: Store, folder: str) -> str:
    """What a cache was made by; it may have been copied from elsewhere, so its content is not trusted."""
    try:
        record = store.read_record(f"{folder}/provenance.json", Provenance)
    except (FileNotFoundError, StoreError, DamageError):
        return "a cache of unknown origin"
    words = [record.encoder, record.autoencoder, record.precision, record.posterior, record.decoder]
    if weights := record.weights:
        words.append(weights.get("repo") or f"weights {str(weights.get('content', 'unknown'))[:8]}")
    return printable(f"{record.stage} ({', '.join(str(word) for word in words if word)})")


def _folder(name: str) -> str:
    """The folder of two levels that a file belongs to, as latents/<fingerprint>."""
    return "/".join(name.split("/")[:-1][:2])


def _remove_item(store: Store, item: UnusedItem, progress: Progress) -> None:
    if not item.path:
        store.remove_stale_temps(STALE_S)
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
    top = item.path.partition("/")[0]
    folders = {entry.name.rpartition("/")[0] for entry in item.entries} if top == "rejects" else {item.path}
    for folder in folders:
        store.remove_empty_folders(folder)


@dataclass
class Needed:
    """The things that gc keeps.

    caches: `<kind>/<fingerprint>` of the configurations; whole_caches: of which every unit stays. units: active in
    their plans. units_of_others: active in plans of other configurations, whose caches are not known. shards: paths
    that the kept sets refer to. names: the folders and files of sets, plans, media tables, lists of rejected items,
    tables of items and pointers.
    """

    caches: set[str] = field(default_factory=set)
    whole_caches: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    units_of_others: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=lambda: {f"media/{VALIDATION}"})

    def includes(self, name: str) -> bool:
        """Whether a file of this project is kept whatever its age."""
        top, _, rest = name.partition("/")
        folder, _, file = rest.partition("/")
        if top in stage_registry.SHARD_KINDS:
            if folder == "edits":
                return True
            cache, path = f"{top}/{folder}", name.removesuffix(".json")
            if file in REMOVED_LAST:
                return self._has_cache(cache) or any(path.startswith(f"{cache}/") for path in self.shards)
            unit = shard.unit_name(file.removesuffix(".json"))
            is_active = unit in self.units_of_others or (cache in self.caches and unit in self.units)
            return path in self.shards or cache in self.whole_caches or is_active
        if top == "rejects" and folder in KINDS:  # lists are small: they go with their cache
            return self._has_cache(f"{KINDS[folder]}/{file.partition('/')[0]}")
        if top in ("damaged", "jobs"):
            return False
        if CONFIG_POINTER_PATTERN.fullmatch(name) or top in ("rejects", "items"):
            return name in self.names
        # Other files directly in sets/ or plans/, and those of weights/, are not looked at.
        return not file or top not in ("sets", "plans", "media") or f"{top}/{folder}" in self.names

    def _has_cache(self, cache: str) -> bool:
        return cache in self.caches or cache in self.whole_caches


def find_needed(store: Store, configs: Sequence[Config], entries: Iterable[Entry], since: float) -> Needed:
    """LatentpressError where one of the configurations has no plan or media table. DamageError where a pointer to a
    set leads nowhere below the root. since: what was written at that time (seconds since 1970) or later is in use,
    whoever wrote it."""
    needed, used_plans = Needed(), list[Plan]()
    written = {entry.name: entry.modified for entry in entries}
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
    sets = _find_sets(store, configs, written, needed.names, since)
    needed.shards = {path for name in sets for path in shards_of_set(store, name)}

    all_plans = [plans.load_plan(store, name) for name in plans.list_plans(store)]
    keys = {plan.info.key for plan in used_plans}
    newest: dict[str, Plan] = {}  # of each other configuration, if it is recent
    for plan in all_plans:
        if plan.info.key not in keys and written.get(f"plans/{plan.name}/plan.json", since) >= since:
            newest[plan.info.key] = plan
    needed.units_of_others = {unit for plan in newest.values() for unit in _unit_ids(plan)}
    made_of = [store.read_record(f"sets/{name}/set.json", SetRecord).generation for name in sets]
    used_plans += [*newest.values(), *(plan for plan in all_plans if plan.name in made_of)]
    generations = {plan.name for plan in used_plans}
    for plan in all_plans:  # earlier generations that hold what is active in these
        later = [other for other in used_plans if plan.name < other.name]
        if plan.name in generations or not later:
            continue
        own = (("samples", "sample_id"), ("texts", "text_id"))
        held = [plan.own_table(table).column(key) for table, key in own]
        held.append(pc.list_flatten(plan.own_table("units").column("members")))
        wanted = pa.concat_arrays([ids for other in later for ids in (other.active_sample_ids, other.active_text_ids)])
        if any(pc.any(pc.is_in(ids, value_set=wanted)).as_py() for ids in held):
            generations.add(plan.name)
    needed.names |= {f"sets/{name}" for name in sets} | {f"plans/{name}" for name in generations}
    return needed


def _find_sets(
    store: Store, configs: Sequence[Config], written: dict[str, float], pointers: set[str], since: float
) -> set[str]:
    """The newest sets, the sets that configurations and their runs train on, and recent ones. pointers: of the
    configurations; recent ones are added."""
    existing = {name.split("/")[1] for name in written if name.startswith("sets/") and name.endswith("/set.json")}
    of_configs = {name for name in written if CONFIG_POINTER_PATTERN.fullmatch(name)}
    pointers |= {name for name in of_configs if written[name] >= since}
    pointing = [rel for rel in set_pointer_paths(store) if rel not in of_configs - pointers]
    used = {*(read_pointer(store, rel) for rel in pointing), *(_set_id(config.train.set) for config in configs)}
    used |= {name for config in configs for name in _sets_of_runs(Path(config.output), since)}
    used |= {name for name in existing if written[f"sets/{name}/set.json"] >= since}
    return used & existing


def _unit_ids(plan: Plan) -> set[str]:
    return {unit.unit_id for kind in plan.unit_kinds for unit in plan.units(kind)}


def _sets_of_runs(output: Path, since: float) -> set[str]:
    """The sets of training runs in which something was written recently: they may be running, or be resumed."""
    sets = set()
    for settings in output.glob("*/config.yaml"):
        written = [0.0]
        for _, entry in walk(settings.parent):
            with suppress(OSError):  # removed meanwhile
                written.append(entry.stat().st_mtime)
        if max(written) < since:
            continue
        try:
            name = value_at(parse_yaml(read_text(settings)).value, ("train", "set"))
        except ValueError as error:
            raise LatentpressError(
                f"{settings} can't be read, so which training set that run needs is not known: {printable(error)}",
                "correct it, or move the run out of the output folder",
            ) from error
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
    unused=NOT_COMPUTING,
)

if __name__ == "__main__":
    app()
