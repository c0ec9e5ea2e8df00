"""Shards of a remote set as whole copies on this machine: fetched before a step needs them, verified, and removed when
others need the room.

Threads fetch what `cache.supply.limited_folder` says. Each copy is verified whole by this process before it is used,
whoever fetched it; a damaged one is fetched again, up to ANSWERS times in all. Damage that stays is in the store:
reading the row says so, as it does where the set is local.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

from cache.shards.shard import BaseShardReader
from cache.shards.shard_supply import LimitedShards, SupplyError
from cache.store.damage import ANSWERS, note_bad_answer
from cache.store.files import StoreError
from cache.supply.limited_folder import ShardQueue
from cache.supply.remote_shards import ShardCopies
from cache.supply.step_needs import StepNeeds

STEPS_AT_A_TIME = 16  # read from the plan before the next shard is fetched
LOOK_AGAIN_S, LONGEST_SLEEP_S = 0.05, 1.0  # after which a thread looks again: while a reader waits, and otherwise
LONGEST_END_S = 5.0
GIVE_UP_S = 600.0  # without room that other processes could make


class FetchedShards(LimitedShards):
    """A ShardSupply of a remote set. threads: that fetch at the same time."""

    def __init__(self, copies: ShardCopies, threads: int) -> None:
        super().__init__()
        member = copies.folder.join(secrets.token_hex(8))
        assert member is not None
        self._copies, self._count, self._threads = copies, threads, list[threading.Thread]()
        names, sizes = [shard.name for shard in copies.shards], [shard.bytes for shard in copies.shards]
        self._work = threading.Condition(self._lock)  # the threads wait for something to do
        self._plan: Iterator[Collection[int]] | None = None
        self._needs = StepNeeds()
        self._here, self._coming = set[int](), set[int]()  # verified; threads are at them
        self._errors: dict[int, BaseException] = {}
        self._plan_error: BaseException | None = None
        self._look_at = 0.0  # nothing can be fetched until then, or until something changes
        self._counted = Counter[str]()
        self._queue = ShardQueue(copies.folder, member, names, sizes, self._let_go)

    # -- what readers call ---------------------------------------------------------------------------------------------

    def follow(self, first: int, needs: Iterator[Collection[int]]) -> None:
        with self._lock:
            self._plan, self._needs, self._plan_error = needs, StepNeeds(first), None
            self._start()

    def finished(self, step: int) -> None:
        with self._lock:
            self._needs.finish(step)
            self._start()

    def _start(self) -> None:
        """Let a thread look whether there is something to fetch."""
        while len(self._threads) < self._count and not self._closed:
            self._threads.append(threading.Thread(target=self._fetch_until_closed, name="fetch-shards", daemon=True))
            self._threads[-1].start()
        self._look_at = 0.0
        self._work.notify()

    def _is_here(self, number: int) -> bool:
        return number in self._here

    def _open(self, number: int) -> BaseShardReader:
        return self._copies.open(number)

    def _wait_for(self, number: int) -> None:
        began = time.monotonic()
        self._errors.pop(number, None)  # of a time when nobody waited: the store may be well again
        if not self._copies.shards[number].bytes:
            raise self._copies.missing(number)
        self._start()
        try:
            with self._copies.show_fetching([number], self._here):
                while number not in self._here:
                    self._changed.wait(LONGEST_SLEEP_S)
                    self._check_hope(number, time.monotonic() - began)
        finally:
            self._counted["wait_ms"] += round(1e3 * (time.monotonic() - began))

    def _check_hope(self, number: int, waited_s: float) -> None:
        """Raise why a shard that a reader waits for can't come."""
        if number in self._errors:
            raise self._errors[number]
        if self._plan_error is not None and number not in self._needs:
            raise self._plan_error
        if self._closed:
            raise SupplyError("the local cache of shards was closed", "Start the program again.")
        size = self._needs.next_bytes(self._queue.sizes, 1, [number])
        if (number in self._needs.now or number not in self._needs) and size > self._queue.share:
            raise self._no_room(f"the shards of step {self._needs.first + 1} have {size / 1e9:.3g} GB")
        if waited_s > GIVE_UP_S and number not in self._coming:
            raise self._no_room(f"for {GIVE_UP_S:.0f} s other processes left no room, or fetched the same shard")

    def _no_room(self, what: str) -> SupplyError:
        limit, share = self._copies.folder.limit / 1e9, self._queue.share / 1e9
        return SupplyError(
            f"train.local_cache.max_gb ({limit:.3g}, for this process {share:.3g}) is too little: {what}",
            "Raise it; or let a step need fewer shards, by a lower train.batch_size or train.accumulate, or by "
            "train.shuffle_shards.",
        )

    def _discard(self, number: int) -> None:
        self._here.discard(number)
        self._copies.discard(number)

    def _tell_removed(self, number: int) -> None:
        """Also of a copy that another process threw away."""
        with self._lock:
            self._here.discard(number)
            self._queue.member.held.discard(self._queue.names[number])
            self._start()
        super()._tell_removed(number)

    def _let_go(self, number: int) -> None:
        self._here.discard(number)
        super()._tell_removed(number)

    def metrics(self) -> dict[str, float]:
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return {
            "shards_fetched": counted["fetched"],
            "shards_fetched_mb": round(counted["bytes"] / 1e6, 3),
            "shards_found": counted["found"],
            "shards_wait_s": counted["wait_ms"] / 1e3,
        }

    def show_wait(self) -> AbstractContextManager[object]:
        with self._lock:
            needed = [number for number in {*self._needs.now, *self._wanted} if number not in self._here]
        return self._copies.show_fetching(needed, self._here)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            self._work.notify_all()
        end = time.monotonic() + LONGEST_END_S
        for thread in self._threads:  # a copy on its way ends with the process, and is begun again by the next
            thread.join(max(0.0, end - time.monotonic()))
        for number in list(self._here):
            self._let_go(number)
        self._copies.folder.leave(self._queue.member)

    # -- what the threads do -------------------------------------------------------------------------------------------

    def _fetch_until_closed(self) -> None:
        while not self._closed:
            with self._lock:
                self._read_plan()
                if (number := self._choose()) is None:
                    if self._plan is None or self._needs.is_full:
                        self._work.wait(max(0.0, self._look_at - time.monotonic()))
                    continue
                self._coming.add(number)
                self._work.notify()  # there may be more
            error: BaseException | None = None
            sound = False
            try:
                sound = self._get(number)
            except BaseException as raised:  # raised where the shard is opened
                error = raised
            with self._lock:
                self._coming.discard(number)
                try:
                    self._queue.end(number, held=sound)
                except StoreError as raised:
                    sound, error = False, error or raised
                if sound:
                    self._here.add(number)
                elif error is not None:
                    self._errors[number] = error
                self._look_at = 0.0
                self._changed.notify_all()

    def _read_plan(self) -> None:
        """Read a few steps more of the plan, where there are more. What it raises is raised where a shard is opened."""
        end = self._needs.end + STEPS_AT_A_TIME
        try:
            while self._plan is not None and self._needs.end < end and not self._needs.is_full:
                self._needs.add(next(self._plan))
                self._look_at = 0.0
        except StopIteration:
            self._plan = None
        except BaseException as error:
            self._plan, self._plan_error = None, error
            self._changed.notify_all()

    def _choose(self) -> int | None:
        now = time.monotonic()
        if now < self._look_at or self._closed:
            return None

        def is_missing(number: int) -> bool:
            known = number in self._here or number in self._coming or number in self._errors
            return not known and self._copies.shards[number].bytes > 0

        wanted = [number for number in self._wanted if self._copies.shards[number].bytes]
        number = None
        try:
            number = self._queue.next(self._needs, wanted, is_missing)
        except StoreError as error:  # the folder can't be written to: raised where a shard is opened
            self._errors |= dict.fromkeys(wanted, error)
            self._changed.notify_all()
        if number is None:
            self._look_at = now + (LOOK_AGAIN_S if any(map(is_missing, wanted)) else LONGEST_SLEEP_S)
        return number

    def _get(self, number: int) -> bool:
        """Fetch a shard that was begun, or take the copy that is there; whether it may be used. One that is damaged is
        thrown away, ANSWERS - 1 times."""
        if self._queue.names[number] in self._queue.member.held:
            self._counted["found"] += 1
        else:
            self._copies.fetch(number)
            self._counted += Counter(fetched=1, bytes=self._queue.sizes[number])
        damage = self._copies.find_damage(number)
        if damage is None or self._replaced[number] >= ANSWERS - 1:
            return True
        note_bad_answer(damage.path, damage)
        self._replaced[number] += 1
        self._copies.discard(number)
        return False
