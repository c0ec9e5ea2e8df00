"""Run work that may crash, hang or take too much memory in other processes, so that a crash affects a single item.

    with SandboxPool(partial(Reader, dataset), workers=4, timeout_s=300, memory_mib=8192) as pool:
        for item, result in pool.map(items):
            ...

The processes belong to pebble, which replaces a process that died. The system's alarm ends a process whose item takes
too long, even after the program was killed. A task costs a sixth of a millisecond, so several quick items are sent as
one task; the items of a task that failed are retried one by one. Decoded clips are returned in shared memory, or in
files if the shared memory is full, because a pipe of Python takes seconds for 100 MB.
"""

import errno
import mmap
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, islice, pairwise
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Generic, TypeVar

from pebble import CONSTS, ProcessExpired, ProcessPool
from pebble.pool.process import PoolManager, Task

from schemas.cli.process_record import find_process_start
from schemas.config.encoding import Stages
from schemas.interruption import signals_blocked, wait_for
from stages.media.files import MediaError

T = TypeVar("T")
R = TypeVar("R")

MAX_ITEMS_PER_TASK = 16
TARGET_TASK_S = 0.05  # duration of a task, from which its number of items is computed
PRELOADED_MODULES = [  # imported once instead of in each process: this module, readers, the programs' modules, the
    # formats that Pillow tries first, and pandas, which Arrow imports with its first array
    *(__name__, "stages.media.image", "stages.media.video", "stages.discovery.item_reader"),
    *("stages.encoding.member_reader", "stages.discovery.sources.folder", "stages.discovery.media_table"),
    *("stages.encoding.stage", "PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin"),
    *("PIL.PngImagePlugin", "PIL.PpmImagePlugin", "pandas"),
]
#: Libraries of data sources and of Ray's workers. A library is preloaded only if the program itself has imported it,
#: because its import may take a second or two.
SOURCE_LIBRARIES = ["datasets", "obstore", "aiohttp", "ray"]
MAX_INLINE_BYTES = 1 << 20  # largest size of arrays that return through the pipe; larger arrays use a file
SHARED_MEMORY_FOLDER = "/dev/shm"  # files in memory
FOLDER_PREFIX = "latentpress-"  # prefix of the folders of results, followed by the owner's process id
STALE_FOLDER_S = 3600.0  # a folder whose owner was killed is removed after this time
MAX_QUEUED_PER_PROCESS = 3  # tasks, so that no process has to wait for a task
READY_SUFFIX = ".ready"  # suffix of the file that a process creates once it has started
KILL_GRACE_S = 2.0  # time between the alarm and the kill by this program
START_TIMEOUT_S = 10.0
MESSAGE_TIMEOUT_S, MAX_IDLE_DEATHS = 1.0, 10  # wait for a dead process' message; consecutive deaths without a task
OUT_OF_MEMORY_EXIT_CODE = 77
CONSTS.sleep_unit = 0.02  # seconds until pebble notices a dead process, or that it should stop; 0.1 by default

_ADVICE = {
    "decoder-died": "replace it with a new copy, or remove it",
    "timed-out": "replace it with a new copy, or raise stages.item_timeout_s",
    "out-of-memory": "scale it down, or raise stages.item_memory_mib",
}


@dataclass(frozen=True)
class WorkerFailure:
    """Takes the place of an item's result. reason: decoder-died | timed-out | out-of-memory."""

    reason: str
    problem: str

    def error(self, path: str | os.PathLike[str]) -> MediaError:
        """The failure as an error about the file `path`."""
        return MediaError(self.reason, path, self.problem, _ADVICE[self.reason])


class _PoolManager(PoolManager):
    """Waits for the message that a task has begun. If a process dies while no task is known to have begun, pebble's
    manager breaks the pool and leaves tasks unfinished. This also happens if an item crashes at once, before this
    message has been read."""

    idle_deaths = 0

    def find_expired_task(self, worker_id: int) -> Task:
        end = time.monotonic() + MESSAGE_TIMEOUT_S
        while time.monotonic() < end:
            with suppress(LookupError, BrokenProcessPool):
                task, self.idle_deaths = super().find_expired_task(worker_id), 0
                return task
            time.sleep(0.005)
        self.idle_deaths += 1
        if self.idle_deaths > MAX_IDLE_DEATHS:
            raise BrokenProcessPool("processes end as soon as they start")
        raise LookupError(worker_id)  # another process takes its place


class SandboxPool(Generic[T, R]):
    """Runs a function in `workers` other processes, with at most `timeout_s` and `memory_mib` for each item.

    A MediaError that the function raises is returned as the item's result. Any other exception is raised in this
    process, with its traceback.

    make: function that is called once in each process and returns the function to run. It, the items and the results
    must be picklable.
    """

    def __init__(
        self, make: Callable[[], Callable[[T], R]], *, workers: int, timeout_s: float, memory_mib: int
    ) -> None:
        # This process is never forked, because it may have threads that hold locks, or a device.
        context = multiprocessing.get_context("forkserver")
        libraries = [name for name in SOURCE_LIBRARIES if name in sys.modules]
        context.set_forkserver_preload([*PRELOADED_MODULES, *libraries, getattr(make, "func", make).__module__])
        resource_tracker.ensure_running()  # it would unblock signals
        with signals_blocked(signal.SIGINT):  # Ctrl-C reaches the process group; the program ends its processes
            forkserver.ensure_running()
        self._workers, self._timeout, self._memory_mib = workers, timeout_s, memory_mib
        self._task_size = 1  # number of items in the next task
        self._started = False
        _remove_stale_folders()
        parents = (None, SHARED_MEMORY_FOLDER if os.access(SHARED_MEMORY_FOLDER, os.W_OK) else None)
        prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
        disk, memory = (tempfile.TemporaryDirectory(prefix=prefix, dir=parent) for parent in parents)
        arguments = (make, memory_mib << 20, timeout_s, disk.name, memory.name)
        self._pool = ProcessPool(max_workers=workers, context=context, initializer=_init_process, initargs=arguments)
        self._pool._pool_manager = _PoolManager(self._pool._context, context)
        self._tasks: weakref.WeakSet[Future] = weakref.WeakSet()
        self._shut_down = partial(_shut_down, self._pool, (disk, memory), workers, self._tasks)
        self._finalizer = weakref.finalize(self, _shut_down_forgotten, self._shut_down)

    @classmethod
    def configured(cls, make: Callable[[], Callable[[T], R]], workers: int, limits: Stages) -> "SandboxPool[T, R]":
        """A pool with the time and memory limits of the configuration."""
        return cls(make, workers=workers, timeout_s=limits.item_timeout_s, memory_mib=limits.item_memory_mib)

    def __enter__(self) -> "SandboxPool[T, R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process at once. Code that waits for a result gets CancelledError or, if pebble is just reading the
        result, BrokenProcessPool. This also happens when the object is no longer referenced."""
        if self._finalizer.detach():
            self._shut_down()

    def __call__(self, item: T) -> R | WorkerFailure | MediaError:
        return self.result(item, self.begin(item))

    def begin(self, item: T) -> Future:
        """Queue an item; `result` waits for its result. Can be called from any thread."""
        return self._begin([item])

    def result(self, item: T, task: Future) -> R | WorkerFailure | MediaError:
        [(_, result)] = self._results([item], task)
        return result

    def map(self, items: Iterable[T]) -> Iterator[tuple[T, R | WorkerFailure | MediaError]]:
        """Yield each item and its result, in the order of the items. A few items are read ahead."""
        remaining = iter(items)
        tasks: deque[tuple[list[T], Future]] = deque()
        try:
            while batch := list(islice(remaining, self._task_size)):
                tasks.append((batch, self._begin(batch)))
                if len(tasks) > MAX_QUEUED_PER_PROCESS * self._workers:
                    yield from self._results(*tasks.popleft())
            while tasks:
                yield from self._results(*tasks.popleft())
        finally:
            for _, task in tasks:
                task.cancel()

    def _begin(self, items: Sequence[T]) -> Future:
        # pebble's timeout comes after the alarm, for a process that is suspended and does not receive the alarm.
        timeout = self._timeout * len(items) + KILL_GRACE_S
        if not self._started:
            with ThreadPoolExecutor(1) as starter:  # an interrupt must not leave a partly started process
                starter.submit(lambda: self._pool.active).result()
            self._started = True
        task = self._pool.schedule(_run_task, args=(list(items),), timeout=timeout)
        self._tasks.add(task)
        return task

    def _results(self, items: Sequence[T], task: Future) -> Iterator[tuple[T, R | WorkerFailure | MediaError]]:
        try:
            pickled, seconds = wait_for(task)
        except (TimeoutError, ProcessExpired) as error:
            if len(items) == 1:
                yield items[0], self._failure(error)
                return
            for item in items:
                yield from self._results([item], self._begin([item]))
        else:
            per_item = max(seconds / len(items), 1e-6)
            self._task_size = max(1, min(MAX_ITEMS_PER_TASK, round(TARGET_TASK_S / per_item)))
            yield from zip(items, _unpickle_results(pickled), strict=True)

    def _failure(self, error: TimeoutError | ProcessExpired) -> WorkerFailure:
        if isinstance(error, TimeoutError) or error.exitcode == -signal.SIGALRM:
            return WorkerFailure("timed-out", f"took longer than {self._timeout:g} s to read")
        code = error.exitcode
        if code == OUT_OF_MEMORY_EXIT_CODE:
            return WorkerFailure("out-of-memory", f"takes more than {self._memory_mib} MiB of memory to read")
        cause = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return WorkerFailure("decoder-died", f"can't be read: its decoder crashed ({cause}{hint})")


def _remove_stale_folders() -> None:
    """Remove folders with results that were never read because their owner was killed."""
    for parent in {Path(SHARED_MEMORY_FOLDER), Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
            owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
            with suppress(FileNotFoundError):
                stale = time.time() - folder.stat().st_mtime > STALE_FOLDER_S
                if stale and owner.isdigit() and not find_process_start(int(owner)):
                    shutil.rmtree(folder, ignore_errors=True)


def _shut_down(
    pool: ProcessPool, folders: tuple[tempfile.TemporaryDirectory, ...], workers: int, tasks: Iterable[Future]
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    started = Path(folders[0].name)
    # Wait until all processes have started, because a process that is ended while it starts prints a traceback.
    while pool.active and len(list(started.glob(f"*{READY_SUFFIX}"))) < workers and time.monotonic() < deadline:
        time.sleep(0.005)
    pool.stop()
    pool.join()
    for task in list(tasks):
        task.cancel()  # has no effect if the task is done
    for folder in folders:
        folder.cleanup()


def _shut_down_forgotten(shut_down: Callable[[], None]) -> None:
    """Shut down a pool that is no longer referenced. Garbage may be collected in any thread, even a thread of the pool,
    which can't wait for its own end."""
    if threading.current_thread() is threading.main_thread():  # including at exit, when no thread can be started
        shut_down()
    else:
        threading.Thread(target=shut_down).start()


_make: Callable[[], Callable[[Any], Any]]
_memory: int
_timeout: float
_folders: tuple[str, str]


def _init_process(
    make: Callable[[], Callable[[Any], Any]], memory: int, timeout: float, disk: str, memory_folder: str
) -> None:
    """Set up a new process of the pool."""
    global _make, _memory, _timeout, _folders
    _make, _memory, _timeout, _folders = make, memory, timeout, (memory_folder, disk)
    Path(disk, f"{os.getpid()}{READY_SUFFIX}").touch()
    os.dup2(2, 1)  # standard output is for the program's report
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@cache
def _process_function() -> Callable[[Any], Any]:
    """The function to run, created once per process. After that, the process may take `_memory` bytes more than it
    already has.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS would also count libraries, reserved arenas and mapped files,
    which are independent of the item.
    """
    function = _make()
    try:
        used_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux
        used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used_bytes + _memory if hard == resource.RLIM_INFINITY else min(used_bytes + _memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return function


@dataclass(frozen=True)
class _OutOfBandResult:
    """A pickle whose arrays are stored in a file. path: the file, in which the arrays follow each other. sizes: size of
    each array, in bytes."""

    data: bytes
    path: Path
    sizes: list[int]


def _run_task(items: list[Any]) -> tuple[bytes | _OutOfBandResult, float]:
    """Return the pickled results, and the time that they took in seconds."""
    start = time.monotonic()
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps([_run_item(item) for item in items], protocol=5, buffer_callback=arrays.append)
    sizes = [array.raw().nbytes for array in arrays]
    if sum(sizes) <= MAX_INLINE_BYTES:
        return pickle.dumps(pickle.loads(data, buffers=arrays), protocol=5), time.monotonic() - start
    try:
        path = _write_arrays(arrays, _folders[0])
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        path = _write_arrays(arrays, _folders[1])
    return _OutOfBandResult(data, path, sizes), time.monotonic() - start


def _write_arrays(arrays: Sequence[pickle.PickleBuffer], folder: str) -> Path:
    """Write the arrays' bytes to a new file and return its path."""
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        with open(handle, "wb") as file:
            file.writelines(array.raw() for array in arrays)
    except OSError:
        os.unlink(name)
        raise
    return Path(name)


def _unpickle_results(pickled: bytes | _OutOfBandResult) -> list[Any]:
    """The results. Large arrays are views of the file, which is unlinked here and freed together with the arrays."""
    if isinstance(pickled, bytes):
        return pickle.loads(pickled)
    with pickled.path.open("rb") as file:
        pickled.path.unlink()
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    ends = list(accumulate(pickled.sizes, initial=0))
    return pickle.loads(pickled.data, buffers=[view[start:end] for start, end in pairwise(ends)])


def _run_item(item: Any) -> Any:
    function = _process_function()
    signal.setitimer(signal.ITIMER_REAL, _timeout)
    try:
        return function(item)
    except MediaError as error:
        if error.reason != "out-of-memory":
            return error
    except MemoryError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    os._exit(OUT_OF_MEMORY_EXIT_CODE)  # the next item would fail if a library kept this memory
