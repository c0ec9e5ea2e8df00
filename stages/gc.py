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
from cache.damage import ENCODERS, DamageError
from cache.files import Entry, StoreError
from cache.layout import is_ours
from cache.opening import OF_CONFIGURATION
from cache.store import STALE, Store
from cache.untrusted import shown
from schemas.config.pipeline import Config
from schemas.console import Console, Options, Report, program
from schemas.loading import load
from stages import encoders
from stages.stage import WrongUse, refuse_shard
from stages.usage import Use, use

DAY = 24 * 3600
KEEP_DAYS = 30.0
MAKING = 3600.0  # seconds in which a set or plan gets all its files and is pointed at
MIB = 1 << 20
#: Top folders in the order in which they are removed: first what refers to others.
ORDER = ("sets", "plans", *encoders.KINDS, "rejects", "media", "damaged", "")
FIRST, LAST = ("set.json", "plan.json"), ("provenance.json",)  # of one folder

Row = dict[str, Any]


@dataclass
class Item:
    """Something to remove as a whole: its folder or file, what it is, and its files."""

    path: str
    what: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    def row(self, now: float) -> Row:
        newest = max(entry.modified for entry in self.entries)
        days = max(0, int((now - newest) / DAY))
        mib = round(self.bytes / MIB, 2)
        return {"mib": mib, "days_old": days, "files": len(self.entries), "path": self.path, "what": self.what}


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
    refuse_shard(options, "gc")
    store = Store(config.root)
    configs = [config, *(_sharing(path, store) for path in also or ())]
    now = time.time()
    listed = unused(store, configs, now - keep_days * DAY)
    items, found = listed.items, sum(item.bytes for item in listed.items)
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
    still = {entry for item in unused(store, configs, now - keep_days * DAY).items for entry in item.entries}
    for item in sorted(items, key=lambda item: ORDER.index(_top(item.path))):
        item.entries = [entry for entry in item.entries if entry in still]
        report.done += len(item.entries)
        if item.entries:
            console.log(f"removing {item.path}")
            _remove(store, item, listed.folders)
    report.details["removed_mib"] = round(sum(item.bytes for item in items) / MIB, 2)
    return report


def _sharing(path: Path, store: Store) -> Config:
    """The configuration in `path`, which is of the same root."""
    config = load(path)
    if Store(config.root).base != store.base:
        raise WrongUse(f"{path} has the root {config.root}, not {store.url}", "give --also configurations of this root")
    return config


@dataclass(frozen=True)
class Listed:
    """items: what nothing uses, biggest first. kept: bytes of what else is of the layout. others: what is not. folders:
    that stages write to, and stay though they be empty."""

    items: list[Item]
    kept: int
    others: list[Entry]
    folders: set[str]


def unused(store: Store, configs: Sequence[Config], since: float) -> Listed:
    """What nothing uses and was last written before `since`. A file is looked at where its whole name is one that this
    project gives; everything else is a person's. LatentpressError where one of the configurations has no plan.
    """
    every = store.entries()
    entries = [entry for entry in every if is_ours(entry.name)]
    used = use(store, configs, entries, since)
    items = _Sorter(store, used, entries).items()
    stale = [entry for entry in store.entries(temporaries=True) if entry.modified < time.time() - STALE]
    items += [Item("", "files that killed processes left half written", stale)] if stale else []
    items.sort(key=lambda item: (-item.bytes, item.path))
    kept = sum(entry.size for entry in entries) - sum(item.bytes for item in items if item.path)
    return Listed(items, kept, [entry for entry in every if not is_ours(entry.name)], _written_to(used))


class _Sorter:
    """Sorts the files of a root into what is in use and items that are not."""

    def __init__(self, store: Store, used: Use, entries: Sequence[Entry]) -> None:
        self._store, self._use, self._entries = store, used, entries
        #: When anything was last written in a folder of two levels: a cache, a plan, a set.
        self._newest: dict[str, float] = {}
        for entry in entries:
            folder = _folder(entry.name)
            self._newest[folder] = max(self._newest.get(folder, 0), entry.modified)

    def items(self) -> list[Item]:
        found: dict[str, list[Entry]] = {}
        for entry in self._entries:
            if self._unused(entry):
                found.setdefault(_folder(entry.name), []).append(entry)
        gone = {entry for entries in found.values() for entry in entries}
        stay = {_folder(entry.name) for entry in self._entries if entry not in gone}
        return [Item(folder, self._what(folder, folder in stay), entries) for folder, entries in found.items()]

    def _unused(self, entry: Entry) -> bool:
        top, _, rest = entry.name.partition("/")
        name, _, file = rest.partition("/")
        old = self._newest[_folder(entry.name)] < min(self._use.since, time.time() - MAKING)
        if top in encoders.KINDS:
            return self._unused_shard(f"{top}/{name}", file, entry)
        if top == "rejects":
            return self._unused_list(name, file, entry)
        if top == "damaged":
            return entry.modified < self._use.since
        if OF_CONFIGURATION.fullmatch(entry.name):
            return entry.modified < self._use.since and entry.name not in self._use.pointers
        if not file or top not in ("sets", "plans", "media"):  # pointers to sets, weights/, an export's shards
            return False
        used = {"sets": self._use.sets, "plans": self._use.generations, "media": self._use.datasets}[top]
        return old and name not in used

    def _unused_shard(self, cache: str, file: str, entry: Entry) -> bool:
        """A shard, a tar's description or provenance.json. Of a cache in use only units that no plan has any longer."""
        unit = shard.stem(file.removesuffix(".json"))
        if not file or entry.name.removesuffix(".json") in self._use.shards or unit in self._use.elsewhere:
            return False
        if cache in self._use.caches:
            return file not in LAST and unit not in self._use.units and entry.modified < self._use.since
        referred = file in LAST and any(path.startswith(f"{cache}/") for path in self._use.shards)
        return self._newest[cache] < self._use.since and not referred

    def _unused_list(self, stage: str, file: str, entry: Entry) -> bool:
        """A list of what was set aside: by an encoding stage for each unit, by another for each dataset or task."""
        if entry.modified >= self._use.since:
            return False
        kinds = {name: kind for kind, name in ENCODERS.items()}
        name = file.removesuffix(shard.ARROW_SUFFIX)
        if stage in kinds:
            fingerprint, _, unit = name.partition("/")
            cache = f"{kinds[stage]}/{fingerprint}"
            return unit not in self._use.elsewhere and not (cache in self._use.caches and unit in self._use.units)
        return name not in (self._use.datasets if stage == "discover" else self._use.reject_lists)

    def _what(self, folder: str, partly: bool) -> str:
        """In words, what an item is and why it is not used."""
        top = _top(folder)
        if top in encoders.KINDS:
            why = (
                "units that no plan has any longer" if folder in self._use.caches else "no configuration given uses it"
            )
            why = "what no training set holds" if partly and folder not in self._use.caches else why
            return f"{_provenance(self._store, folder)}: {why}"
        return {
            "sets": "a training set that no configuration given makes, and not the newest of its family and task",
            "plans": "a plan that nothing is made of",
            "rejects": "lists of what was set aside, of caches or datasets that are not used",
            "media": "the media table of a dataset that no configuration given names",
            "damaged": "damaged shards and plans that verify --repair or bucket set aside",
        }[top]


def _top(path: str) -> str:
    return path.partition("/")[0]


def _folder(name: str) -> str:
    """What a file belongs to: two levels of folders, as latents/<fingerprint>."""
    return "/".join(name.split("/")[:-1][:2])


def _provenance(store: Store, cache: str) -> str:
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
    return shown(f"{stage} ({', '.join(str(word) for word in words if word)})")


def _written_to(used: Use) -> set[str]:
    """Folders that a stage of the configurations may have made a moment ago, for a file that is not there yet."""
    lists = {f"{ENCODERS[cache.partition('/')[0]]}/{cache.partition('/')[2]}" for cache in used.caches}
    return used.caches | {f"rejects/{name}" for name in (*lists, "discover", "bucket")}


def _remove(store: Store, item: Item, written_to: set[str]) -> None:
    if not item.path:
        store.sweep(STALE)
        return
    for entry in _in_order(item.entries):
        store.remove(entry.name)
    # Lists: of each cache by itself, as its neighbour may be in the making.
    folders = {entry.name.rpartition("/")[0] for entry in item.entries} if _top(item.path) == "rejects" else {item.path}
    for folder in folders - written_to:
        store.prune(folder)


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    """First what makes a folder or a shard exist, last what explains it."""

    def rank(entry: Entry) -> tuple[int, str]:
        file = entry.name.rpartition("/")[2]
        if file in FIRST:
            return 0, entry.name
        return (3 if file in LAST else 2 if file.endswith(shard.SIDECAR_SUFFIX) else 1), entry.name

    return sorted(entries, key=rank)


app = program(
    "gc",
    "List what nothing uses any longer, with sizes; with --yes remove it.",
    run,
    examples=["--also other.yaml --keep-days 7", "--yes"],
)

if __name__ == "__main__":
    app()
