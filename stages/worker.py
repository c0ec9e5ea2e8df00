"""What the encoding stages' workers share: units read ahead, encoded by batches, and written behind, a shard each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from cache import generations
from cache.generations import Unit
from cache.rejects import read_one, reject, write
from cache.shard import Row, SetAside, ShardMeta, ShardWriter, writer
from cache.store import Store
from stages import loading
from stages.ahead import Ahead, Take
from stages.engines.isolated import Isolated
from stages.media import members
from stages.media.errors import MediaError
from stages.media.members import Read, Wanted
from stages.stage import Job, Outcome, reject_folder

Advance = Callable[[int], None]
Members = Iterable[tuple[str, Any | MediaError]]
AHEAD_BYTES = 1 << 30  # of what is read ahead, where the configuration gives no number of members
MOST_AHEAD = 64  # members, likewise


class UnitWorker(ABC):
    """Loaded once in a process. A stage says what a member is, what fits in a batch, and how one is encoded."""

    stage: str
    kind: str
    section: str  # of the configuration
    tensors: tuple[str, ...]
    precision: str
    batch_limit: int  # of whatever `cost` counts
    advice = "use a larger card or --device cpu"  # where not even one member fits into memory

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.store = Store(job.config.root)
        self.plan = generations.load(self.store, job.generation)
        self.device = loading.device(job.resources)
        self.provenance = loading.provenance(job.resources, self.device)

    @abstractmethod
    def wanted(self, name: str) -> Wanted | None:
        """What is read of files for the member `name`; None for nothing. MediaError: it is set aside."""

    @abstractmethod
    def prepare(self, name: str, read: Read | None) -> Any:
        """The member, ready to be encoded; called in a thread of its own. MediaError: it is set aside."""

    @abstractmethod
    def cost(self, batch: list[Any]) -> int:
        """What a batch of these members costs, in the unit of `batch_limit`."""

    @abstractmethod
    def encode(self, names: list[str], batch: list[Any]) -> Iterable[Row]:
        """One forward pass: a row for each member."""

    def member_bytes(self, unit: Unit) -> int:
        """Memory that a member of this unit takes when it has been read."""
        return 1

    def run_units(self, take: Take, advance: Advance) -> Iterator[Outcome]:
        """Make the shards of the units that `take` gives. While one is encoded the next is read and the last is
        written, so the outcome of a unit comes after the next one was encoded, unless there is none to take."""
        with ThreadPoolExecutor(1, "write") as writing, self._ahead(take) as ahead:
            try:
                yield from self._outcomes(ahead, writing, advance)
            except BaseException:  # nobody waits for a decoder that hangs
                if processes := self.__dict__.pop("_processes", None):
                    processes.close()
                raise

    def _outcomes(self, ahead: Ahead, writing: ThreadPoolExecutor, advance: Advance) -> Iterator[Outcome]:
        behind: Future[Outcome] | None = None
        while True:
            unit = ahead.next_unit(wait=behind is None)
            if unit is None and behind is None:
                return
            made = self._encode(unit, ahead, advance) if unit is not None else None
            if behind is not None:
                yield behind.result()
            behind = writing.submit(made) if made is not None else None

    def _ahead(self, take: Take) -> Ahead:
        return Ahead(
            take, wanted=self.wanted, prepare=self.prepare, depth=self._depth, processes=lambda: self._processes
        )

    @cached_property
    def _processes(self) -> Isolated[Wanted, Read]:
        """Processes of their own that decode: one that crashes or hangs costs its item and not this process."""
        limits = self.config.stages
        return Isolated(
            members.reader,
            workers=self.job.resources.reading,
            timeout_s=limits.item_timeout_s,
            memory_mib=limits.item_memory_mib,
        )

    def _depth(self, unit: Unit) -> int:
        given = self.job.resources.prefetch
        return given or max(2, min(MOST_AHEAD, AHEAD_BYTES // self.member_bytes(unit)))

    def _encode(self, unit: Unit, ahead: Ahead, advance: Advance) -> Callable[[], Outcome]:
        """Encode a unit; what writes its shard. Out of memory, the whole unit starts again at half the batch."""
        limit, counted = self.batch_limit, 0

        def count(n: int) -> None:
            nonlocal counted
            counted += n
            advance(n)

        read: Callable[[], Members] = lambda: ahead.members(unit)  # noqa: E731
        while True:
            shard = _Shard(self, unit, limit)
            try:
                self._rows(shard, read(), count)
                return shard.finish
            except BaseException as error:
                shard.drop()
                if not loading.out_of_memory(error):
                    raise
                loading.require_smaller(error, shard.batch, self.advice)
            if limit == self.batch_limit:
                ahead.skip(unit)
            limit = max(1, min(limit, shard.cost) // 2)
            advance(-counted)
            counted = 0
            read = lambda: ahead.again(unit)  # noqa: E731

    def _rows(self, shard: "_Shard", read: Members, advance: Advance) -> None:
        for names, batch in shard.batches(read, advance):
            for row in self.encode(names, batch):
                shard.add(row)
            advance(len(batch))


class _Shard:
    """One unit's shard in the making. batch, cost: members of the last batch, and what it costs."""

    def __init__(self, worker: UnitWorker, unit: Unit, limit: int) -> None:
        """limit: of a batch's cost; the shard records it."""
        self._worker, self._unit, self._limit = worker, unit, limit
        self._aside: list[dict] = []
        self._encoded = self._bytes = self.batch = self.cost = 0
        job = worker.job
        meta = ShardMeta(
            kind=worker.kind,
            fingerprint=job.fingerprint,
            unit=unit.unit_id,
            bucket=unit.bucket,
            ids=list(unit.members),
            provenance={**worker.provenance, "batch": limit},
        )
        stem = f"{worker.kind}/{job.fingerprint}/{unit.unit_id}"
        columns = dict.fromkeys(worker.tensors, worker.precision)
        self._writer: ShardWriter = writer(worker.store, stem, meta, columns, worker.config.cache.format)
        self._writer.__enter__()

    def batches(self, read: Members, advance: Advance) -> Iterator[tuple[list[str], list[Any]]]:
        """Members in the unit's order, as many to a batch as the limit allows; what can't be read goes aside."""
        names: list[str] = []
        batch: list[Any] = []
        for name, item in read:
            if isinstance(item, MediaError):
                self._set_aside(name, item.path, item.reason, str(item), item.reason in ("missing", "changed"))
                advance(1)
                continue
            if batch and self._worker.cost([*batch, item]) > self._limit:
                yield self._noted(names, batch)
                names, batch = [], []
            names.append(name)
            batch.append(item)
        if batch:
            yield self._noted(names, batch)

    def _noted(self, names: list[str], batch: list[Any]) -> tuple[list[str], list[Any]]:
        self.batch, self.cost = len(batch), self._worker.cost(batch)
        return names, batch

    def add(self, row: Row) -> None:
        """Take a row; one with NaN or infinities goes aside."""
        bad = [name for name, array in row.tensors.items() if not array.finite()]
        if bad:
            what = f"the encoder gave NaN or infinite numbers ({', '.join(bad)}) at precision {self._worker.precision}"
            message = f"{row.id}: {what}. Choose {self._worker.section}.precision: float32"
            self._set_aside(row.id, "", "not-finite", message, False)
            return
        self._writer.add(row)
        self._encoded += 1
        self._bytes += sum(array.nbytes for array in row.tensors.values())

    def _set_aside(self, name: str, path: str, reason: str, message: str, retry: bool) -> None:
        self._aside.append(reject(self._worker.stage, name, path, reason, message, retry))

    def finish(self) -> Outcome:
        """Write the shard under its final name."""
        worker, unit = self._worker, self._unit.unit_id
        try:
            for member in self._aside:
                self._writer.set_aside(SetAside(member["item"], member["reason"], member["message"]))
            folder = reject_folder(worker.stage, worker.job.fingerprint)
            again = {member["item"] for member in self._aside}
            before = read_one(worker.store, folder, unit).to_pylist()
            if again:
                # Before the shard, which says "done", and with what stood there, some of which may be mended now:
                # killed in between, nothing has left the lists.
                mended = [row for row in before if row["item"] not in again]
                write(worker.store, folder, unit, [*self._aside, *mended])
            path = self._writer.finish()
        finally:
            self.drop()
        return Outcome(unit, path, self._encoded, self._bytes, tuple(self._aside))

    def drop(self) -> None:
        """Leave nothing behind of what was not finished."""
        self._writer.__exit__(None, None, None)
