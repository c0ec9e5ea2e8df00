"""Ranks that die or hang: found by the others in bounded time, and named.

It begins right after the process group, so loading is watched as training is. Each rank has a thread that writes to a
TCPStore, every second or so, how often its main thread has moved on and what it is doing. Rank 0 reads all of them,
the others rank 0's. A rank that has written nothing, or not moved on, for train.parallel.timeout seconds ends the run
on every rank; of several that wait, the one that is behind is named. A rank that fails writes why, so that the others
can say more than that a connection was closed.

torch's own means are not enough: a collective operation ends after its group's timeout without naming a rank, and
torch.distributed.monitored_barrier, which does, works with gloo only.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.checkpoint.api import CheckpointException

from schemas.cli.console import Console
from schemas.config.pipeline import PACKAGES
from schemas.errors import INCOMPLETE, LatentpressError

ROOT = PACKAGES[0].parent
#: How long a rank that lost a connection waits to learn which other one was the cause, and how long one that did not
#: goes on after another has failed: it may fail for the same reason, and says more of it.
ANSWER_S = 15.0
STORE_TIMEOUT = timedelta(seconds=30)
HINT = "Start training again: it goes on from the last checkpoint."


class RankLostError(LatentpressError):
    """A rank ended or stopped answering."""


class RankWatch:
    """One rank's part. `note` is called by its main thread; without other ranks nothing else happens."""

    def __init__(self, accelerator: Accelerator, console: Console, timeout: float, store: Store | None = None) -> None:
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        self._console, self._timeout = console, timeout
        self._interval = min(1.0, timeout / 10)
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._count, self._doing, self._moved = 0, "preparing", time.monotonic()
        self._written = 0
        #: rank -> its last record, and when that was first seen here
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._failed: dict[int, float] = {}  # rank -> when its failure was first seen here
        if self.ranks > 1:
            assert store is not None
            self._shared_store = store  # rank 0 may serve it, as long as it exists
            # With a connection of its own: one that waits lets nobody else ask.
            self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
            self._store.set_timeout(STORE_TIMEOUT)
            self._write()
            accelerator.wait_for_everyone()
            self._heard = time.monotonic()  # when the store last answered
            for work in (self._run, self._watch_store):
                threading.Thread(target=work, name="rank-watch", daemon=True).start()

    def note(self, doing: str | None = None, *, alone: bool = False) -> None:
        """The main thread has moved on, to `doing` if that is given. All ranks call it equally often. alone: in work
        that ranks do in turns or at different speeds: it is not counted, as it puts none ahead of the others."""
        self._count, self._moved = self._count + (not alone), time.monotonic()
        self._doing = doing or self._doing

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """The other ranks learn of an error of the body. RankLostError in place of one that another rank has caused."""
        try:
            try:
                yield
            except CheckpointException as error:  # torch.distributed.checkpoint: the errors of some ranks, on all
                rank, (cause, _) = min(error.failures.items(), key=lambda item: (item[0] != self.rank, item[0]))
                if rank == self.rank:
                    raise cause from error
                raise RankLostError(f"{self._name(rank)} failed: {describe_error(cause)}", HINT) from error
        except BaseException as error:
            if self.ranks > 1 and not isinstance(error, RankLostError):
                self._fail(error)
            self._ended.set()
            raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body trains to the end; see `sharing_errors`. After it other ranks may end."""
        with self.sharing_errors():
            yield
        self._ended.set()

    def _fail(self, error: BaseException) -> None:
        """Write why this rank fails; if a connection broke, find the rank that broke it and raise RankLostError."""
        broken = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", "" if broken else describe_error(error))
        if broken and (cause := self._find_cause()):
            raise RankLostError(cause, HINT) from error

    def _find_cause(self) -> str | None:
        """Tell what happened to the rank that failed first, after some seconds at most."""
        start, connected = time.monotonic(), set[int]()
        while time.monotonic() - start < ANSWER_S:
            try:
                for rank in set(range(self.ranks)) - {self.rank}:
                    reason = self._read(f"failed/{rank}")
                    if reason:
                        return f"{self._name(rank)} failed: {reason}"
                    connected |= {rank} if reason is not None else set()
                for rank in set(range(self.ranks)) - {self.rank} - connected:
                    if self._silence(rank) > 5 * self._interval:
                        return f"{self._name(rank)} ended without a word at {self._seen[rank][0]['doing']}"
            except RuntimeError:  # it ends with rank 0, or with the launcher on its machine
                return "rank 0 ended without a word"
            time.sleep(self._interval / 4)
        return None

    # --- the thread ---

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._write()
                message = self._read("ended") or self._find_failure() or self._find_problem()
                self._heard = time.monotonic()
            except RuntimeError:
                message = f"{self._describe_store()} can't be reached"
            if message:
                self._end(message)

    def _watch_store(self) -> None:
        """From a machine without power or network nothing comes, not even that a connection is broken: a request to it
        lasts for a quarter of an hour."""
        while not self._ended.wait(self._interval):
            if time.monotonic() - self._heard > self._timeout:
                self._end(f"{self._describe_store()} has not answered for {self._timeout:g} s", tell=False)

    def _describe_store(self) -> str:
        address = (
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, by which the ranks know of each other,"
        )
        if 0 not in self._seen:
            return address
        last = self._seen[0][0]
        return f"rank 0 (process {last['process']} on {last['host']}), last at {last['doing']}, or {address}"

    def _end(self, message: str, tell: bool = True) -> None:
        """End this process, as its main thread may wait for ever. Not after the end, as the others may end first. tell:
        the others."""
        if self._ended.wait(2 * self._interval):
            return
        if tell:
            with suppress(RuntimeError):
                self._store.set("ended", message)
        if self.rank == 0:
            self._console.print_error("train", RankLostError(message, HINT))
            self._console.stdout.flush()
        else:  # its console is silent
            print(f"rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(INCOMPLETE)

    def _write(self) -> None:
        frame, line = sys._current_frames().get(self._main), ""
        while frame is not None and not line:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
                line = f"{path.relative_to(ROOT)}:{frame.f_lineno}"
            frame = frame.f_back
        self._written += 1
        record = {"number": self._written, "count": self._count, "doing": self._doing, "place": line}
        record |= {"still": time.monotonic() - self._moved, "host": socket.gethostname(), "process": os.getpid()}
        self._store.set(f"rank/{self.rank}", json.dumps(record))

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _silence(self, rank: int) -> float:
        """Seconds since the last new record of a rank."""
        record = json.loads(self._store.get(f"rank/{rank}"))
        known = self._seen.get(rank)
        if known is None or known[0]["number"] != record["number"]:
            self._seen[rank] = record, time.monotonic()
        return time.monotonic() - self._seen[rank][1]

    def _name(self, rank: int) -> str:
        record = self._seen[rank][0] if rank in self._seen else json.loads(self._store.get(f"rank/{rank}"))
        return f"rank {rank} (process {record['process']} on {record['host']})"

    def _watched(self) -> list[int]:
        """The ranks that this one looks at."""
        return list(range(self.ranks)) if self.rank == 0 else [0, self.rank]

    def _find_failure(self) -> str | None:
        """Tell which of these failed some seconds ago, while this one's main thread still does not know, as it
        loads."""
        for rank in self._watched():
            reason = self._read(f"failed/{rank}") if rank != self.rank else None
            if reason:
                since = self._failed.setdefault(rank, time.monotonic())
                if time.monotonic() - since > min(ANSWER_S, self._timeout / 2):
                    return f"{self._name(rank)} failed: {reason}"
        return None

    def _find_problem(self) -> str | None:
        """Tell what is wrong with these, if anything is."""
        watched = self._watched()
        silent = [rank for rank in watched if self._silence(rank) > self._timeout]
        if silent:
            return "; ".join(
                f"{self._name(rank)} has not answered for {self._timeout:g} s, last at {self._seen[rank][0]['doing']}"
                for rank in silent
            )
        if self.rank or min(self._seen[rank][0]["still"] for rank in watched) < self._timeout:
            return None
        behind = min(self._seen[rank][0]["count"] for rank in watched)
        hanging = [rank for rank in watched if self._seen[rank][0]["count"] == behind]
        return "; ".join(
            f"{self._name(rank)} has made no progress for {self._timeout:g} s (train.parallel.timeout) at "
            f"{self._seen[rank][0]['doing']}, in {self._seen[rank][0]['place']}"
            for rank in hanging
        )


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
