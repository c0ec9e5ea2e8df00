"""Reading ahead: while a batch is encoded, the members that come next are read and prepared, in the units' order.

Files are decoded in processes of their own (stages/engines/sandbox.py); one thread makes of each what the encoder
takes. How many members are on their way is bounded, so memory is too. Members that follow each other and read the same
(texts with one image) share the reading.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from cache.plans import Unit
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.errors import MediaError

#: The next unit of this process' part; None where there is none: yet, or with True, which waits, any more.
NextUnit = Callable[[bool], Unit | None]


class Prefetcher:
    """Members of the units that `take` gives.

    wanted: what is read for a member, None for nothing. prepare: makes of it what the encoder takes, or raises
    MediaError. depth: how many members of a unit may be on their way. processes: the readers; made when first needed.
    """

    def __init__(
        self,
        take: NextUnit,
        *,
        wanted: Callable[[str], ReadRequest | None],
        prepare: Callable[[str, MemberPixels | None], Any],
        depth: Callable[[Unit], int],
        processes: Callable[[], SandboxPool[ReadRequest, MemberPixels]],
    ) -> None:
        self._take, self._wanted, self._prepare = take, wanted, prepare
        self._depth, self._processes = depth, processes
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._units: deque[Unit] = deque()  # begun, the first of them being encoded
        self._begun: deque[tuple[Unit, str, Future]] = deque()
        self._remaining_members: Iterator[str] | None = None  # members of the last unit that are not begun
        self._current_depth = 0  # of the last unit
        self._reading: _PendingRead | None = None  # begun last

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def next_unit(self, wait: bool) -> Unit | None:
        """The unit to encode now, when the last one's members have been taken; None as `take` says."""
        self._fill(wait)
        return self._units[0] if self._units else None

    def members(self, unit: Unit) -> Iterator[tuple[str, Any | MediaError]]:
        """Each member of the unit that `next_unit` gave, in order: prepared, or why it can't be used."""
        assert self._units and self._units[0] is unit
        for _ in unit.members:
            self._fill(False)
            of, name, item = self._begun.popleft()
            assert of is unit
            yield name, _result_or_error(item)
        self._units.popleft()

    def reread(self, unit: Unit) -> Iterator[tuple[str, Any | MediaError]]:
        """The same members once more, with nothing read ahead."""
        for name in unit.members:
            yield name, _result_or_error(self._begin(name))

    def skip(self, unit: Unit) -> None:
        """Give up what is left of the unit that `next_unit` gave."""
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
            wanted = self._wanted(name)
        except MediaError as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed
        if wanted is None:
            return self._thread.submit(self._prepare, name, None)
        if self._reading is None or not self._reading.reads_same(wanted):
            self._reading = _PendingRead(self._processes(), wanted)
        return self._thread.submit(_prepare_when_read, self._reading, partial(self._prepare, name))


class _PendingRead:
    """Files that are being read, for one member or for several that follow each other."""

    def __init__(self, processes: SandboxPool[ReadRequest, MemberPixels], wanted: ReadRequest) -> None:
        self._processes, self._wanted = processes, wanted
        self._begun = processes.begin(wanted)

    def reads_same(self, wanted: ReadRequest) -> bool:
        return _with_path_names(wanted) == _with_path_names(self._wanted)

    @cached_property
    def result(self) -> MemberPixels | MediaError:
        """Waits for it. A result can be taken once, so it is kept."""
        found = self._processes.result(self._wanted, self._begun)
        return found.error(self._wanted.files[0][0]) if isinstance(found, WorkerFailure) else found


def _with_path_names(wanted: ReadRequest) -> ReadRequest:
    """With names for files: one member of an archive may be asked for by two objects."""
    return replace(wanted, files=tuple((os.fspath(path), content) for path, content in wanted.files))


def _prepare_when_read(reading: _PendingRead, prepare: Callable[[MemberPixels | None], Any]) -> Any:
    found = reading.result
    if isinstance(found, MediaError):
        raise found
    return prepare(found)


def _result_or_error(item: Future) -> Any | MediaError:
    try:
        return item.result()
    except MediaError as error:
        return error
