"""Shards of a remote set as whole copies on this machine: fetched before a step needs them, verified, and removed when
others need the room.

Threads fetch what is needed first among what is not here, as long as there is room: a copy gives way only to one that
is needed earlier, and of all copies the one that is needed last gives way first (Belady 1966), where what no step in
sight needs counts as last of all. Each copy is verified whole by this process before it is used, whoever fetched it;
a damaged one is fetched again, up to ANSWERS times in all. Damage that stays is in the store: reading the row says so,
as it does where the set is local.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager

from cache.shards.shard import BaseShardReader
from cache.store.bad_answers import ANSWERS, note_bad_answer
from cache.supply.copy_folder import CopyIsBusy, HeldCopy, StartedCopy
from cache.supply.held_copies import HeldCopies
from cache.supply.remote_shards import LocalCacheError, ShardCopies
from cache.supply.step_needs import StepNeeds

MOST_STEPS, MOST_ENTRIES = 4096, 1 << 17  # in sight: steps, and shards of all of them together
STEPS_AT_A_TIME = 16  # read from the plan before the next shard is fetched
LOOK_AGAIN_S = 0.05  # after which a shard is tried again that could not be had
LONGEST_SLEEP_S = 1.0
LONGEST_END_S = 5.0
MOST_SKIPPED = 8  # of shards that were tried a moment ago
GIVE_UP_S = 600.0  # without room that other processes could make


class LocalShards:
    """A ShardSupply of a remote set. threads: that fetch at the same time."""

    local = True

    def __init__(self, copies: ShardCopies, threads: int) -> None:
        self._copies = copies
        self._numbers = {shard.name: number for number, shard in enumerate(copies.shards) if shard.bytes}
        self._threads, self._count = list[threading.Thread](), threads
        self._changed = threading.Condition(threading.RLock())
        self._planning = threading.Lock()
        self._plan: Iterator[Collection[int]] | None = None
        self._needs = StepNeeds()
        self._held = HeldCopies()
        self._coming = set[int]()  # threads are at them
        self._wanted = Counter[int]()  # readers wait for them
        self._opening = Counter[int]()  # copies that are not to be removed for a moment
        self._errors: dict[int, BaseException] = {}
        self._plan_error: BaseException | None = None
        self._tried: dict[int, float] = {}  # when
        self._full_until = 0.0  # there is no room for what nobody waits for, until then or until a step is finished
        self._stuck: dict[int, float] = {}  # since when a reader waits in vain
        self._replaced = Counter[int]()  # fetched again because of damage
        self._counted = Counter[str]()
        self._closed = False

    # -- what readers call ---------------------------------------------------------------------------------------------

    def follow(self, first: int, needs: Iterator[Collection[int]]) -> None:
        with self._planning, self._changed:
            self._plan, self._needs, self._plan_error = needs, StepNeeds(first), None
            for number in list(self._held):
                self._held.let_go(number)
            self._start_threads()
            self._changed.notify_all()

    def open(self, number: int) -> BaseShardReader:
        began = time.monotonic()
        with self._changed:
            self._start_threads()
            self._errors.pop(number, None)  # of a time when nobody waited: the store may be well again
            self._tried.pop(number, None)
            self._wanted[number] += 1
            self._opening[number] += 1
            self._changed.notify_all()
            try:
                with self._copies.show_fetching([number], self._held):
                    while number not in self._held:
                        self._changed.wait()
                        if number in self._errors:
                            raise self._errors[number]
                        if self._plan_error is not None and number not in self._needs:
                            raise self._plan_error
                        if self._closed:
                            raise LocalCacheError("the local cache of shards was closed", "Start the program again.")
            except BaseException:
                self._done_opening(number)
                raise
            finally:
                self._wanted -= Counter([number])
                self._counted["wait_ms"] += round(1e3 * (time.monotonic() - began))
        try:
            return self._copies.open(number)
        finally:
            with self._changed:
                self._done_opening(number)

    def _done_opening(self, number: int) -> None:
        self._opening -= Counter([number])
        if number not in self._needs and number not in self._opening:
            self._held.let_go(number)

    def finished(self, step: int) -> None:
        with self._changed:
            self._full_until = 0.0
            self._tried.clear()
            for number in self._needs.finish(step):
                if number not in self._opening:
                    self._held.let_go(number)
            self._changed.notify_all()

    def damaged(self, number: int) -> bool:
        with self._changed:
            if number in self._replaced:
                return False
            if copy := self._held.get(number) or self._copies.folder.hold(self._copies.shards[number].name):
                self._discard(number, copy)
            return True

    def on_removal(self, forget: Callable[[int], None]) -> None:
        with self._changed:
            self._held.listeners.append(forget)

    def metrics(self) -> dict[str, float]:
        with self._changed:
            counted, self._counted = self._counted, Counter()
        return {
            "shards_fetched": counted["fetched"],
            "shards_fetched_mb": round(counted["bytes"] / 1e6, 3),
            "shards_found": counted["found"],
            "shards_wait_s": counted["wait_ms"] / 1e3,
        }

    def show_wait(self) -> AbstractContextManager[object]:
        with self._changed:
            needed = [number for number in {*self._needs.now, *self._wanted} if number not in self._held]
        return self._copies.show_fetching(needed, self._held)

    def stop_waiting(self) -> None:
        pass  # a wait ends when its shard is here, or by an error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + LONGEST_END_S
        for thread in self._threads:  # a copy on its way ends with the process, and is begun again by the next
            thread.join(max(0.0, end - time.monotonic()))
        for number in list(self._held):
            self._held.let_go(number)
        self._copies.folder.close()

    # -- what the threads do -------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        while len(self._threads) < self._count and not self._closed:
            self._threads.append(threading.Thread(target=self._work, name="fetch-shards", daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        while not self._closed:
            advanced = self._look_ahead()
            with self._changed:
                number, again = self._choose()
                if number is None:
                    if not advanced:
                        self._changed.wait(LOOK_AGAIN_S if again else LONGEST_SLEEP_S)
                        self._keep_to_share(0, self._needs.first)  # there may be more processes now
                    continue
                self._coming.add(number)
            error: BaseException | None = None
            try:
                self._get(number)
            except BaseException as raised:  # raised where the shard is opened
                error = raised
            with self._changed:
                self._coming.discard(number)
                if error is not None:
                    self._errors[number] = error
                if number not in self._held:
                    self._needs.put_back(number)
                self._changed.notify_all()

    def _look_ahead(self) -> bool:
        """Read a few steps more of the plan; False where none is to be read, or another thread is at it."""
        if not self._planning.acquire(blocking=False):
            return False
        try:
            needs = self._needs
            for _ in range(STEPS_AT_A_TIME):
                if self._plan is None or needs.end - needs.first >= MOST_STEPS or needs.entries >= MOST_ENTRIES:
                    return False
                numbers = next(self._plan, None)
                with self._changed:
                    if numbers is None:
                        self._plan = None
                    else:
                        needs.add(numbers)
                    self._changed.notify_all()
            return True
        except BaseException as error:  # raised where a shard is opened
            with self._changed:
                self._plan, self._plan_error = None, error
                self._changed.notify_all()
            return False
        finally:
            self._planning.release()

    def _choose(self) -> tuple[int | None, bool]:
        """The shard to get next: what a reader waits for, by its step, else what is needed first, unless there was no
        room just now. And whether there are others that were tried a moment ago."""
        now, skipped, chosen = time.monotonic(), list[int](), None

        def is_possible(number: int) -> bool:
            return number not in self._errors and now - self._tried.get(number, -1e9) >= LOOK_AGAIN_S

        missing = [number for number in self._wanted if number not in self._held and number not in self._coming]
        if waiting := [number for number in missing if is_possible(number)]:
            return min(waiting, key=self._urgency), True
        while chosen is None and len(skipped) < MOST_SKIPPED and now >= self._full_until:
            if (number := self._needs.take()) is None:
                break
            if number in self._held or number in self._coming:
                continue
            if is_possible(number):
                chosen = number
            else:
                skipped.append(number)
        for number in skipped:
            self._needs.put_back(number)
        return chosen, bool(missing or skipped)

    def _urgency(self, number: int) -> int:
        """The step that a shard is for. What no step was said to need is for the one that is read now."""
        need = self._needs.next_need(number)
        return self._needs.first if need is None else need

    def _get(self, number: int) -> None:
        """Hold a verified copy, unless there is no room yet or another process is at it."""
        shard = self._copies.shards[number]
        if not shard.bytes:
            raise self._copies.missing(number)
        while True:
            with self._changed:
                self._tried[number] = time.monotonic()
                if self._closed or (number not in self._needs and number not in self._wanted):
                    return
                try:
                    got = self._start(number)
                    if got is None and number not in self._wanted:
                        self._full_until = time.monotonic() + LONGEST_SLEEP_S
                except CopyIsBusy:
                    got = None
                if got is None:
                    self._check_hope(number)
                    return
            copy = self._copies.fetch(number, got) if isinstance(got, StartedCopy) else got
            damage = self._copies.find_damage(number, copy)
            with self._changed:
                self._stuck.pop(number, None)
                if copy is got:
                    self._counted["found"] += 1
                else:
                    self._counted += Counter(fetched=1, bytes=shard.bytes)
                if damage is not None and self._replaced[number] < ANSWERS - 1:
                    note_bad_answer(damage.path, damage)
                    self._discard(number, copy)
                    continue
                self._held[number] = copy
                if number not in self._needs and number not in self._opening:
                    self._held.let_go(number)
                return

    def _start(self, number: int) -> StartedCopy | HeldCopy | None:
        """The copy of a shard, or the beginning of one; None where there is no room."""
        shard = self._copies.shards[number]
        if not self._keep_to_share(shard.bytes, self._gives_way(number)):
            return None
        needed = {self._copies.shards[each].name for each in (*self._needs, *self._held, *self._opening)}
        got, removed = self._copies.folder.start(shard.name, shard.bytes, needed, self._expendable(number))
        for name in removed:
            if (gone := self._numbers.get(name)) is not None:
                self._held.tell_listeners(gone)
                self._needs.put_back(gone)
        return got

    def _check_hope(self, number: int) -> None:
        """LocalCacheError where a reader waits for a shard for which there can't be room, or was none for too long."""
        if number not in self._wanted:
            return
        first, size = self._needs.first, self._copies.size_of({*self._needs.now, number})
        if self._urgency(number) == first and size > self._copies.folder.share():
            raise self._no_room(f"the shards of step {first + 1} have {size / 1e9:.3g} GB")
        began = self._stuck.setdefault(number, time.monotonic())
        if time.monotonic() - began > GIVE_UP_S:
            del self._stuck[number]
            raise self._no_room(f"for {GIVE_UP_S:.0f} s other processes left no room, or fetched the same shard")

    def _expendable(self, number: int) -> Iterator[str]:
        """Copies that may give way to a shard, the last needed first; each is let go of before it is given."""
        for each in self._needs.later_than(self._gives_way(number), list(self._needs)):
            if each not in self._opening and each not in self._coming:
                if each in self._held:
                    self._held.let_go(each)
                    self._needs.put_back(each)
                yield self._copies.shards[each].name

    def _gives_way(self, number: int) -> int:
        """The step after which copies are needed that may give way to a shard. Where a reader waits, all but those of
        the first step: the reader may be beside the plan, as at a validation, and no step goes on until it is done.
        Otherwise twice as far from now as its own step: something better may become free."""
        first = self._needs.first
        return first if number in self._wanted else 2 * self._urgency(number) - first

    def _keep_to_share(self, size: int, step: int) -> bool:
        """Let go of what is needed last, later than `step`, until this process may hold `size` bytes more; False where
        that is not enough."""
        share = self._copies.folder.share() - size
        held = self._copies.size_of(self._held) + self._copies.size_of(self._coming) - size
        most = self._held.most - (size > 0)
        if held <= share and len(self._held) <= most:
            return True
        for number in self._needs.later_than(step, list(self._held)):
            if number not in self._opening:
                held -= self._copies.shards[number].bytes
                self._held.let_go(number)
                self._needs.put_back(number)
            if held <= share and len(self._held) <= most:
                return True
        return False

    def _discard(self, number: int, copy: HeldCopy) -> None:
        """Throw a damaged copy away, to be fetched again."""
        self._replaced[number] += 1
        self._copies.discard(number, copy)
        self._held[number] = copy
        self._held.let_go(number)
        self._needs.put_back(number)

    def _no_room(self, what: str) -> LocalCacheError:
        limit, share = self._copies.folder.limit / 1e9, self._copies.folder.share() / 1e9
        return LocalCacheError(
            f"train.local_cache.max_gb ({limit:.3g}, for this process {share:.3g}) is too little: {what}",
            "Raise it; or let a step need fewer shards, by a lower train.batch_size or train.accumulate, or by "
            "train.shuffle_shards.",
        )
