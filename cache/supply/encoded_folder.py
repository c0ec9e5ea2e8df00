"""cache.rolling: the shards of a set within a limit of bytes, encoded in the order in which training needs them.

The processes tell each other where they are by files under rolling/ of the root: the trainer writes its position, from
which every encoding stage computes what is needed next, with the same result; the other files are those of
`cache.supply.limited_folder`. So there is no process that could be missed. `EncodedShards` is the trainer's view: it
waits for shards that are being made, says how far it is, and lets go of those that were removed.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import repeat
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from cache.order.schedule import Ints
from cache.sets.planned_set import PlannedSet
from cache.sets.table_checks import PLANNED
from cache.sets.trainset import TrainSet
from cache.sets.window import needed_shards
from cache.shards.shard import BaseShardReader
from cache.shards.shard_io import open_reader
from cache.shards.shard_supply import LimitedShards, SupplyError
from cache.store.damage import DamageError
from cache.store.files import StoreError, explained, make_folders, replace, temporary
from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from cache.supply.limited_folder import POSITION, LimitedFolder, Member
from cache.supply.step_needs import StepNeeds, window_bytes
from schemas.activities import activity
from schemas.config.training import Train
from schemas.interruption import pause
from schemas.json_records import format_record

FOLDER = "rolling"  # in the root; also the name of its part in reports
LOOK_S = 0.2
CHECKED_STEPS = 1 << 14  # of a run, before it starts
GB = 1e9
POLL_S = 0.05
TELL_S = 0.2  # at most so often the position is written
FIRST_MESSAGE_S, NEXT_MESSAGE_S = 10.0, 60.0


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
        path = self.control / POSITION
        with explained(str(path)):
            make_folders(self.control)
            temp = temporary(path)
            temp.write_bytes(format_record(position.model_dump(mode="json")))
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
            pause(LOOK_S)
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
        null = ("null",) if data.meta["null_text"] is not None else ()
        names = (*data.sample_parts(data.bucket(row)), "text0", *null)
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


class EncodedShards(LimitedShards):
    """A ShardSupply. main: whether this process tells where the run is; of several, one does. behind: steps that other
    processes may be behind it.

    on_wait: called again and again while a shard is waited for; what it raises ends the wait. log: for people.
    """

    def __init__(
        self,
        folder: EncodedFolder,
        position: Position,
        main: bool = True,
        log: Callable[[str], object] = lambda text: None,
        behind: int = 0,
    ) -> None:
        super().__init__()
        self._folder, self._position, self._main, self._log, self._behind = folder, position, main, log, behind
        self.on_wait: Callable[[], object] = lambda: None
        self._telling = threading.Lock()
        self._opened: dict[int, int] = {}  # shard -> inode of its file
        self._waiting = set[int]()
        self._told, self._stopped = 0.0, False
        self._tell(now=True)

    def follow(self, first: int) -> None:
        self._stopped = False
        self._position = self._position.model_copy(update={"step": first})
        self._tell(now=True)

    def finished(self, step: int) -> None:
        self._position = self._position.model_copy(update={"step": max(self._position.step, step + 1 - self._behind)})
        self._tell()

    def _is_here(self, number: int) -> bool:
        return self._path(number).exists()

    def _open(self, number: int) -> BaseShardReader:
        reader = open_reader(self._folder.store, self._folder.paths[number])
        with suppress(FileNotFoundError):
            self._opened[number] = os.stat(reader.path).st_ino
        return reader

    def _wait_for(self, number: int) -> None:
        began = time.monotonic()
        next_message = began + FIRST_MESSAGE_S
        self._waiting.add(number)
        self._tell(now=True)
        try:
            while not self._is_here(number):
                if self._stopped:
                    path = self._folder.paths[number]
                    raise SupplyError(f"{path} is not needed any more", "Nothing has to be done.")
                self.on_wait()
                if self._main and time.monotonic() >= next_message:
                    next_message += NEXT_MESSAGE_S
                    self._explain_wait(number, time.monotonic() - began)
                self._changed.wait(POLL_S)
        finally:
            self._waiting.discard(number)
            self._tell(now=True)

    def _explain_wait(self, number: int, waited_s: float) -> None:
        program = ENCODE_PROGRAMS[self._folder.kinds[number]]
        with self._folder.locked():
            running = program in self._folder.members()
        if not running:
            path = self._folder.paths[number]
            why = f"is not there, and `latentpress {program}` is not running: start it"
            self._log(f"waiting for data since {waited_s:.0f} s: {path} {why}")

    def _tell(self, now: bool = False) -> None:
        """Write the position, and let go of files that are gone."""
        with self._telling:
            if not now and time.monotonic() - self._told < TELL_S:
                return
            self._told = time.monotonic()
            if self._main:
                self._folder.write_position(self._position.model_copy(update={"wanted": tuple(sorted(self._waiting))}))
        for number, inode in list(self._opened.items()):
            try:
                if os.stat(self._path(number)).st_ino == inode:
                    continue
            except FileNotFoundError:
                pass
            self._tell_removed(number)

    def _tell_removed(self, number: int) -> None:
        self._opened.pop(number, None)
        super()._tell_removed(number)

    def _discard(self, number: int) -> None:
        self._log(f"{self._folder.paths[number]} is damaged and is encoded again")
        with self._folder.locked():
            self._folder.remove(self._folder.paths[number])

    def _path(self, number: int) -> Path:
        return self._folder.base / self._folder.paths[number]

    def show_wait(self) -> AbstractContextManager[object]:
        paths = [self._folder.paths[number] for number in list(self._waiting)]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return activity(f"waiting for {paths[0]}{more} to be encoded" if paths else "waiting for data")

    def stop_waiting(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.stop_waiting()
        if not self._closed:
            self._closed = True
            self._tell(now=True)
