"""What the encoding stages' workers share: units read ahead, encoded by batches, and written behind, a shard each."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache import plans
from cache.plans import Unit
from cache.rejects import make_reject, read_undamaged, write_rejects
from cache.shard import RejectedMember, ShardMeta, ShardRow, ShardWriter, TruncatedText
from cache.shard_io import open_writer
from cache.store import Store
from schemas.errors import LatentpressError
from stages.discovery import missing_media
from stages.discovery.media_locations import MediaLocations
from stages.encoding import member_reader, model_loading
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.prefetcher import NextUnit, Prefetcher
from stages.encoding.stage import reject_folder
from stages.engines.jobs import Job, UnitResult
from stages.engines.sandbox import SandboxPool
from stages.media.errors import MediaError

AdvanceProgress = Callable[[int], None]
PreparedMembers = Iterable[tuple[str, Any | MediaError]]
PREFETCH_BYTES = 1 << 30  # of what is read ahead, where the configuration gives no number of members
MAX_PREFETCH = 64  # members, likewise


class UnitWorker(ABC):
    """Loaded once in a process. A stage says what a member is, what fits in a batch, and how one is encoded."""

    stage: str
    kind: str
    section: str  # of the configuration
    tensors: tuple[str, ...]
    precision: str
    batch_limit_option: str  # the option of that section which says what a batch may cost
    advice = "use a larger card or --device cpu"  # where not even one member fits into memory

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.batch_limit: int = getattr(getattr(self.config, self.section), self.batch_limit_option)
        self.store = Store(job.config.root)
        self.plan = plans.load_plan(self.store, job.generation)
        self.places = MediaLocations(self.config, self.plan)
        self.device = model_loading.select_device(job.resources, job.process_index)
        self.provenance = model_loading.runtime_provenance(job.resources, self.device)

    @abstractmethod
    def read_request(self, name: str) -> ReadRequest | None:
        """What is read of files for the member `name`; None for nothing. MediaError: it is set aside."""

    @abstractmethod
    def prepare(self, name: str, read: MemberPixels | None) -> Any:
        """The member, ready to be encoded; called in a thread of its own. MediaError: it is set aside."""

    @abstractmethod
    def cost(self, batch: list[Any]) -> int:
        """What a batch of these members costs, in the unit of `batch_limit`."""

    def indivisible(self, batch: list[Any], limit: int) -> bool:
        """Whether nothing smaller than this batch can be tried."""
        return len(batch) == 1

    @abstractmethod
    def encode(self, names: list[str], batch: list[Any], limit: int) -> Iterable[ShardRow]:
        """A row for each member. limit: of a forward pass' cost, which one member alone may exceed."""

    def member_bytes(self, unit: Unit) -> int:
        """Memory that a member of this unit takes when it has been read."""
        return 1

    def remarks(self, row: ShardRow) -> Iterable[str]:
        """What the report counts this row as; nothing for most."""
        return ()

    def prefetch_count(self, unit: Unit) -> int:
        """How many members of this unit are read ahead, where the configuration gives no number."""
        return max(2, min(MAX_PREFETCH, PREFETCH_BYTES // self.member_bytes(unit)))

    def run_units(self, take: NextUnit, advance: AdvanceProgress) -> Iterator[UnitResult]:
        """Make the shards of the units that `take` gives. While one is encoded the next is read and the last is
        written, so the outcome of a unit comes after the next one was encoded, unless there is none to take."""
        try:
            with ThreadPoolExecutor(1, "write") as writing, self._ahead(take) as ahead:
                try:
                    yield from self._outcomes(ahead, writing, advance)
                except BaseException:  # nobody waits for a decoder that hangs
                    if processes := self.__dict__.pop("_processes", None):
                        processes.close()
                    raise
        finally:
            self.store.discard_all_temps()

    def _outcomes(
        self, ahead: Prefetcher, writing: ThreadPoolExecutor, advance: AdvanceProgress
    ) -> Iterator[UnitResult]:
        behind: Future[UnitResult] | None = None
        while True:
            unit = ahead.next_unit(wait=behind is None)
            if unit is None and behind is None:
                return
            made = self._encode(unit, ahead, advance) if unit is not None else None
            try:
                if behind is not None:
                    yield behind.result()
            except BaseException:
                if made is not None:
                    made.drop()
                raise
            behind = writing.submit(made.finish) if made is not None else None

    def _ahead(self, take: NextUnit) -> Prefetcher:
        return Prefetcher(
            take, wanted=self.read_request, prepare=self.prepare, depth=self._depth, processes=lambda: self._processes
        )

    @cached_property
    def _processes(self) -> SandboxPool[ReadRequest, MemberPixels]:
        """Processes of their own that decode: one that crashes or hangs costs its item and not this process."""
        limits = self.config.stages
        return SandboxPool(
            member_reader.make_member_reader,
            workers=self.job.resources.readers_per_worker,
            timeout_s=limits.item_timeout_s,
            memory_mib=limits.item_memory_mib,
        )

    def _depth(self, unit: Unit) -> int:
        return self.job.resources.prefetch or self.prefetch_count(unit)

    def _encode(self, unit: Unit, ahead: Prefetcher, advance: AdvanceProgress) -> "_UnitShard":
        """Encode a unit; its shard, to be written. Out of memory, the whole unit starts again at half the batch; the
        next one does not, since what a shard holds is not to depend on what was done before."""
        limit, counted = self.batch_limit, 0

        def count(n: int) -> None:
            nonlocal counted
            counted += n
            advance(n)

        read: Callable[[], PreparedMembers] = lambda: ahead.members(unit)  # noqa: E731
        while True:
            shard = _UnitShard(self, unit, limit)
            try:
                self._rows(shard, read(), count)
                if shard.has_missing_files:
                    self._require_media(unit)
                return shard
            except BaseException as error:
                shard.drop()
                if not model_loading.is_out_of_memory(error):
                    raise
                if shard.indivisible:
                    problem = str(error).strip().partition("\n")[0]
                    raise LatentpressError(f"out of memory at a batch of one: {problem}", self.advice) from error
            model_loading.release_memory()  # here, where no traceback holds what the batch was made of
            if limit == self.batch_limit:
                ahead.skip(unit)
            limit = max(1, min(limit, shard.cost) // 2)
            advance(-counted)
            counted = 0
            read = lambda: ahead.reread(unit)  # noqa: E731

    def _require_media(self, unit: Unit) -> None:
        """Stop rather than publish a shard without members whose files are missing, where most files are."""
        some = pa.array(missing_media.spread_evenly(pa.array(unit.members, pa.string())))
        wanted = self.plan.active_text_ids if self.kind == "text" else self.plan.active_sample_ids
        tried = wanted.filter(pc.is_in(wanted, value_set=some)).to_pylist()
        missing_media.require_media(self.places, self.kind, {*self.job.probed_members, *tried})

    def _rows(self, shard: "_UnitShard", read: PreparedMembers, advance: AdvanceProgress) -> None:
        for names, batch in shard.batches(read, advance):
            for row in self.encode(names, batch, shard.limit):
                shard.add(row)
            advance(len(batch))


class _UnitShard:
    """One unit's shard in the making. cost: of the last batch; indivisible: whether that was as small as can be."""

    def __init__(self, worker: UnitWorker, unit: Unit, limit: int) -> None:
        """limit: of a batch's cost; the shard records it."""
        self._worker, self._unit, self.limit = worker, unit, limit
        self._aside: list[dict] = []
        self._remarks: Counter[str] = Counter()
        self._encoded = self._bytes = self.cost = 0
        self.indivisible = False
        job = worker.job
        self._meta = ShardMeta(
            kind=worker.kind,
            fingerprint=job.fingerprint,
            unit=unit.unit_id,
            bucket=unit.bucket,
            ids=list(unit.members),
            provenance={**worker.provenance, "batch": limit},
        )
        stem = f"{worker.kind}/{job.fingerprint}/{unit.unit_id}"
        columns = dict.fromkeys(worker.tensors, worker.precision)
        self._writer: ShardWriter = open_writer(worker.store, stem, self._meta, columns, worker.config.cache.format)
        self._writer.__enter__()

    def batches(self, read: PreparedMembers, advance: AdvanceProgress) -> Iterator[tuple[list[str], list[Any]]]:
        """Members in the unit's order, as many to a batch as the limit allows; what can't be read goes aside."""
        names: list[str] = []
        batch: list[Any] = []
        for name, item in read:
            if isinstance(item, MediaError):
                self._set_aside(name, item.path, item.reason, str(item), item.reason in ("missing", "changed"))
                advance(1)
                continue
            if batch and self._worker.cost([*batch, item]) > self.limit:
                yield self._record_batch(names, batch)
                names, batch = [], []
            names.append(name)
            batch.append(item)
        if batch:
            yield self._record_batch(names, batch)

    def _record_batch(self, names: list[str], batch: list[Any]) -> tuple[list[str], list[Any]]:
        self.cost, self.indivisible = self._worker.cost(batch), self._worker.indivisible(batch, self.limit)
        return names, batch

    def add(self, row: ShardRow) -> None:
        """Take a row; one with NaN or infinities goes aside."""
        bad = [name for name, array in row.tensors.items() if not array.is_finite()]
        if bad:
            what = f"the encoder gave NaN or infinite numbers ({', '.join(bad)}) at precision {self._worker.precision}"
            message = f"{row.id}: {what}. Choose {self._worker.section}.precision: float32"
            self._set_aside(row.id, "", "not-finite", message, False)
            return
        self._writer.add(row)
        tokens, kept = row.info.get("tokens", 0), row.info.get("kept", 0)
        if tokens > kept:
            self._meta.truncated.append(TruncatedText(row.id, tokens, kept))
        self._remarks.update(self._worker.remarks(row))
        self._encoded += 1
        self._bytes += sum(array.nbytes for array in row.tensors.values())

    @property
    def has_missing_files(self) -> bool:
        return any(member["reason"] == "missing" for member in self._aside)

    def _set_aside(self, name: str, path: str, reason: str, message: str, retry: bool) -> None:
        self._aside.append(make_reject(self._worker.stage, name, path, reason, message, retry))

    def finish(self) -> UnitResult:
        """Write the shard under its final name."""
        worker, unit = self._worker, self._unit.unit_id
        try:
            for member in self._aside:
                self._writer.set_aside(RejectedMember(member["item"], member["reason"], member["message"]))
            folder = reject_folder(worker.stage, worker.job.fingerprint)
            again = {member["item"] for member in self._aside}
            before = read_undamaged(worker.store, folder, unit)
            if again:
                # Before the shard, which says "done", and with what stood there, some of which may be mended now:
                # killed in between, nothing has left the lists.
                mended = [row for row in before if row["item"] not in again]
                write_rejects(worker.store, folder, unit, [*self._aside, *mended])
            path = self._writer.finish()
        finally:
            self.drop()
        truncated, usual, smaller = tuple(self._meta.truncated), worker.batch_limit, ""
        if self.limit < usual:
            smaller = (
                f"it fits with {worker.section}.{worker.batch_limit_option}: {self.limit}, which saves trying {usual}"
            )
        aside, remarks = tuple(self._aside), dict(self._remarks)
        return UnitResult(unit, path, self._encoded, self._bytes, aside, truncated, smaller, remarks=remarks)

    def drop(self) -> None:
        """Leave nothing behind of what was not finished."""
        self._writer.__exit__(None, None, None)
