"""cache.rolling: the shards of a set within a limit of bytes, encoded in the order in which training needs them.

The processes tell each other where they are by files under rolling/ of the root: the trainer writes its position, from
which every encoding stage computes what is needed next, with the same result; the other files are those of
`cache.supply.limited_folder`. So there is no process that could be missed.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from cache.order.schedule import Ints
from cache.sets.planned_set import PlannedSet
from cache.sets.set_files import PLANNED
from cache.sets.trainset import TrainSet
from cache.shards.tensor_checks import SAMPLE
from cache.store.damage import DamageError
from cache.store.files import StoreError, explained, make_folders, replace, temporary
from cache.store.store import Store
from cache.supply.fitting_order import window_bytes
from cache.supply.limited_folder import POSITION, LimitedFolder, Member
from cache.supply.limited_shards import SupplyError
from cache.supply.step_needs import StepNeeds, needed_shards
from schemas.config.training import Train
from schemas.identity import hash_json

FOLDER = "rolling"  # in the root; also the name of its part in reports
LOOK_S = 0.2
CHECKED_STEPS = 1 << 14  # of a run, before it starts
GB = 1e9


class ReadingOrder(BaseModel, frozen=True):
    """The inputs that determine which rows each step of a run reads. accumulate: micro-batches of a step, of all ranks
    together. steps: of the whole run."""

    seed: int
    batch_size: PositiveInt
    accumulate: PositiveInt
    shuffle_shards: PositiveInt | None
    caption_dropout: float
    steps: PositiveInt

    @classmethod
    def of(cls, settings: Train, world: int = 1) -> "ReadingOrder":
        values = {name: getattr(settings, name) for name in cls.model_fields}
        return cls(**values | {"accumulate": settings.accumulate * world})

    def needs(self, data: TrainSet, first: int = 0, last: int | None = None) -> Iterator[Ints]:
        """The shards of each step from `first` to below `last`, or to the end, of all ranks together."""
        schedule = data.make_schedule(Train(**self.model_dump(exclude={"steps"})))
        last = self.steps if last is None else min(last, self.steps)
        return needed_shards(data, schedule, self.caption_dropout, first, last)


class Position(BaseModel, frozen=True):
    """The position of a run. step: the first whose rows may still be read. wanted: shards that it waits for, beside
    those that the order says."""

    set: str
    run: str
    order: ReadingOrder
    step: NonNegativeInt = 0
    wanted: tuple[NonNegativeInt, ...] = ()


class EncodedFolder(LimitedFolder):
    """The shards of a store that are encoded beside training; it must be a folder of this machine: SupplyError
    otherwise. data: their set; without it only the processes and their position are known."""

    patience_s = 60.0

    def __init__(self, store: Store, data: PlannedSet | None = None, max_gb: float = 0.0) -> None:
        if store.root is None:
            raise SupplyError(
                f"{store.url}: cache.rolling needs a root on a disk of this machine",
                "Set root to a folder, or remove cache.rolling: an object store has room for the whole cache.",
            )
        shards = data.tables["shards"] if data is not None else None
        self.paths: list[str] = shards.column("path").to_pylist() if shards is not None else []
        self.kinds: list[str] = shards.column("kind").to_pylist() if shards is not None else []
        self.sizes: list[int] = data.meta[PLANNED]["bytes"] if data is not None else []  # the most that each may take
        folders = {path.rpartition("/")[0] for path in self.paths}
        super().__init__(store.root, round(max_gb * GB), FOLDER, folders, frozenset(self.paths))
        self.store = store

    def read_position(self) -> Position | None:
        """None where no trainer has written one, or a power cut left something else."""
        try:
            return Position.model_validate(self.store.read_json(f"{FOLDER}/{POSITION}"))
        except (FileNotFoundError, DamageError, StoreError, ValueError):
            return None

    def write_position(self, position: Position) -> None:
        """Replace the file. It is not synced: what a power cut takes is written again when training goes on."""
        record = position.model_dump(mode="json")
        record["checksum"] = hash_json(record)
        path = self.control / POSITION
        with explained(str(path)):
            make_folders(self.control)
            temp = temporary(path)
            temp.write_text(json.dumps(record))
            replace(str(temp), str(path))

    @contextmanager
    def working(self, program: str) -> Iterator[Member]:
        """Be the encoding stage, or the training, that is at work. SupplyError where another process is, and goes on so
        for `patience_s`: one whose `run` was killed ends once it has seen that."""
        end = time.monotonic() + self.patience_s
        while (member := self.join(program)) is None:
            if time.monotonic() > end:
                raise SupplyError(
                    f"another {program} is at work for the limited cache {self.store.path(FOLDER)}",
                    "One process a stage hands out its units; for several workers: --workers N. One whose `run` "
                    "was killed ends by itself, training after its step: then run the same command again.",
                )
            time.sleep(LOOK_S)
        try:
            yield member
        finally:
            self.leave(member)


def pinned_shards(data: TrainSet, eval_samples: int) -> list[int]:
    """The shards that stay: of the null prompt, the validation prompts, the samples of the eval loss, and the first
    sample, by whose tensors methods are sized."""
    prompts = range(len(data.meta["validation"]))
    shards = {location.shard for number in prompts for location in data.prompt_locations(number).values()}
    rows = [0, *(TrainSet.choose_eval_rows(data, eval_samples)[0] if eval_samples else ())]
    for row in rows:
        parts = data.part_locations(row)
        names = (SAMPLE, *data.kinds, "text0", *(("null",) if data.meta["null_text"] is not None else ()))
        shards |= {parts[name].shard for name in names if name in parts}
    return sorted(shards)


class RunNeeds:
    """The needs of a run, wherever it is and whatever its order; those of the last position are kept."""

    def __init__(self, data: TrainSet, eval_samples: int) -> None:
        self._data, self._pinned = data, pinned_shards(data, eval_samples)
        self._order: ReadingOrder | None = None
        self._needs, self._plan = StepNeeds(), iter(list[Ints]())

    def at(self, position: Position) -> StepNeeds:
        order, step = position.order, position.step
        if order != self._order or step < self._needs.first:
            self._order, self._needs = order, StepNeeds(step, self._pinned)
            self._plan = order.needs(self._data, step)
        self._needs.finish(step - 1)
        while not self._needs.is_full and (numbers := next(self._plan, None)) is not None:
            self._needs.add(numbers.tolist())
        return self._needs


def check_room(data: PlannedSet, order: ReadingOrder, eval_samples: int, max_gb: float) -> None:
    """`require_room` of a run, before it starts."""
    needs = (numbers.tolist() for numbers in order.needs(data, last=CHECKED_STEPS))
    windows = window_bytes(needs, data.meta[PLANNED]["bytes"], repeat(2), pinned_shards(data, eval_samples))
    most, last = max((size, step) for step, size in enumerate(windows))
    require_room(most, max(0, last - 1), max_gb)


def require_room(need: int, step: int, max_gb: float, other: int = 0) -> None:
    """SupplyError where `step` and the next one do not fit. need: bytes of their shards. other: bytes in the same
    folders that are of no shard of the set."""
    if need + other > max_gb * GB:
        held = f", beside {other / GB:.3g} GB of other shards in the same folders (`latentpress gc`)" if other else ""
        raise SupplyError(
            f"cache.rolling.max_gb: {max_gb:g} is too small: steps {step + 1} and {step + 2} read shards that may take "
            f"{need / GB:.4g} GB, those of validation included{held}",
            f"Set it to {(need + other) * 1.001 / GB:.4g} or more; or let a step touch fewer shards (a smaller global "
            "batch or validation.eval_samples), or plan smaller ones (cache.unit_mib, before the first `latentpress "
            "bucket`).",
        )
