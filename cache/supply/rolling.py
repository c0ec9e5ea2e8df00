"""Rolling caches: the shards of a set within a limit of bytes, made in the order in which training needs them.

Every stage that makes shards decides alone what it makes next, by rules that give the same answer to all:

- Shards are in the order in which the coming steps of training need them first; those that every validation reads come
  before all. A shard is begun only where it and all shards before it fit in the limit together, so what is begun is
  never in the way of what is needed sooner.
- Shards that are there, and those that are begun at their largest possible size, never take more than the limit: others
  are removed first, the one needed last before all, and none that is needed in the step of the new one or before.

A shard counts as there once it has its final name. Removing is unlinking: who has the file mapped goes on reading it.
Counting, removing and beginning are done under one lock (`cache.supply.rolling_files`), and nothing but the files is a
record of them: killed anywhere, a stage leaves at most a temporary file, which the next count removes.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cache.sets.rolling_set import RollingSet
from cache.sets.trainset import TrainSet
from cache.shards.shard import ARROW_SUFFIX, SIDECAR_SUFFIX, TAR_SUFFIX, unit_name
from cache.shards.tensor_checks import SAMPLE
from cache.store.damage import ENCODE_PROGRAMS
from cache.store.files import is_temporary
from cache.supply.rolling_files import Position, RollingError, RollingFiles, StageFile
from cache.supply.step_shards import ReadingOrder, StepShards

LOOKAHEAD = 1 << 12  # steps in which the next need of a shard is looked for
CHECKED_STEPS = 1 << 14  # of a run, before it starts
GB = 1e9


def pinned_shards(data: TrainSet, eval_samples: int) -> list[int]:
    """The shards that stay: of the null prompt, the validation prompts, the samples of the eval loss, and the first
    sample, by whose tensors methods are sized."""
    found = {
        place.shard
        for number in range(len(data.meta["validation"]))
        for place in data.prompt_locations(number).values()
    }
    rows = [0, *(TrainSet.choose_eval_rows(data, eval_samples)[0] if eval_samples else ())]
    for row in rows:
        places = data.part_locations(row)
        names = (SAMPLE, *data.kinds, "text0", *(("null",) if data.meta["null_text"] is not None else ()))
        found |= {places[name].shard for name in names if name in places}
    return sorted(found)


@dataclass(frozen=True)
class ShardNeeds:
    """When a run needs the shards of a set. pinned: always."""

    steps: StepShards
    pinned: Sequence[int]
    count: int

    def order(self, step: int, wanted: Collection[int] = ()) -> Iterator[tuple[int, int]]:
        """(shard, step that needs it first), from `step` on, in this order; pinned and wanted ones as of the step
        before. Those that no step up to the end of the run, or of the next LOOKAHEAD, needs are left out."""
        seen = {*self.pinned, *wanted}
        yield from ((number, step - 1) for number in sorted(seen))
        for coming in range(step, min(self.steps.order.steps, step + LOOKAHEAD)):
            if len(seen) == self.count:
                return
            for number in self.steps.step(coming).tolist():
                if number not in seen:
                    seen.add(number)
                    yield number, coming

    def most_bytes(self, sizes: Sequence[int], first: int = 0, last: int = CHECKED_STEPS) -> tuple[int, int]:
        """(bytes, step): the largest that two steps in a row need, pinned shards included, and the first of them; of
        the steps from `first` to below `last`."""
        most, before, pinned = (0, first), set[int](), set(self.pinned)
        for number in range(first, min(last, self.steps.order.steps)):
            own = set(self.steps.step(number).tolist())
            need = sum(sizes[shard] for shard in own | before | pinned)
            most, before = max(most, (need, max(first, number - 1))), own
        return most


class RollingNeeds:
    """The needs of a run, whatever its order; those of the last one are kept."""

    def __init__(self, data: TrainSet, eval_samples: int) -> None:
        self._data, self._pinned = data, pinned_shards(data, eval_samples)
        self._known: tuple[ReadingOrder, ShardNeeds] | None = None

    def of(self, order: ReadingOrder) -> ShardNeeds:
        if self._known is None or self._known[0] != order:
            count = self._data.tables["shards"].num_rows
            self._known = order, ShardNeeds(StepShards(self._data, order), self._pinned, count)
        return self._known[1]


def require_room(most: tuple[int, int], max_gb: float, other: int = 0) -> None:
    """RollingError where the shards of two steps in a row do not fit. most: as of `ShardNeeds.most_bytes`. other: bytes
    in the same folders that are of no shard of the set."""
    need, step = most
    if need + other > max_gb * GB:
        held = f", beside {other / GB:.3g} GB of other shards in the same folders (`latentpress gc`)" if other else ""
        raise RollingError(
            f"cache.rolling.max_gb: {max_gb:g} is too small: steps {step + 1} and {step + 2} read shards that may take "
            f"{need / GB:.4g} GB, those of validation included{held}",
            f"Set it to {(need + other) * 1.001 / GB:.4g} or more; or let a step touch fewer shards (a smaller global "
            "batch or validation.eval_samples), or plan smaller ones (cache.unit_mib, before the first `latentpress "
            "bucket`).",
        )


def check_room(data: RollingSet, order: ReadingOrder, eval_samples: int, max_gb: float) -> None:
    """`require_room` of a run, before it starts."""
    require_room(RollingNeeds(data, eval_samples).of(order).most_bytes(data.meta["rolling"]["bytes"]), max_gb)


@dataclass
class OnDisk:
    """Bytes by shard: of those that are there, and at most of those that running stages have begun. other: bytes of
    files in the same folders that are of no shard of the set."""

    shards: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    other: int = 0

    @property
    def total(self) -> int:
        return self.other + sum(self.shards.values()) + sum(self.reserved.values())


@dataclass
class RollingCache:
    """The shards of a rolling set on the disk."""

    data: RollingSet
    max_gb: float
    files: RollingFiles = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.data.store
        self.files = RollingFiles(self.store)
        self.sizes: list[int] = self.data.meta["rolling"]["bytes"]  # the most that each may take
        self.paths: list[str] = self.data.tables["shards"].column("path").to_pylist()
        self.kinds: list[str] = self.data.tables["shards"].column("kind").to_pylist()
        self._stems = {unit_name(path): number for number, path in enumerate(self.paths)}
        self._folders = {path.rpartition("/")[0]: kind for path, kind in zip(self.paths, self.kinds, strict=True)}

    def scan(self, own: Mapping[int, int] | None = None) -> "OnDisk":
        """Count what there is, under the lock. Temporary files that no running stage writes to are removed. own: what
        this process has begun itself."""
        found = OnDisk(reserved=dict(own or {}))
        for program in ENCODE_PROGRAMS.values():
            found.reserved |= self.files.read_stage(program) or {}
        for folder in self._folders:
            names, unfinished = self._list(folder), dict[int, int]()
            for name, size in names.items():
                file = name[1:].rpartition(".")[0].rpartition(".")[0] if is_temporary(name) else name
                number = self._stems.get(f"{folder}/{unit_name(file.removesuffix('.json'))}")
                if is_temporary(name):
                    if number is not None and number not in found.reserved:
                        (self._local(folder) / name).unlink(missing_ok=True)
                    elif number is not None:
                        unfinished[number] = unfinished.get(number, 0) + size
                elif number is not None and (not name.endswith(SIDECAR_SUFFIX) or name.removesuffix(".json") in names):
                    found.shards[number] = found.shards.get(number, 0) + size
                elif name.endswith((ARROW_SUFFIX, TAR_SUFFIX, SIDECAR_SUFFIX)):
                    found.other += size
            # A worker that died may have left one beside that of the next try.
            found.other += sum(max(0, size - found.reserved[number]) for number, size in unfinished.items())
        found.reserved = {number: size for number, size in found.reserved.items() if number not in found.shards}
        return found

    def _local(self, folder: str) -> Path:
        local = self.store.local(folder)
        assert local is not None
        return local

    def _list(self, folder: str) -> dict[str, int]:
        found = {}
        with suppress(FileNotFoundError), os.scandir(self._local(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # renamed or removed meanwhile
                    found[entry.name] = entry.stat().st_size
        return found

    def has(self, number: int) -> bool:
        """Whether the shard has its final name."""
        return self._local(self.paths[number]).exists()

    def remove(self, number: int) -> None:
        """Unlink a shard; of a tar, what makes it count as there first. Called under the lock."""
        path = self.paths[number]
        self.store.remove(path)
        if path.endswith(TAR_SUFFIX):
            self.store.remove(unit_name(path) + SIDECAR_SUFFIX)


@dataclass
class UnitQueue:
    """What one running stage does next. kind: of its shards. needs_of: of a reading order."""

    cache: RollingCache
    kind: str
    held: StageFile
    needs: RollingNeeds
    reserved: dict[int, int] = field(default_factory=dict)  # begun by this stage
    other: int = 0  # of `OnDisk`, as of the last look

    def next(self, position: Position) -> int | None:
        """The shard to begin now, which is reserved; None where there is none: all that is needed and fits is there or
        begun. Shards that are in its way are removed."""
        cache, limit = self.cache, round(self.cache.max_gb * GB)
        with cache.files.locked():
            disk = cache.scan(self.reserved)
            self.other = disk.other
            self.reserved = {number: size for number, size in self.reserved.items() if number in disk.reserved}
            order = dict(self.order(position))
            before = disk.other
            for number, step in order.items():
                before += disk.shards.get(number, cache.sizes[number])
                if before > limit:
                    return None
                if number in disk.shards or number in disk.reserved or cache.kinds[number] != self.kind:
                    continue
                if not self._make_room(disk.total + cache.sizes[number] - limit, disk.shards, order, step):
                    return None
                self.reserved[number] = cache.sizes[number]
                self._write()
                return number
        return None

    def order(self, position: Position) -> Iterator[tuple[int, int]]:
        """See `ShardNeeds.order`."""
        wanted = [number for number in position.wanted if number < len(self.cache.paths)]
        return self.needs.of(position.order).order(position.step, wanted)

    def _make_room(self, needed: int, present: dict[int, int], order: Mapping[int, int], step: int) -> bool:
        """Remove shards that are needed after `step`, the last one first, until `needed` bytes are free; False, and
        nothing is removed, where that is not enough."""
        never = step + LOOKAHEAD + 1
        later = [number for number in present if order.get(number, never) > step]
        if sum(present[number] for number in later) < needed:
            return False
        for number in sorted(later, key=lambda one: (order.get(one, never), one), reverse=True):
            if needed <= 0:
                break
            self.cache.remove(number)
            needed -= present.pop(number)
        return True

    def release(self, number: int) -> None:
        """The shard is done, or failed: it is counted by its file from now on."""
        with self.cache.files.locked():
            self.reserved.pop(number, None)
            self._write()

    def _write(self) -> None:
        self.held.write(self.reserved)
