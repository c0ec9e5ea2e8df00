"""Reading ahead: while a batch is encoded, the next members are read and prepared, in the units' order.

Files are decoded in other processes (stages/engines/sandbox.py); one thread prepares each member for the encoder. The
number of members in progress is bounded, and so is memory. Successive members with the same request (texts with one
image) share its result.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cache.sets.plans import Unit
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.errors import MediaError

#: The next unit of this process. None: there is none yet or, for an argument of True, which waits, no more.
NextUnit = Callable[[bool], Unit | None]


class Prefetcher:
    """Members of the units that `take` gives.

    read_request: the files to read for a member, None for none. prepare: prepares it for the encoder, or raises
    MediaError. depth: how many members of a unit may be in progress. processes: the readers; made when first needed.
    """

    def __init__(
        self,
        take: NextUnit,
        *,
        read_request: Callable[[str], ReadRequest | None],
        prepare: Callable[[str, MemberPixels | None], Any],
        depth: Callable[[Unit], int],
        processes: Callable[[], SandboxPool[ReadRequest, MemberPixels]],
    ) -> None:
        self._take, self._read_request, self._prepare = take, read_request, prepare
        self._depth, self._processes = depth, processes
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._units: deque[Unit] = deque()  # begun; the first is being encoded
        self._begun: deque[tuple[Unit, str, Future]] = deque()
        self._remaining_members: Iterator[str] | None = None  # of the last unit, not begun
        self._current_depth = 0  # of the last unit
        self._last_read: tuple[ReadRequest, Future[MemberPixels]] | None = None

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def next_unit(self, wait: bool) -> Unit | None:
        """The unit to encode now, once the last one's members have been taken; None as from `take`."""
        self._fill(wait)
        return self._units[0] if self._units else None

    def members(self, unit: Unit) -> Iterator[tuple[str, Any | MediaError]]:
        """Each member of the unit that `next_unit` gave, in order: prepared, or its MediaError."""
        assert self._units and self._units[0] is unit
        for _ in unit.members:
            self._fill(False)
            owner, name, item = self._begun.popleft()
            assert owner is unit
            yield name, _result_or_error(item)
        self._units.popleft()

    def reread(self, unit: Unit) -> Iterator[tuple[str, Any | MediaError]]:
        """The same members again, with nothing read ahead."""
        for name in unit.members:
            yield name, _result_or_error(self._begin(name))

    def skip(self, unit: Unit) -> None:
        """Drop the rest of the unit that `next_unit` gave."""
        while self._begun and self._begun[0][0] is unit:
            self._begun.popleft()
        if self._units and self._units[0] is unit:
            self._remaining_members = self._remaining_members if len(self._units) > 1 else None
            self._units.popleft()

    def _fill(self, wait: bool) -> None:
        while not self._units or len(self._begun) < self._current_depth:
            name = next(self._remaining_members, None) if self._remaining_members is not None else None
            if name is not None:
                self._begun.append((self._units[-1], name, self._begin(name)))
                continue
            unit = self._take(wait and not self._units)
            if unit is None:
                return
            self._units.append(unit)
            self._remaining_members, self._current_depth = iter(unit.members), self._depth(unit)

    def _begin(self, name: str) -> Future:
        try:
            request = self._read_request(name)
        except MediaError as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed
        if request is None:
            return self._thread.submit(self._prepare, name, None)
        # Compared with names for files: one member of an archive may be requested by two objects.
        named = replace(request, files=tuple((os.fspath(path), media_id) for path, media_id in request.files))
        if self._last_read is None or self._last_read[0] != named:
            processes = self._processes()
            self._last_read = named, self._thread.submit(_wait_for, processes, request, processes.begin(request))
        read = self._last_read[1]  # done when its members' turn comes, as the thread takes one after another
        return self._thread.submit(lambda: self._prepare(name, read.result()))


def _wait_for(processes: SandboxPool[ReadRequest, MemberPixels], request: ReadRequest, task: Future) -> MemberPixels:
    """Raises MediaError."""
    result = processes.result(request, task)
    if isinstance(result, WorkerFailure):
        raise result.error(request.files[0][0])
    if isinstance(result, MediaError):
        raise result
    return result


def _result_or_error(item: Future) -> Any | MediaError:
    try:
        return item.result()
    except MediaError as error:
        return error
