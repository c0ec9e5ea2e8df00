"""Checks of shards beyond their own checksums, and of the tables: agreement with the plan, tensors that can be right.

An undamaged shard can still be wrong: made for another plan's unit, with tensors of the wrong shape, or full of NaN.
The expected shapes are computed from the cache's provenance.json, so caches of every configuration are checked, without
any weights.

Tables and the JSON files of plans and sets are checked by their checksums and by their values. The program that
wrote a damaged file makes it again: `bucket` makes plans, `index` sets, and an encoding stage its list of rejects.
`verify --repair` does this for plans and sets.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cache.sets import plans, table_checks
from cache.sets.caption_edits import FOLDER as EDITS
from cache.sets.item_rows import check_caption_row, check_features_row, check_mask_row
from cache.sets.set_lookup import read_pointer
from cache.sets.table_checks import TABLE_CHECKS, Provenance, SetRecord, read_set_table
from cache.sets.trainset import TrainSet
from cache.shards import shard, shard_io
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensor_checks import find_scale_problem, find_shape_problem
from cache.store.damage import DamageError, rebuild_program
from cache.store.files import StoreError, explained
from cache.store.json_checks import printable
from cache.store.layout import STAGE_PROGRAMS, is_project_file, is_shard
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.config.encoding import STAGE_ORDER
from stages.discovery import media_table

#: Kind of an item stage's cache -> check of a row, which raises ValueError if the row is not valid.
ROW_CHECKS: dict[str, Callable[[ShardRow], object]] = {
    "captions": check_caption_row,
    "features": check_features_row,
    "masks": check_mask_row,
}
#: Top folder -> check of its tables.
_TABLES: dict[str, Callable[[pa.Table], object]] = {
    "media": media_table.check_media_table,
    "items": table_checks.check_items,
    "captions": table_checks.check_caption_edits,
    "rejects": table_checks.check_rejects,
}
#: Top folder -> names of the tables that belong together in one of its folders.
_TABLES_OF_FOLDER = {"plans": tuple(plans.PLAN_TABLES), "sets": tuple(TABLE_CHECKS)}
_TOPS = [*_TABLES, *_TABLES_OF_FOLDER, *(name for name in STAGE_PROGRAMS if name not in _TABLES)]


class UnmappedStore(Store):
    """A store whose files are read sequentially instead of mapped, because a read error of a mapped file kills the
    process. An object is read with two requests."""

    def open(self, rel: str) -> pa.NativeFile:
        local = self.local(rel)
        if local is None:
            return self.open_whole(rel)
        self.size(rel)  # refuses a pipe, which would block
        with explained(self.path(rel)):
            return pa.OSFile(str(local))


@dataclass(frozen=True)
class CacheSpec:
    """How the shards of one cache were made. strides: (spatial, temporal) stride of the autoencoder, None if not known.
    channels: number of latent channels. condition_frames: number of latent frames of a condition, None for all frames
    of the clip."""

    strides: tuple[int, int] | None = None
    channels: int = 0
    condition_frames: int | None = 1

    @classmethod
    def of(cls, record: Provenance) -> "CacheSpec":
        """The specification that a provenance.json implies. Properties that it does not have are not checked."""
        families = [family for family in FAMILIES.values() if family.autoencoder == record.autoencoder]
        shapes = {(family.spatial_stride, family.temporal_stride, family.latent_channels) for family in families}
        if len(shapes) != 1:  # another release's autoencoder, or one that families use in different ways
            return cls()
        [(spatial, temporal, channels)] = shapes
        return cls((spatial, temporal), channels, record.condition_frames)

    def check(self, row: ShardRow, bucket: str) -> None:
        """Raise ValueError if a row's tensors are not valid."""
        if not row.tensors:
            raise ValueError("it has no tensors")
        for name, array in row.tensors.items():
            base = name.rpartition(".")[2]  # an export's rows hold several texts: text0.embeds, text1.embeds, ...
            if base == "embeds" and (problem := find_scale_problem(row.tensors, name.removesuffix(base))):
                raise ValueError(problem)
            if self.strides is not None or base not in ("latent", "condition", "mask"):
                expected = (array.shape, bucket, self.strides or (1, 1), self.channels)
                if problem := find_shape_problem(base, *expected, condition_frames=self.condition_frames):
                    raise ValueError(f"{name} {problem}")
            if not array.is_finite():
                raise ValueError(f"{name} has numbers that are NaN or infinite")


class ShardChecker:
    """Compares shards with the units of the root's plans, and rows with the cache's provenance.json."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._units = plans.all_units(store).select(["unit_id", "bucket", "members"])
        self._rows = {name: row for row, name in enumerate(self._units.column("unit_id").to_pylist())}

    def check(self, rel: str) -> list[DamageError]:
        """All problems of the shard at `rel`; an empty list if it is removed during the check."""
        cache, _, name = rel.rpartition("/")
        row_check, buckets = ROW_CHECKS.get(cache.partition("/")[0]), [""]
        spec = CacheSpec() if row_check else self._read_spec(cache)

        def check_meta(meta: ShardMeta) -> Iterator[str]:
            """Yield the differences from the shard's unit. Duplicate ids are found when the shard is opened."""
            buckets[0] = meta.bucket
            number = self._rows.get(shard.unit_name(name))
            if number is None:  # no plan contains it any more
                return
            (unit,) = self._units.slice(number, 1).to_pylist()
            present, members = set(meta.ids) | {member.id for member in meta.rejects}, set(unit["members"])
            if meta.bucket != unit["bucket"]:
                yield f"its bucket is {meta.bucket!r}, but its unit has bucket {unit['bucket']!r}"
            if lacking := members - present:
                yield f"it lacks {len(lacking)} of its unit's {len(members)} members, for example {min(lacking)}"
            if extra := present - members:
                yield f"it has {len(extra)} members that its unit does not have, for example {min(extra)}"

        def check_row(row: ShardRow) -> None:
            row_check(row) if row_check else spec.check(row, buckets[0])

        damages = shard_io.verify(self._store, rel, check_meta, check_row)
        return damages if not damages or self._store.exists(rel) else []

    def _read_spec(self, cache: str) -> CacheSpec:
        """The specification of a cache `<kind>/<fingerprint>`, without requirements if its provenance.json can't be
        read."""
        try:
            return CacheSpec.of(self._store.read_record(f"{cache}/provenance.json", Provenance))
        except (OSError, StoreError, DamageError):
            return CacheSpec()


def list_shards(store: Store) -> dict[str, int]:
    """Path -> bytes of every shard under the root. The bytes of a tar include its sidecar."""
    sizes = {entry.name: entry.size for entry in store.list_files()}
    sidecars = {name: name.removesuffix(shard.TAR_SUFFIX) + shard.SIDECAR_SUFFIX for name in sizes}
    return {name: size + sizes.get(sidecars[name], 0) for name, size in sizes.items() if is_shard(name)}


def find_missing_shards(store: Store, present: dict[str, int]) -> dict[str, str]:
    """Path of each missing shard of a current set -> name of the set. Damaged sets are skipped, because
    `find_damaged_tables` reports them."""
    sets: dict[str, str] = {}
    for rel in set_pointer_paths(store):
        with suppress(DamageError, FileNotFoundError):
            name = read_pointer(store, rel)
            if store.exists(f"sets/{name}/set.json"):
                for path in shards_of_set(store, name):
                    if path not in present:
                        sets.setdefault(path, name)
    return sets


def shards_of_set(store: Store, name: str) -> list[str]:
    """Paths of the shards of the set `name`. Raises DamageError if a path is not a shard below this root, because gc
    keeps these paths, and verify moves damaged shards."""
    paths: list[str] = read_set_table(store, name, "shards").column("path").to_pylist()
    for path in paths:
        if not is_shard(path):
            problem = f"its path {printable(repr(path))} is not a shard below the root"
            raise DamageError(store.path(f"sets/{name}/shards.arrow"), problem)
    return paths


def set_pointer_paths(store: Store) -> list[str]:
    """The files that name the current set of each family and task."""
    paths = (f"sets/{name}" for name in store.list_names("sets") if name.startswith("current-"))
    return [rel for rel in paths if is_project_file(rel)]


def move_to_damaged(store: Store, rel: str) -> str:
    """Move a shard or a table to the same folder below damaged/, and return the new path. The sidecar of a tar is moved
    after the tar."""
    stem, suffix = shard.unit_name(rel), Path(rel).suffix
    names, number = set(store.list_names("damaged")), 1
    while (target := f"{stem}.{number}") + suffix in names or target + shard.SIDECAR_SUFFIX in names:
        number += 1
    store.move(rel, f"damaged/{target}{suffix}")
    sidecar = stem + shard.SIDECAR_SUFFIX
    if suffix == shard.TAR_SUFFIX and store.exists(sidecar):
        store.move(sidecar, f"damaged/{target}{shard.SIDECAR_SUFFIX}")
    return f"damaged/{target}{suffix}"


DamageByPath = dict[str, list[DamageError]]


def find_damaged_tables(store: Store) -> tuple[int, DamageByPath]:
    """Check tables and JSON files. Returns (number of checked files, path -> problems). Plans and sets without a
    plan.json or set.json are not checked; missing tables of a plan or set are problems. A file that is removed during
    the check is skipped."""
    names = {entry.name for entry in store.list_files() if is_project_file(entry.name)}
    finished = {name.rpartition("/")[0] for name in names if name.endswith(("/plan.json", "/set.json"))}
    names = {name for name in names if _is_table(name, finished)}
    for folder in finished:
        names |= {f"{folder}/{table}.arrow" for table in _TABLES_OF_FOLDER.get(folder.partition("/")[0], ())}
    damaged = DamageByPath()
    for name in sorted(names, key=lambda name: (_TOPS.index(name.partition("/")[0]), name)):
        try:
            _check_file(store, name)
        except FileNotFoundError:
            continue
        except DamageError as damage:
            damaged.setdefault(store.relative(damage.path), []).append(damage)
    return len(names), damaged


def _is_table(name: str, finished: set[str]) -> bool:
    top, folder = name.partition("/")[0], name.rpartition("/")[0]
    if top in STAGE_PROGRAMS:
        return name.endswith("/provenance.json") or name.startswith(f"{EDITS}/")
    return top in _TOPS and (top not in _TABLES_OF_FOLDER or folder == top or folder in finished)


def _check_file(store: Store, rel: str) -> None:
    """Read the file at `rel` as the programs do."""
    top, name, file = f"{rel}//".split("/")[:3]
    table = file.removesuffix(".arrow")
    if file == "provenance.json":
        store.read_record(rel, Provenance)
    elif top in _TABLES:
        store.read_table(rel, _TABLES[top])
    elif top == "plans":
        if table in plans.PLAN_TABLES:
            plans.read_plan_table(store, name, table)
        else:
            plans.load_plan(store, name)
    elif not file:
        read_pointer(store, rel)
    elif table in TABLE_CHECKS:
        read_set_table(store, name, table)
    else:  # set.json has to match its tables, if all of them are valid
        meta = store.read_record(f"sets/{name}/set.json", SetRecord)
        for table in TABLE_CHECKS:
            try:
                read_set_table(store, name, table)
            except DamageError:
                return
        shards_of_set(store, name)
        TrainSet(store, name, meta).close()


def rebuild_commands(paths: DamageByPath) -> list[str]:
    """The commands that make these files again, in the order in which to run them."""
    order = [name for name in STAGE_ORDER if name not in ("train", "decode", "score")]
    programs = {rebuild_program(path) for path in paths}
    commands = [f"latentpress {name}" for name in order if name in programs]
    return commands + [f"latentpress {name}" for name in sorted(programs - {*order})]
