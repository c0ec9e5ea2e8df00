"""What a shard must be beyond its own checksums: what its plan says of it, and what its tensors can be.

A shard can be whole, byte for byte as it was written, and still be wrong: of another plan's unit under this one's name,
of another shape than its bucket has, or full of NaN. What tensors should be like is read from the cache's own
provenance.json, so caches of every configuration are checked, with none of their weights at hand.
"""

from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cache import plans, shard, shard_io
from cache.damage import DamageError
from cache.files import StoreError, explained
from cache.json_checks import printable
from cache.layout import is_project_file, is_shard
from cache.opening import read_pointer
from cache.plans import Unit
from cache.shard import ShardMeta, ShardRow
from cache.store import Store
from cache.tensor_checks import find_shape_problem
from cache.tensors import INFINITY_BITS
from cache.trainset import read_set_table
from schemas.catalogue import FAMILIES
from schemas.geometry import Bucket
from schemas.tables import UNITS_SCHEMA
from stages.encoding.vision.grids import stored_grid

#: Tensors in the precision that their cache's provenance names.
CHECKED_TENSORS = ("latent", "condition", "mask", "embeds", "pooled", "vision")


class UnmappedStore(Store):
    """A store whose files are read from one end to the other rather than mapped: a disk that can't read is then an
    error, where a memory map kills the process. On an object store a file is one request."""

    def open(self, rel: str) -> pa.NativeFile:
        with explained(self.path(rel)):
            local = self.local(rel)
            return pa.BufferReader(self.read_bytes(rel)) if local is None else pa.OSFile(str(local))


@dataclass(frozen=True)
class CacheSpec:
    """How the shards of one cache were made. dtype: of its tensors, None where that is not known. strides: of the
    autoencoder, (spatial, temporal). channels: of its latents. given: latent frames of
    a condition. vision: of features of frames, the size that the
    model sees, and the latent frames' and the tokens' strides."""

    dtype: str | None = None
    strides: tuple[int, int] | None = None
    channels: int = 0
    given: int = 1
    vision: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> "CacheSpec":
        """From a provenance.json; what that does not say is not checked."""
        if record.get("stage") == "encode-vision":
            temporal, side = record["token"]
            if not all(type(number) is int and 0 < number < 1 << 16 for number in (record["size"], temporal, side)):
                raise ValueError(f"no sizes: {record['size']}, {record['token']}")
            return cls("bfloat16", vision=(record["size"], temporal, side))
        dtype = record.get("precision") if record.get("stage") in ("encode-text", "encode-latents") else None
        named = [family for family in FAMILIES.values() if family.autoencoder == record.get("autoencoder")]
        shapes = {(family.spatial_stride, family.temporal_stride, family.latent_channels) for family in named}
        known = dtype if dtype in INFINITY_BITS else None
        if len(shapes) != 1:  # another release's autoencoder, or one that families use in different ways
            return cls(known)
        [(spatial, temporal, channels)], given = shapes, record.get("condition_frames", 1)
        if type(given) is not int or not 0 < given < 1 << 16:
            raise ValueError(f"no number of frames: {given}")
        return cls(known, (spatial, temporal), channels, given)


class ExpectedShards:
    """What the root's plans and provenance say of its shards."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._units = plans.all_units(store)
        names = self._units.column("unit_id").to_pylist()
        self._places = {name: place for place, name in enumerate(names)}
        self._made: dict[str, CacheSpec] = {}

    def unit(self, name: str) -> Unit | None:
        """The unit of that name, of whichever plan; None where no plan has it any longer."""
        if name not in self._places:
            return None
        (row,) = self._units.slice(self._places[name], 1).to_pylist()
        return Unit(**{key: row[key] for key in UNITS_SCHEMA.names} | {"members": tuple(row["members"])})

    def cache_spec(self, cache: str) -> CacheSpec:
        """Of the cache `<kind>/<fingerprint>`. A provenance.json that can't be read says nothing."""
        if cache not in self._made:
            try:
                self._made[cache] = CacheSpec.of(self._store.read_json(f"{cache}/provenance.json"))
            except (OSError, StoreError, DamageError, ValueError, KeyError, TypeError):
                self._made[cache] = CacheSpec()
        return self._made[cache]


def check_shard(store: Store, rel: str, expected: ExpectedShards) -> list[DamageError]:
    """Everything that is wrong with the shard at `rel`; nothing where it was removed meanwhile."""
    cache, _, name = rel.rpartition("/")
    tensors = TensorChecker(expected.cache_spec(cache))

    def whole(meta: ShardMeta) -> Iterator[str]:
        tensors.bucket = meta.bucket
        yield from plan_mismatches(meta, expected.unit(shard.unit_name(name)))

    found = shard_io.verify(store, rel, whole, tensors.check)
    return found if not found or store.exists(rel) else []


def plan_mismatches(meta: ShardMeta, unit: Unit | None) -> Iterator[str]:
    """What a shard says otherwise than its plan. unit: None: no plan has it. That ids are not named twice is looked at
    when a shard is opened."""
    if unit is None:
        return
    ids, aside = set(meta.ids), {member.id for member in meta.set_aside}
    if meta.bucket != unit.bucket:
        yield f"it is of bucket {meta.bucket!r}, and its unit of {unit.bucket!r}"
    members = set(unit.members)
    if lost := members - ids - aside:
        yield f"it lacks {len(lost)} of its unit's {len(members)} members, such as {min(lost)}"
    if more := (ids | aside) - members:
        yield f"it has {len(more)} members that its unit has not, such as {min(more)}"


class TensorChecker:
    """The rows of one shard, looked at one after another. `bucket` is set once the shard's description is read."""

    def __init__(self, made: CacheSpec) -> None:
        self.bucket = ""
        self._made = made
        self._first: dict[str, tuple[str, int]] = {}  # of each tensor: dtype, and the dimension that all rows share

    def check(self, row: ShardRow) -> None:
        """ValueError with what is wrong with a row's tensors."""
        if not row.tensors:
            raise ValueError("it has no tensors")
        for name, array in row.tensors.items():
            plain = name.rpartition(".")[2]  # an export's rows hold several texts: text0.embeds, text1.embeds, ...
            if problem := self._shape(plain, array.shape) or self._consistency_problem(plain, array.dtype, array.shape):
                raise ValueError(f"{name} {problem}")
            if not array.is_finite():
                raise ValueError(f"{name} has numbers that are NaN or infinite")

    def _shape(self, name: str, shape: tuple[int, ...]) -> str:
        """What is wrong with the shape of a tensor; nothing of one whose name is not known."""
        if name == "vision" and self._made.vision is not None:
            size, temporal, side = self._made.vision
            bucket = Bucket.parse(self.bucket)
            cells = (bucket.latent_shape(side, temporal)[0], *stored_grid(bucket, size, side))
            return (
                "" if shape[:-1] == cells else f"is of shape {shape}, and of bucket {self.bucket} {(*cells, 'width')}"
            )
        if self._made.strides is None and name in ("latent", "condition", "mask"):
            return ""
        made = self._made
        return find_shape_problem(name, shape, self.bucket, made.strides or (1, 1), made.channels, given=made.given)

    def _consistency_problem(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """What tells a tensor from the one of that name in earlier rows, or in provenance.json."""
        shared = shape[-1] if name in ("embeds", "pooled", "vision") and shape else shape[0] if shape else 0
        first = self._first.setdefault(name, (dtype, shared))
        if self._made.dtype and name in CHECKED_TENSORS and dtype != self._made.dtype:
            return f"is {dtype}, and provenance.json says {self._made.dtype}"
        return (
            "" if first == (dtype, shared) else f"is {dtype} by {shared}, and in the first row {first[0]} by {first[1]}"
        )


def list_shards(store: Store, kinds: tuple[str, ...]) -> dict[str, int]:
    """Path -> bytes of every shard under the root; a tar's bytes include its description's."""
    found: dict[str, int] = {}
    for kind in kinds:
        sizes = {f"{kind}/{entry.name}": entry.size for entry in store.list_files(kind)}
        for rel, size in sizes.items():
            if is_shard(rel):  # a folder called text/ may hold a person's files too
                found[rel] = size + sizes.get(rel.removesuffix(shard.TAR_SUFFIX) + shard.SIDECAR_SUFFIX, 0)
    return found


def find_missing_shards(store: Store, present: dict[str, int]) -> dict[str, str]:
    """Path -> set, of the shards that a set in use names and that are not there. Sets and pointers that are damaged say
    nothing: stages/maintenance/table_scan.py names them."""
    lost: dict[str, str] = {}
    for rel in set_pointers(store):
        with suppress(DamageError, FileNotFoundError):
            name = read_pointer(store, rel)
            if store.exists(f"sets/{name}/set.json"):
                for path in shards_of_set(store, name):
                    if path not in present:
                        lost.setdefault(path, name)
    return lost


def shards_of_set(store: Store, name: str) -> list[str]:
    """Paths of the shards that the set `name` names. DamageError where they are no shards' below this root: what is
    damaged is moved, and what is named is kept."""
    rel, found = f"sets/{name}/shards.arrow", list[str]()
    for path in read_set_table(store, name, "shards").column("path").to_pylist():
        if not is_shard(path):
            raise DamageError(store.path(rel), f"it names {printable(repr(path))}, which is no shard below the root")
        found.append(path)
    return found


def current_set_ids(store: Store, but: Container[str] = ()) -> list[str]:
    """Ids of the sets that sets/current-*.json, save those in `but`, point at. DamageError where one points nowhere
    below the root."""
    return sorted({read_pointer(store, rel) for rel in set_pointers(store) if rel not in but})


def set_pointers(store: Store) -> list[str]:
    """The files that name the set in use of each family and task."""
    named = (f"sets/{name}" for name in store.list_names("sets") if name.startswith("current-"))
    return [rel for rel in named if is_project_file(rel)]


def move_to_damaged(store: Store, rel: str) -> str:
    """Move a shard, the file that says "done" first, to damaged/<kind>/<fingerprint>/; where it lies then."""
    stem, suffix = shard.unit_name(rel), Path(rel).suffix
    taken, number = set(store.list_names("damaged")), 1
    while (kept := f"{stem}.{number}") + suffix in taken or kept + shard.SIDECAR_SUFFIX in taken:
        number += 1
    store.move(rel, f"damaged/{kept}{suffix}")
    sidecar = stem + shard.SIDECAR_SUFFIX
    if suffix == shard.TAR_SUFFIX and store.exists(sidecar):
        store.move(sidecar, f"damaged/{kept}{shard.SIDECAR_SUFFIX}")
    return f"damaged/{kept}{suffix}"
