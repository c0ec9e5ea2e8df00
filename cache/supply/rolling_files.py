"""What the processes of a rolling cache tell each other, by files under rolling/ of the root.

The trainer writes its position; each encoding stage has a file that it keeps locked while it runs, with the units that
it is at work on; and whoever counts, removes or begins shards holds one lock. The kernel releases locks when a process
ends, so one that was killed leaves nothing that has to be mended.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from cache.store.damage import DamageError
from cache.store.files import StoreError, explained, make_folders, replace, temporary
from cache.store.json_checks import check_count, check_list, check_name
from cache.store.store import Store
from cache.supply.step_shards import ReadingOrder
from schemas.errors import USAGE, LatentpressError
from schemas.identity import hash_json

FOLDER = "rolling"
POSITION, LOCK = f"{FOLDER}/position.json", f"{FOLDER}/lock"
LOOK_S = 0.2


class RollingError(LatentpressError):
    """A rolling cache can't be used in this way."""

    exit_code = USAGE


@dataclass(frozen=True)
class Position:
    """Where a run is. step: the first whose rows may still be read. wanted: shards that it waits for, beside those that
    the order says."""

    set: str
    run: str
    order: ReadingOrder
    step: int = 0
    wanted: tuple[int, ...] = ()


class RollingFiles:
    """Those of a store, which must be a folder of this machine: RollingError otherwise."""

    patience_s = 60.0

    def __init__(self, store: Store) -> None:
        if store.root is None:
            raise RollingError(
                f"{store.url}: cache.rolling needs a root on a disk of this machine",
                "Set root to a folder, or remove cache.rolling: an object store has room for the whole cache.",
            )
        self.store, self.folder = store, store.root / FOLDER

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While the body runs, no other process begins or removes a shard."""
        with explained(str(self.folder)):
            make_folders(self.folder)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            # Not by closing alone: a process that was forked meanwhile would go on holding it.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def read_position(self) -> Position | None:
        """None where no trainer has written one, or a power cut left something else."""
        try:
            record = self.store.read_json(POSITION)
            wanted = tuple(check_count(number, "a shard") for number in check_list(record["wanted"], "wanted"))
            order = ReadingOrder.parse(record["order"])
            step = check_count(record["step"], "step")
            return Position(check_name(record["set"], "set"), check_name(record["run"], "run"), order, step, wanted)
        except (FileNotFoundError, DamageError, StoreError, ValueError, KeyError, TypeError):
            return None

    def write_position(self, position: Position) -> None:
        """Replace the file. It is not synced: what a power cut takes is written again when training goes on."""
        record: dict[str, Any] = {**vars(position), "order": position.order.to_dict(), "wanted": list(position.wanted)}
        record["checksum"] = hash_json(record)
        path = self.folder / "position.json"
        with explained(str(path)):
            make_folders(self.folder)
            temp = temporary(path)
            temp.write_text(json.dumps(record))
            replace(str(temp), str(path))

    @contextmanager
    def working(self, program: str) -> Iterator["StageFile"]:
        """Hold the file of an encoding stage, or of training. RollingError where another process does, and goes on so
        for `patience_s`: one whose `run` was killed ends once it has seen that."""
        with explained(str(self.folder)):
            make_folders(self.folder)
            file = os.open(self.folder / f"{program}.json", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = time.monotonic() + self.patience_s
            while not (held := self._hold(file)):
                if time.monotonic() > end:
                    raise RollingError(
                        f"another {program} is at work for the rolling cache {self.store.path(FOLDER)}",
                        "One process a stage hands out its units; for several workers: --workers N. One whose `run` "
                        "was killed ends by itself, training after its step: then run the same command again.",
                    )
                time.sleep(LOOK_S)
            yield held
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _hold(self, file: int) -> "StageFile | None":
        with self.locked():  # whoever asks whether a stage is running holds this, too
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            held = StageFile(file)
            held.write({})
            return held

    def read_stage(self, program: str) -> dict[int, int] | None:
        """Shard -> bytes reserved, of a stage that is running; None of one that is not. Called under `locked`."""
        with suppress(FileNotFoundError), open(self.folder / f"{program}.json", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return {int(number): int(size) for number, size in json.loads(file.read() or b"{}").items()}
        return None


@dataclass
class StageFile:
    """The locked file of a running stage. It is written to under `RollingFiles.locked`."""

    file: int

    def write(self, reserved: Mapping[int, int]) -> None:
        data = json.dumps({str(number): size for number, size in reserved.items()}).encode()
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, data, 0)
