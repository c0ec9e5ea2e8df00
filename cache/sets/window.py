"""Copies, on this machine's disk, of the shards of a remote set that the current section of the training order reads.

With `train.shuffle_shards` an epoch is a list of sections, whose steps need few shards. The window holds the shards of
the current section, fetches the shards of the next section at the same time, and removes the shards of the previous
section. The first process of each machine does this for all processes of the run on this machine; any other process
waits until a shard has its final name.

Every run has its own folder, which is removed with the run; the folder of a killed run is removed when the next run
starts. A shard gets its final name once all of its rows are verified. Shards outside the window, such as validation
shards, are read from the store itself.
"""

import math
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.order.schedule import BatchSchedule, Ints
from cache.order.set_columns import IntColumn
from cache.runs.training_run import RunError
from cache.sets.trainset import NO_TEXT, TrainSet
from cache.shards.shard import SIDECAR_SUFFIX, TAR_SUFFIX, BaseShardReader
from cache.shards.shard_io import ShardSupply, SupplyError, open_reader, verify
from cache.store.damage import ANSWERS, DamageError, announce_retry
from cache.store.files import FileLock, StoreError, check_folder, explained
from cache.store.store import Store
from schemas.activities import activity
from schemas.config.training import LocalCache, Train

DEFAULT_BYTES = 200 * 10**9  # or half of the disk's free space, if that is smaller
PLANNED_DRAWS = 1 << 14  # draws that are planned at a time: a hundredth of a second
CHECKED_SECTIONS = 4  # number of sections whose sizes are compared with the limit before a model is loaded
POLL_S, TIMEOUT_S = 0.05, 600.0  # TIMEOUT_S: longest wait during which no shard arrives
LOCK = "lock"


class Ranks(NamedTuple):
    """This process's place in the run. world: number of the run's processes. local: the process's number on this
    machine. token: a name that all processes of this run share, and no process of any other run."""

    world: int = 1
    local: int = 0
    token: str = ""


def needed_shards(
    data: TrainSet,
    schedule: BatchSchedule,
    caption_dropout: float,
    first: int,
    last: int,
    reads_null_text: bool = False,
) -> Iterator[Ints]:
    """Yield for each step from `first` to below `last` the numbers of the shards that all ranks together read, each
    once, in increasing order: the shards of latents, further kinds and references, of the captions chosen, and of the
    null prompts that replace dropped captions. reads_null_text: whether each sample's null prompt is read, in addition
    to its caption. Memory: nothing per sample."""
    index, texts = data.tables["index"], data.tables["texts"]
    prefixes = ["", *(f"{part}_" for part in (*data.kinds, *data.references))]
    parts, text_shards = [IntColumn(index[f"{prefix}shard"]) for prefix in prefixes], IntColumn(texts["shard"])
    together = max(1, PLANNED_DRAWS // schedule.global_batch)
    for start in range(first, last, together):
        stop = min(last, start + together)
        _, _, positions, rows, passes = schedule.plan(start, stop)
        steps = np.arange(start, stop).repeat(schedule.micro_batches_per_step)
        texts = [data.row_texts.draw(schedule.seed, caption_dropout, steps, positions, rows, passes).ravel()]
        texts += [data.row_texts.null(rows.ravel())] if reads_null_text else []
        shards = [part.take(rows.ravel()) for part in parts]
        for numbers in texts:
            shards.append(np.full(len(numbers), -1))
            shards[-1][numbers != NO_TEXT] = text_shards.take(numbers[numbers != NO_TEXT])
        for step_shards in np.stack(shards, 1).reshape(stop - start, -1):
            numbers = np.unique(step_shards)
            yield numbers[numbers >= 0]  # -1: fewer references, or a null prompt that the reader reports


class Section(NamedTuple):
    """Steps in a row, and the shards that they need, in the order in which they are needed."""

    steps: range
    shards: tuple[int, ...]


def list_sections(
    data: TrainSet,
    schedule: BatchSchedule,
    caption_dropout: float,
    steps: range,
    least: int,
    reads_null_text: bool = False,
) -> Iterator[Section]:
    """Yield the sections of a run's steps, with their shards. least: minimum number of steps in a section, except for
    the last section of the run. reads_null_text: see `needed_shards`."""
    start = steps.start
    for bound in schedule.section_ends(start) if steps else ():
        stop = min(bound, steps.stop)
        if stop - start >= least or stop == steps.stop > start:
            needs = needed_shards(data, schedule, caption_dropout, start, stop, reads_null_text)
            shards = dict.fromkeys(number for numbers in needs for number in numbers.tolist())
            yield Section(range(start, stop), tuple(shards))
            start = stop
        if bound >= steps.stop:
            return


class CopyStore(Store):
    """A store that opens copies in a local folder in place of a remote store's files, under the remote files' names."""

    def __init__(self, remote: Store, folder: Path) -> None:
        super().__init__(folder)
        self._remote = remote

    def path(self, rel: str) -> str:
        return self._remote.path(rel)


def list_files(store: Store, paths: Sequence[str]) -> list[list[tuple[str, int]]]:
    """Return for each shard the names and sizes of its files, or [] if the shard is missing. Takes one listing of each
    folder."""
    sizes: dict[str, int] = {}
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        sizes |= {f"{folder}/{entry.name}": entry.size for entry in store.list_files(folder)}
    shards = []
    for path in paths:
        tar = path.endswith(TAR_SUFFIX)
        names = [path.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX, path] if tar else [path]  # the last one is the shard
        shards.append([(name, sizes[name]) for name in names if name in sizes] if path in sizes else [])
    return shards


class Window(ShardSupply):
    """A ShardSupply for a remote set. sections: function from a step to the sections from this step on, made by
    `list_sections`. folder: parent folder of the windows of this machine's runs. limit: size of the window in bytes."""

    def __init__(
        self,
        store: Store,
        paths: Sequence[str],
        sections: Callable[[int], Iterator[Section]],
        folder: Path,
        limit: int,
        downloads: int = 4,
        ranks: Ranks = Ranks(),  # noqa: B008 (a tuple)
    ) -> None:
        super().__init__(store, paths.__getitem__)
        self._paths, self._plan, self._limit = paths, sections, limit
        self._base, self._ranks = folder, ranks
        self.folder = folder / (ranks.token or secrets.token_hex(8))
        self._copies = CopyStore(store, self.folder)
        self._files = list_files(store, paths)
        self.sizes = [sum(size for _, size in files) for files in self._files]
        self._pool = ThreadPoolExecutor(downloads, "fetch-shards")
        self._lock = threading.RLock()
        self._lock_file: FileLock | None = None
        self._requested: dict[int, Future[None]] = {}  # the shards of the window
        self._present: Section | None = None
        self._next: Future[Section | None] | None = None
        self._upcoming: Iterator[Section] = iter(())
        self._from_store = set[int]()  # shards whose copies have a damaged row
        self._counts, self._moved, self._stopped = Counter[str](), 0.0, False

    def check(self, first: int, shuffle_shards: int) -> None:
        """Raise SupplyError if the shards of two consecutive sections exceed the limit. Only the next CHECKED_SECTIONS
        sections are compared. shuffle_shards: the option, for the message."""
        if sum(self.sizes) <= self._limit:
            return
        sections = [set(section.shards) for section in islice(self._plan(first), CHECKED_SECTIONS)]
        pairs = [one | two for one, two in pairwise([*sections, set[int]()])]
        most = max((self._bytes(pair) for pair in pairs), default=0)
        if most > self._limit:
            fitting = int(0.95 * shuffle_shards * self._limit / most)
            lower = f", or train.shuffle_shards to {fitting} or less" if fitting else ""
            raise SupplyError(
                f"train.local_cache.max_gb is {self._limit / 1e9:.3g}, but the shards of two consecutive sections "
                f"(train.shuffle_shards: {shuffle_shards}) have up to {most / 1e9:.3g} GB",
                f"Set train.local_cache.max_gb to {round_up_gb(most)} or more{lower}.",
            )

    # -- methods for readers -------------------------------------------------------------------------------------------

    def follow(self, first: int) -> None:
        self._stopped, self._moved = False, time.monotonic()
        if self._lock_file is None and self._ranks.local == 0:
            self._lock_file = make_run_folder(self._base, self.folder)
        self._upcoming = self._plan(first)
        self._begin(next(self._upcoming, None))

    def open(self, number: int) -> BaseShardReader:
        with self._lock:
            future = None if number in self._from_store else self._requested.get(number)
            if future is not None and future.done() and isinstance(future.exception(), StoreError):
                future = self._start(number)  # it failed before it was needed: the store may answer now
        if future is not None:
            began = time.monotonic()
            self._wait(future)
            self._count(wait_ms=round(1e3 * (time.monotonic() - began)))
            try:
                return open_reader(self._copies, self._paths[number])
            except DamageError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # the copy was removed: its section ended
                    raise
        return super().open(number)

    def finished(self, step: int) -> None:
        # A rank that takes a step's batches has finished the previous step, which all ranks finish together. Other
        # ranks may still read rows of step `step`.
        last_finished = step if self._ranks.world == 1 else step - 1
        while self._present is not None and last_finished >= self._present.steps.stop - 1:
            if self._next is not None:
                self._wait(self._next)
            self._begin(self._next.result() if self._next is not None else None)

    def damaged(self, number: int) -> bool:
        with self._lock:
            if number in self._from_store or number not in self._requested:
                return False
            self._from_store.add(number)
        self.forget(number)
        return True

    def metrics(self) -> dict[str, float]:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {
            "shards_fetched": counts["fetched"],
            "shards_fetched_mb": round(counts["bytes"] / 1e6, 3),
            "shards_wait_s": counts["wait_ms"] / 1e3,
        }

    @contextmanager
    def show_wait(self) -> Iterator[None]:
        shards = self._present.shards if self._present is not None else ()
        total, message = self._bytes(shards), f"waiting for data: fetching {len(shards)} shards"
        with activity(message, total=total, unit="bytes") as task:
            task.measure = lambda: self._bytes(number for number in shards if self._is_fetched(number))
            yield

    def stop_waiting(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)
        if self._lock_file is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock_file.close()
            self._lock_file = None

    # -- sections ------------------------------------------------------------------------------------------------------

    def _begin(self, section: Section | None) -> None:
        """Remove shards that the section does not need, and prepare the next section."""
        self._present, needed = section, set(section.shards if section is not None else ())
        with self._lock:
            unneeded = [number for number in self._requested if number not in needed]
            futures = [self._requested.pop(number) for number in unneeded]
        for number, future in zip(unneeded, futures, strict=True):
            future.cancel()
            future.add_done_callback(lambda _, number=number: self._remove(number))  # type: ignore[misc]
        if section is not None and not self._fetch(section):
            size = self._bytes(needed)
            raise SupplyError(
                f"train.local_cache.max_gb is {self._limit / 1e9:.3g}, but the shards of steps "
                f"{section.steps.start + 1} to {section.steps.stop} have {size / 1e9:.3g} GB",
                f"Set it to {round_up_gb(size)} or more, or lower train.shuffle_shards.",
            )
        self._next = self._pool.submit(self._prepare, self._upcoming) if section is not None else None

    def _prepare(self, upcoming: Iterator[Section]) -> Section | None:
        section = next(upcoming, None)
        if section is not None:
            self._fetch(section)  # the shards that do not fit are fetched when the section begins
        return section

    def _fetch(self, section: Section) -> bool:
        """Start to fetch the section's shards until the limit is reached; returns whether all of them fit."""
        with self._lock:
            window_bytes = self._bytes(self._requested)
            for number in section.shards:
                if number not in self._requested:
                    window_bytes += self.sizes[number]
                    if window_bytes > self._limit:
                        return False
                    self._start(number)
        return True

    def _start(self, number: int) -> "Future[None]":
        job = self._copy if self._ranks.local == 0 else self._await_copy
        self._requested[number] = future = self._pool.submit(job, number)
        return future

    def _wait(self, future: "Future[Any]") -> None:
        began = time.monotonic()
        while not wait([future], POLL_S).done:
            if self._stopped:
                raise SupplyError("the shard is no longer needed", "You do not have to do anything.")
            if self._ranks.local == 0 and time.monotonic() - max(began, self._moved) > TIMEOUT_S:
                problem = f"no shard arrived from {self._store.url} in {TIMEOUT_S:.0f} s"
                raise SupplyError(problem, "Check the connection, and run the same command again.")
        future.result()

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[number] for number in numbers)

    def _is_fetched(self, number: int) -> bool:
        return Path(self.folder, self._paths[number]).exists()

    # -- in threads ----------------------------------------------------------------------------------------------------

    def _copy(self, number: int) -> None:
        """Fetch a shard and verify all of it, up to ANSWERS times. Raises DamageError if the damage persists or the
        shard is missing, StoreError if the store or the disk fails."""
        path, files, part = self._paths[number], self._files[number], self.folder / f"part-{number}"
        try:
            for _ in range(ANSWERS):
                for name, size in files:
                    with explained(str(part)):
                        (part / name).parent.mkdir(parents=True, exist_ok=True)
                    self._store.copy_to_file(name, part / name, size)
                damages = verify(CopyStore(self._store, part), path) if files else [self._missing_error(number)]
                if not damages:
                    break
                if not files:
                    raise damages[0]
                announce_retry(damages[0].path, damages[0])
            if damages:
                raise damages[0]
            for name, _ in files:
                with explained(str(self.folder)):
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    os.rename(part / name, self.folder / name)
        except FileNotFoundError as error:
            raise self._missing_error(number) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._count(fetched=1, bytes=self.sizes[number])
        self._moved = time.monotonic()
        self.forget(number)  # closes a reader that reads from the store

    def _missing_error(self, number: int) -> DamageError:
        return DamageError(self._store.path(self._paths[number]), "the file is missing")

    def _await_copy(self, number: int) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not self._is_fetched(number) and not self._stopped:
            if time.monotonic() > end:
                problem = f"the first process of this machine did not fetch {self._paths[number]} in {TIMEOUT_S:.0f} s"
                raise SupplyError(problem, "See its messages, and run the same command again.")
            time.sleep(POLL_S)
        self._moved = time.monotonic()
        self.forget(number)

    def _remove(self, number: int) -> None:
        self.forget(number)
        with self._lock:
            is_needed_again = number in self._requested
        for name, _ in self._files[number] if self._ranks.local == 0 and not is_needed_again else ():
            (self.folder / name).unlink(missing_ok=True)


def make_run_folder(base: Path, folder: Path) -> FileLock:
    """Make the folder of a run and take its lock. Removes the folders of ended runs."""
    with explained(str(base)):
        base.mkdir(parents=True, exist_ok=True)
        with FileLock(base / LOCK) as all_runs:
            all_runs.take(TIMEOUT_S)
            for run_folder in base.iterdir():
                if (run_folder / LOCK).is_file():
                    with FileLock(run_folder / LOCK) as run:
                        if run.take():
                            shutil.rmtree(run_folder, ignore_errors=True)
            folder.mkdir()
            lock = FileLock(folder / LOCK)
            lock.take()
            return lock


def needs_sections(place: str) -> RunError:
    """Return the error for a set on an object store if train.shuffle_shards is not set."""
    return RunError(
        f"{place} is on an object store, but train.shuffle_shards is not set: each step would need shards from all "
        "of the set",
        "Set train.shuffle_shards, for example to 100: twice as many shards must fit in train.local_cache.max_gb. A "
        "value as large as the number of shards mixes the whole set.",
    )


def cache_folder(settings: LocalCache) -> Path:
    """train.local_cache.folder, by default latentpress/shards in the user's folder for caches."""
    if settings.folder is not None:
        return Path(settings.folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latentpress" / "shards"


def cache_limit(settings: LocalCache, folder: Path) -> int:
    """Return the size limit of the window in bytes. Raises SupplyError if the disk has less free space."""
    check_folder(folder)
    free = shutil.disk_usage(next(part for part in (folder, *folder.parents) if part.is_dir())).free
    if settings.max_gb is None:
        return min(DEFAULT_BYTES, free // 2)
    limit = round(settings.max_gb * 1e9)
    if limit > free:
        raise SupplyError(
            f"train.local_cache.max_gb is {settings.max_gb:g}, but the disk of {folder} has {free / 1e9:.3g} GB of "
            "free space",
            "Lower it, free space on the disk, or set train.local_cache.folder to a folder on another disk.",
        )
    return limit


def round_up_gb(size: int) -> str:
    """Format bytes in units of 10^9 with two decimals, rounded up, so that the number is a sufficient limit."""
    return f"{math.ceil(size / 1e7) / 100:g}"


def open_window(
    settings: Train,
    data: TrainSet,
    schedule: BatchSchedule,
    steps: range,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> None:
    """Make a remote set read its shards through a window; does nothing for a local set. `data.close` ends the window.
    Takes one listing of each folder of shards. steps: the remaining steps of the run.

    Raises RunError without train.shuffle_shards, and SupplyError if two consecutive sections exceed the limit.
    """
    if data.store.root is not None:
        return
    if settings.shuffle_shards is None:
        raise needs_sections(data.store.url)
    folder, least = cache_folder(settings.local_cache), settings.reading.steps_ahead + 1
    window = Window(
        data.store,
        data.tables["shards"].column("path").to_pylist(),
        lambda first: list_sections(
            data, schedule, settings.caption_dropout, range(first, steps.stop), least, settings.reads_null_text
        ),
        folder,
        cache_limit(settings.local_cache, folder),
        settings.local_cache.downloads,
        ranks,
    )
    data.use_supply(window)
    window.check(steps.start, settings.shuffle_shards)
