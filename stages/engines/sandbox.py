"""Work that may crash, hang or eat memory, in processes of its own: a decoder that dies takes one item with it.

    with Isolated(partial(Reader, dataset), workers=4, timeout_s=300, memory_mib=8192) as isolated:
        for item, found in isolated.map(items):
            ...

The processes are pebble's, which replaces one that died. An alarm that the system keeps ends one whose item takes too
long, also when the program that waits for it was killed. Quick items go to them
several at a time, since a task costs a sixth of a millisecond; those of a task that came to nothing are tried again one
by one, and the one that it happens to again is lost. Decoded clips come back in shared memory, without a copy here, or
through files where that is full: a pipe of Python's takes seconds for 100 MB.
"""

import errno
import mmap
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from pebble import CONSTS, ProcessExpired, ProcessPool

from stages.media.errors import MediaError

T = TypeVar("T")
R = TypeVar("R")

MAX_ITEMS_PER_TASK = 16  # items of one task at most
TARGET_TASK_S = 0.05  # that a task should take
PRELOADED_MODULES = [  # imported once, not by each process: what readers need, what the programs' modules import, and
    # pandas, which comes with Arrow's first array
    *(
        "stages.media.image",
        "stages.media.video",
        "stages.discovery.item_reader",
        "stages.encoding.member_reader",
        "stages.discovery.sources.folder",
    ),
    *("PIL.JpegImagePlugin", "PIL.PngImagePlugin", "stages.discovery.media_table", "stages.encoding.stage", "pandas"),
]
MAX_INLINE_BYTES = 1 << 20  # bytes of results' arrays that go through a file
SHARED_MEMORY_FOLDER = "/dev/shm"  # files in memory
FOLDER_PREFIX = "latentpress-"  # of the folders of results; the number of the process that owns one follows
STALE_FOLDER_S = 3600.0  # after which a folder whose owner was killed is removed
MAX_QUEUED_PER_PROCESS = 3  # tasks that are begun for each process, so that none waits
READY_SUFFIX = ".ready"  # ends the name of a file that says that a process has started
KILL_GRACE_S = 2.0  # between the alarm and the end that this program puts to a task
START_TIMEOUT_S = 10.0  # that a process may take to start
OUT_OF_MEMORY_EXIT_CODE = 77  # exit code of a process that gave up for want of memory
CONSTS.sleep_unit = 0.02  # seconds until pebble sees that a process died, or that it should stop; 0.1 by default

_ADVICE = {
    "decoder-died": "replace it with a copy written anew, or remove it",
    "timed-out": "replace it with a copy written anew, or raise stages.item_timeout_s",
    "out-of-memory": "scale it down, or raise stages.item_memory_mib",
}


@dataclass(frozen=True)
class WorkerFailure:
    """What becomes of an item instead of a result. reason: decoder-died | timed-out | out-of-memory."""

    reason: str
    problem: str

    def error(self, path: str | os.PathLike[str]) -> MediaError:
        """The same as an error about the file `path`."""
        return MediaError(self.reason, path, self.problem, _ADVICE[self.reason])


class SandboxPool(Generic[T, R]):
    """A function that runs in `workers` other processes, given at most `timeout_s` and `memory_mib` an item.

    make: called once in each process, gives the function; picklable, and so are items and results. A MediaError that
    the function raises is a result like any other. Anything else it raises is raised here, with its traceback.
    """

    def __init__(
        self, make: Callable[[], Callable[[T], R]], *, workers: int, timeout_s: float, memory_mib: int
    ) -> None:
        # Never a fork of this process: it may have threads, which hold locks, or a device.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED_MODULES, _defining_module(make)])
        self._workers, self._timeout, self._memory_mib = workers, timeout_s, memory_mib
        self._size = 1  # of the next task
        _remove_stale_folders()
        places = (None, SHARED_MEMORY_FOLDER if os.access(SHARED_MEMORY_FOLDER, os.W_OK) else None)
        folder, shared = (
            tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=place) for place in places
        )
        given = (make, memory_mib << 20, timeout_s, folder.name, shared.name)
        self._pool = ProcessPool(max_workers=workers, context=context, initializer=_init_process, initargs=given)
        self._tasks: weakref.WeakSet[Future] = weakref.WeakSet()
        self._stop = weakref.finalize(self, _shut_down, self._pool, (folder, shared), workers, self._tasks)

    def __enter__(self) -> "SandboxPool[T, R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process, whatever it is doing; who waits for a result is told CancelledError. Happens by itself
        when this object is no longer used."""
        self._stop()

    def __call__(self, item: T) -> R | WorkerFailure | MediaError:
        return self.result(item, self.begin(item))

    def begin(self, item: T) -> Future:
        """Put an item to the processes; `result` waits for what becomes of it. For any thread."""
        return self._begin([item])

    def result(self, item: T, begun: Future) -> R | WorkerFailure | MediaError:
        [(_, result)] = self._results([item], begun)
        return result

    def map(self, items: Iterable[T]) -> Iterator[tuple[T, R | WorkerFailure | MediaError]]:
        """Each item and what became of it, in the order of the items, which are taken a few ahead."""
        coming = iter(items)
        begun: deque[tuple[list[T], Future]] = deque()
        try:
            while part := list(islice(coming, self._size)):
                begun.append((part, self._begin(part)))
                if len(begun) > MAX_QUEUED_PER_PROCESS * self._workers:
                    yield from self._results(*begun.popleft())
            while begun:
                yield from self._results(*begun.popleft())
        finally:
            for _, task in begun:
                task.cancel()

    def _begin(self, part: Sequence[T]) -> Future:
        # Behind the alarm, for a process that is stopped and can't be woken.
        task = self._pool.schedule(_run_task, args=(list(part),), timeout=self._timeout * len(part) + KILL_GRACE_S)
        self._tasks.add(task)
        return task

    def _results(self, part: Sequence[T], task: Future) -> Iterator[tuple[T, R | WorkerFailure | MediaError]]:
        try:
            found, seconds = task.result()
        except (TimeoutError, ProcessExpired) as error:
            if len(part) == 1:
                yield part[0], self._lost(error)
                return
            for item in part:
                yield from self._results([item], self._begin([item]))
        else:
            self._size = max(1, min(MAX_ITEMS_PER_TASK, round(TARGET_TASK_S / max(seconds / len(part), 1e-6))))
            yield from zip(part, _unpickle_results(found), strict=True)

    def _lost(self, error: TimeoutError | ProcessExpired) -> WorkerFailure:
        if isinstance(error, TimeoutError) or error.exitcode == -signal.SIGALRM:
            return WorkerFailure("timed-out", f"took longer than {self._timeout:g} s to read")
        if error.exitcode == OUT_OF_MEMORY_EXIT_CODE:
            return WorkerFailure("out-of-memory", f"takes more than {self._memory_mib} MiB of memory to read")
        return WorkerFailure("decoder-died", f"can't be read: its decoder crashed ({_describe_exit(error.exitcode)})")


def _defining_module(make: Callable[[], Any]) -> str:
    return getattr(make, "func", make).__module__


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    hint = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
    return signal.Signals(-code).name + hint


def _remove_stale_folders() -> None:
    """Give back the memory of results that nobody fetched, since their owner was killed."""
    places = {Path(SHARED_MEMORY_FOLDER), Path(tempfile.gettempdir())}
    for folder in (folder for place in places for folder in place.glob(f"{FOLDER_PREFIX}*-*")):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(FileNotFoundError):
            old = time.time() - folder.stat().st_mtime > STALE_FOLDER_S
            if old and owner.isdigit() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _shut_down(
    pool: ProcessPool, folders: tuple[tempfile.TemporaryDirectory, ...], workers: int, tasks: Iterable[Future]
) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    # One that is ended while it starts prints a traceback.
    while (
        pool.active and len(list(Path(folders[0].name).glob(f"*{READY_SUFFIX}"))) < workers and time.monotonic() < until
    ):
        time.sleep(0.005)
    pool.stop()
    pool.join()
    for task in list(tasks):
        task.cancel()  # of no effect on one that is done
    for folder in folders:
        folder.cleanup()


_make: Callable[[], Callable[[Any], Any]]
_memory: int
_timeout: float
_folders: tuple[str, str]


def _init_process(
    make: Callable[[], Callable[[Any], Any]], memory: int, timeout: float, folder: str, shared: str
) -> None:
    """In a new process."""
    global _make, _memory, _timeout, _folders
    _make, _memory, _timeout, _folders = make, memory, timeout, (shared, folder)
    Path(folder, f"{os.getpid()}{READY_SUFFIX}").touch()
    os.dup2(2, 1)  # standard output belongs to the program's report
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole group; the program ends its processes


@cache
def _process_function() -> Callable[[Any], Any]:
    """The function, made once in a process, which from then on may take `_memory` bytes more than it has.

    RLIMIT_DATA counts private memory that can be written to. RLIMIT_AS would count libraries, reserved arenas and
    files that are mapped as well, which have nothing to do with an item.
    """
    work = _make()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_segment_bytes() + _memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return work


@dataclass(frozen=True)
class _OutOfBandResult:
    """A pickle whose arrays lie in a file, one after the other, each as long as `sizes` says."""

    data: bytes
    path: Path
    sizes: list[int]


def _run_task(items: list[Any]) -> tuple[bytes | _OutOfBandResult, float]:
    """The results, and the seconds that they took."""
    began = time.monotonic()
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps([_run_item(item) for item in items], protocol=5, buffer_callback=arrays.append)
    if sum(array.raw().nbytes for array in arrays) <= MAX_INLINE_BYTES:
        return pickle.dumps(pickle.loads(data, buffers=arrays), protocol=5), time.monotonic() - began
    sizes = [array.raw().nbytes for array in arrays]
    try:
        path = _write_arrays(arrays, _folders[0])
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        path = _write_arrays(arrays, _folders[1])
    return _OutOfBandResult(data, path, sizes), time.monotonic() - began


def _write_arrays(arrays: Sequence[pickle.PickleBuffer], folder: str) -> Path:
    """A new file with the arrays' bytes."""
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        with open(handle, "wb") as file:
            for array in arrays:
                file.write(array.raw())
    except OSError:
        os.unlink(name)
        raise
    return Path(name)


def _unpickle_results(found: bytes | _OutOfBandResult) -> list[Any]:
    """The results; large arrays are views into the file, which has no name any more and ends with them."""
    if isinstance(found, bytes):
        return pickle.loads(found)
    with found.path.open("rb") as file:
        found.path.unlink()
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    ends = list(accumulate(found.sizes, initial=0))
    return pickle.loads(found.data, buffers=[view[start:end] for start, end in pairwise(ends)])


def _run_item(item: Any) -> Any:
    work = _process_function()
    signal.setitimer(signal.ITIMER_REAL, _timeout)
    try:
        return work(item)
    except MediaError as error:
        if error.reason != "out-of-memory":
            return error
    except MemoryError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    os._exit(OUT_OF_MEMORY_EXIT_CODE)  # what a library did not give back would fail the next item


def _data_segment_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except FileNotFoundError:  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
