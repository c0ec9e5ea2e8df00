"""gc: list what nothing uses any longer, biggest first, and with --yes remove it.

In use is what the configurations given need, what a training set holds that is the newest of its family and task, that
a configuration names or that a run trained on lately, and whatever was written within --keep-days, since another
configuration may share the root. What is in the making beside it stays too: a set, plan or media table of the last
hour, which may lack what makes it exist; files under temporary names; and the folders that a stage writes to. What is
not of this project's layout (cache/layout.py) is never touched.

Killed at any moment, a root stays whole: of a set or plan the file that makes it exist is removed first, of a tar the
tar before its description, and what is left over is unused still.
"""

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from cache import shard
from cache.damage import ENCODE_PROGRAMS, DamageError
from cache.files import Entry, StoreError
from cache.json_checks import printable
from cache.layout import is_project_file
from cache.opening import CONFIG_POINTER_PATTERN
from cache.store import STALE, Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from stages.encoding import stage_registry
from stages.encoding.stage import UsageError, refuse_partition
from stages.maintenance.gc_roots import GcRoots, find_roots

DAY_S = 24 * 3600
KEEP_DAYS = 30.0
IN_PROGRESS_S = 3600.0  # seconds in which a set or plan gets all its files and is pointed at
MIB = 1 << 20
#: Top folders in the order in which they are removed: first what refers to others.
REMOVAL_ORDER = ("sets", "plans", *stage_registry.SHARD_KINDS, "rejects", "media", "damaged", "")
REMOVED_FIRST, REMOVED_LAST = ("set.json", "plan.json"), ("provenance.json",)  # of one folder

TableRow = dict[str, Any]


@dataclass
class UnusedItem:
    """Something to remove as a whole: its folder or file, what it is, and its files."""

    path: str
    description: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    def row(self, now: float) -> TableRow:
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
        typer.Option(min=0, max=36_500, metavar="N", help="Keep what was written in the last N days, whoever uses it."),
    ] = KEEP_DAYS,
    also: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Another configuration of this root. Repeatable.")
    ] = None,
) -> Report:
    refuse_partition(options, "gc")
    store = Store(config.root)
    configs = [config, *(_load_config_of_root(path, store) for path in also or ())]
    now = time.time()
    listed = find_unused(store, configs, now - keep_days * DAY_S)
    items, found = listed.items, sum(item.total_bytes for item in listed.items)
    report = Report(program="gc", dry_run=options.dry_run)
    report.details = {
        "unused": [item.row(now) for item in items] or f"nothing, of what was written more than {keep_days:g} days ago",
        "unused_mib": round(found / MIB, 2),
        "kept_mib": round(listed.kept / MIB, 2),
    }
    if listed.others:
        size = sum(entry.size for entry in listed.others)
        report.details["other_files"] = f"{len(listed.others)} files, {round(size / MIB, 2)} MiB: left alone"
    if not yes or options.dry_run:
        report.remaining = len(items) if options.dry_run else 0
        given = [*(f"--also {shlex.quote(str(path))}" for path in also or ()), "--yes"]
        given = [f"--keep-days {keep_days:g}", *given] if keep_days != KEEP_DAYS else given
        report.next_steps = [f"latentpress gc {' '.join(given)}"] if items else []
        return report
    # What came into use while the list was made stays.
    still = {entry for item in find_unused(store, configs, now - keep_days * DAY_S).items for entry in item.entries}
    for item in sorted(items, key=lambda item: REMOVAL_ORDER.index(_top_folder(item.path))):
        item.entries = [entry for entry in item.entries if entry in still]
        report.done += len(item.entries)
        if item.entries:
            console.log(f"removing {item.path}")
            _remove_item(store, item, listed.folders)
    report.details["removed_mib"] = round(sum(item.total_bytes for item in items) / MIB, 2)
    return report


def _load_config_of_root(path: Path, store: Store) -> Config:
    """The configuration in `path`, which is of the same root."""
    config = load_config(path)
    if Store(config.root).base != store.base:
        raise UsageError(
            f"{path} has the root {config.root}, not {store.url}", "give --also configurations of this root"
        )
    return config


@dataclass(frozen=True)
class UnusedFiles:
    """items: what nothing uses, biggest first. kept: bytes of what else is of the layout. others: what is not. folders:
    that stages write to, and stay though they be empty."""

    items: list[UnusedItem]
    kept: int
    others: list[Entry]
    folders: set[str]


def find_unused(store: Store, configs: Sequence[Config], since: float) -> UnusedFiles:
    """What nothing uses and was last written before `since`. A file is looked at where its whole name is one that this
    project gives; everything else is a person's. LatentpressError where one of the configurations has no plan.
    """
    every = store.list_files()
    entries = [entry for entry in every if is_project_file(entry.name)]
    used = find_roots(store, configs, entries, since)
    items = _UnusedFinder(store, used, entries).items()
    stale = [entry for entry in store.list_files(temporaries=True) if entry.modified < time.time() - STALE]
    items += [UnusedItem("", "files that killed processes left half written", stale)] if stale else []
    items.sort(key=lambda item: (-item.total_bytes, item.path))
    kept = sum(entry.size for entry in entries) - sum(item.total_bytes for item in items if item.path)
    return UnusedFiles(
        items, kept, [entry for entry in every if not is_project_file(entry.name)], _active_folders(used)
    )


class _UnusedFinder:
    """Sorts the files of a root into what is in use and items that are not."""

    def __init__(self, store: Store, used: GcRoots, entries: Sequence[Entry]) -> None:
        self._store, self._roots, self._entries = store, used, entries
        #: When anything was last written in a folder of two levels: a cache, a plan, a set.
        self._newest: dict[str, float] = {}
        for entry in entries:
            folder = _cache_folder(entry.name)
            self._newest[folder] = max(self._newest.get(folder, 0), entry.modified)

    def items(self) -> list[UnusedItem]:
        found: dict[str, list[Entry]] = {}
        for entry in self._entries:
            if self._unused(entry):
                found.setdefault(_cache_folder(entry.name), []).append(entry)
        gone = {entry for entries in found.values() for entry in entries}
        stay = {_cache_folder(entry.name) for entry in self._entries if entry not in gone}
        return [
            UnusedItem(folder, self._describe(folder, folder in stay), entries) for folder, entries in found.items()
        ]

    def _unused(self, entry: Entry) -> bool:
        top, _, rest = entry.name.partition("/")
        name, _, file = rest.partition("/")
        old = self._newest[_cache_folder(entry.name)] < min(self._roots.since, time.time() - IN_PROGRESS_S)
        if top in stage_registry.SHARD_KINDS:
            return self._unused_shard(f"{top}/{name}", file, entry)
        if top == "rejects":
            return self._unused_list(name, file, entry)
        if top == "damaged":
            return entry.modified < self._roots.since
        if CONFIG_POINTER_PATTERN.fullmatch(entry.name):
            return entry.modified < self._roots.since and entry.name not in self._roots.pointers
        if not file or top not in ("sets", "plans", "media"):  # pointers to sets, weights/, an export's shards
            return False
        used = {"sets": self._roots.sets, "plans": self._roots.generations, "media": self._roots.datasets}[top]
        return old and name not in used

    def _unused_shard(self, cache: str, file: str, entry: Entry) -> bool:
        """A shard, a tar's description or provenance.json. Of a cache in use only units that no plan has any longer."""
        unit = shard.unit_name(file.removesuffix(".json"))
        if not file or entry.name.removesuffix(".json") in self._roots.shards or unit in self._roots.units_of_others:
            return False
        if cache in self._roots.caches:
            return file not in REMOVED_LAST and unit not in self._roots.units and entry.modified < self._roots.since
        referred = file in REMOVED_LAST and any(path.startswith(f"{cache}/") for path in self._roots.shards)
        return self._newest[cache] < self._roots.since and not referred

    def _unused_list(self, stage: str, file: str, entry: Entry) -> bool:
        """A list of what was set aside: by an encoding stage for each unit, by another for each dataset or task."""
        if entry.modified >= self._roots.since:
            return False
        kinds = {name: kind for kind, name in ENCODE_PROGRAMS.items()}
        name = file.removesuffix(shard.ARROW_SUFFIX)
        if stage in kinds:
            fingerprint, _, unit = name.partition("/")
            cache = f"{kinds[stage]}/{fingerprint}"
            return unit not in self._roots.units_of_others and not (
                cache in self._roots.caches and unit in self._roots.units
            )
        return name not in (self._roots.datasets if stage == "discover" else self._roots.reject_lists)

    def _describe(self, folder: str, partly: bool) -> str:
        """In words, what an item is and why it is not used."""
        top = _top_folder(folder)
        if top in stage_registry.SHARD_KINDS:
            why = (
                "units that no plan has any longer"
                if folder in self._roots.caches
                else "no configuration given uses it"
            )
            why = "what no training set holds" if partly and folder not in self._roots.caches else why
            return f"{_describe_cache(self._store, folder)}: {why}"
        return {
            "sets": "a training set that no configuration given makes, and not the newest of its family and task",
            "plans": "a plan that nothing is made of",
            "rejects": "lists of what was set aside, of caches or datasets that are not used",
            "media": "the media table of a dataset that no configuration given names",
            "damaged": "damaged shards and plans that verify --repair or bucket set aside",
        }[top]


def _top_folder(path: str) -> str:
    return path.partition("/")[0]


def _cache_folder(name: str) -> str:
    """What a file belongs to: two levels of folders, as latents/<fingerprint>."""
    return "/".join(name.split("/")[:-1][:2])


def _describe_cache(store: Store, cache: str) -> str:
    """What its provenance.json says of a cache, in a few words. An import copies it from anywhere."""
    try:
        record = store.read_json(f"{cache}/provenance.json")
    except (FileNotFoundError, StoreError, DamageError):
        return "a cache of unknown making"
    words = [record.get(key) for key in ("encoder", "autoencoder", "precision", "posterior", "decoder")]
    weights = record.get("weights")
    if isinstance(weights, dict):
        words.append(weights.get("repo") or f"weights {str(weights.get('content', 'unknown'))[:8]}")
    stage = record.get("stage", "a cache")
    return printable(f"{stage} ({', '.join(str(word) for word in words if word)})")


def _active_folders(used: GcRoots) -> set[str]:
    """Folders that a stage of the configurations may have made a moment ago, for a file that is not there yet."""
    lists = {f"{ENCODE_PROGRAMS[cache.partition('/')[0]]}/{cache.partition('/')[2]}" for cache in used.caches}
    return used.caches | {f"rejects/{name}" for name in (*lists, "discover", "bucket")}


def _remove_item(store: Store, item: UnusedItem, written_to: set[str]) -> None:
    if not item.path:
        store.remove_stale_temps(STALE)
        return
    for entry in _sorted_for_removal(item.entries):
        store.remove(entry.name)
    # Lists: of each cache by itself, as its neighbour may be in the making.
    folders = (
        {entry.name.rpartition("/")[0] for entry in item.entries}
        if _top_folder(item.path) == "rejects"
        else {item.path}
    )
    for folder in folders - written_to:
        store.remove_empty_folders(folder)


def _sorted_for_removal(entries: Iterable[Entry]) -> list[Entry]:
    """First what makes a folder or a shard exist, last what explains it."""

    def rank(entry: Entry) -> tuple[int, str]:
        file = entry.name.rpartition("/")[2]
        if file in REMOVED_FIRST:
            return 0, entry.name
        return (3 if file in REMOVED_LAST else 2 if file.endswith(shard.SIDECAR_SUFFIX) else 1), entry.name

    return sorted(entries, key=rank)


app = make_app(
    "gc",
    "List what nothing uses any longer, with sizes; with --yes remove it.",
    run,
    examples=["--also other.yaml --keep-days 7", "--yes"],
)

if __name__ == "__main__":
    app()
