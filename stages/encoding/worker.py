"""The common part of the encoding stages' workers: units are read ahead, encoded in batches and written as shards."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import plans
from cache.sets.plans import Unit
from cache.sets.rejects import make_reject, read_undamaged, write_rejects
from cache.shards.shard import BaseShardWriter, RejectedMember, ShardMeta, ShardRow, TruncatedText
from cache.shards.shard_io import open_writer
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from schemas.interruption import wait_for
from stages.discovery import media_locations
from stages.discovery.media_locations import MediaLocations
from stages.encoding import member_reader, model_loading
from stages.encoding.member_reader import MemberPixels, NextUnit, Prefetcher, ReadRequest
from stages.encoding.stage_state import reject_folder
from stages.engines.jobs import Job, RoundingError, UnitResult
from stages.engines.sandbox import SandboxPool
from stages.media.files import MediaError


@dataclass(frozen=True)
class RefusedMember:
    """A member that was encoded, and whose result is not kept."""

    id: str
    error: MediaError


AdvanceProgress = Callable[[int], None]
PreparedMembers = Iterable[tuple[str, Any | MediaError]]
PREFETCH_BYTES = 1 << 30  # of members read ahead, where the configuration gives no number of them
MAX_PREFETCH = 64  # members, likewise
#: After the last batch of a unit: none is queued, and the last one's rows follow.
END: list[tuple[list[str], list[Any]]] = [([], [])]


class UnitWorker(ABC):
    """Made once in a process. A subclass defines what a member is, what fits in a batch, and how one is encoded."""

    stage: str
    kind: str
    section: str  # of the configuration
    tensors: tuple[str, ...]
    precision: str
    batch_limit_option: str  # the option of that section that limits a batch's cost
    advice = "use a larger card or --device cpu"  # where a single member does not fit into memory

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.batch_limit: int = getattr(getattr(self.config, self.section), self.batch_limit_option)
        self.store = Store(job.config.root)
        self.plan = plans.load_plan(self.store, job.generation)
        self.locations = MediaLocations(self.config, self.plan)
        self.device = model_loading.select_device(job.resources, job.process_index)
        self.provenance = model_loading.runtime_provenance(job.resources, self.device)

    @abstractmethod
    def read_request(self, name: str) -> ReadRequest | None:
        """The files to read for the member `name`; None for none. MediaError: it is set aside."""

    @abstractmethod
    def prepare(self, name: str, read: MemberPixels | None) -> Any:
        """The member, ready to be encoded; called in another thread. MediaError: it is set aside."""

    @abstractmethod
    def cost(self, batch: list[Any]) -> int:
        """The cost of a batch of these members, in the unit of `batch_limit`."""

    def indivisible(self, batch: list[Any], limit: int) -> bool:
        """Whether no smaller batch can be tried."""
        return len(batch) == 1

    @abstractmethod
    def encode(self, names: list[str], batch: list[Any], limit: int) -> Iterable[ShardRow | RefusedMember]:
        """Queue the batch on the device, without waiting for it. A row for each member, which are taken when the next
        batch is queued: the first one waits for the results. limit: the cost of one forward pass, which a single
        member may exceed."""

    def member_bytes(self, unit: Unit) -> int:
        """Memory of a member of this unit once it is read."""
        return 1

    def pinned_revision(self, revision: str | None) -> str | None:
        """The commit of a model's repository that the fingerprint is of, as its branch may have moved since; without a
        repository `revision`."""
        record = self.store.read_json(f"{self.kind}/{self.job.fingerprint}/provenance.json")
        return record["weights"].get("commit", revision)

    def remarks(self, row: ShardRow) -> Iterable[str]:
        """Remarks that the report counts rows by; none for most rows."""
        return ()

    def rounding(self, row: ShardRow) -> RoundingError:
        """The error of a row's tensors that are stored in fewer bits than they had; called once."""
        return RoundingError()

    def column_dtypes(self) -> dict[str, str]:
        """Tensor of a row -> its dtype."""
        return dict.fromkeys(self.tensors, self.precision)

    def prefetch_count(self, unit: Unit) -> int:
        """How many members of this unit to read ahead, where the configuration gives no number."""
        return max(2, min(MAX_PREFETCH, PREFETCH_BYTES // self.member_bytes(unit)))

    def run_units(self, take: NextUnit, advance: AdvanceProgress) -> Iterator[UnitResult]:
        """Make the shards of the units that `take` gives. While one is encoded, the next is read and the previous one
        written, so a unit's result comes after the next unit was encoded, or at the end."""
        prefetcher = Prefetcher(
            take,
            read_request=self.read_request,
            prepare=self.prepare,
            depth=lambda unit: self.job.resources.prefetch or self.prefetch_count(unit),
            processes=lambda: self._processes,
        )
        with ThreadPoolExecutor(1, "write") as writer, prefetcher:
            is_complete = False
            try:
                yield from self._encode_units(prefetcher, writer, advance)
                is_complete = not self._is_time_up
            finally:  # do not wait for a decoder that hangs, or for members that were read ahead
                if not is_complete and (processes := self.__dict__.pop("_processes", None)):
                    processes.close()

    def _encode_units(
        self, prefetcher: Prefetcher, writer: ThreadPoolExecutor, advance: AdvanceProgress
    ) -> Iterator[UnitResult]:
        written: Future[UnitResult] | None = None  # the shard before, which is being written
        while True:
            unit = None if self._is_time_up else prefetcher.next_unit(wait=written is None)
            if unit is None and written is None:
                return
            shard, found = None, None
            if unit is not None:
                # Asked now and not when it was read ahead: other jobs may have encoded it since.
                found = self.job.find_shard(self.store, self.kind, unit)
                if found is not None:
                    prefetcher.skip(unit)
                else:
                    shard = self._encode(unit, prefetcher, advance)
            try:
                if written is not None:
                    yield wait_for(written)
            except BaseException:
                if shard is not None:
                    shard.drop()
                raise
            written = writer.submit(shard.finish) if shard is not None else None
            if unit is not None and found is not None:
                yield UnitResult(unit.unit_id, found, elsewhere=True)

    @property
    def _is_time_up(self) -> bool:
        return time.monotonic() >= self.job.until

    @cached_property
    def _processes(self) -> SandboxPool[ReadRequest, MemberPixels]:
        """The decoding processes: one that crashes or hangs costs its item and not this process."""
        workers = self.job.resources.readers_per_worker
        return SandboxPool.configured(member_reader.make_member_reader, workers, self.config.stages)

    def _encode(self, unit: Unit, prefetcher: Prefetcher, advance: AdvanceProgress) -> "_UnitShard":
        """Encode a unit; its shard, to be written. If memory runs out, the whole unit starts again at half the batch.
        The next unit has the usual limit again: a shard must not depend on what was encoded before it."""
        limit, read = self.batch_limit, prefetcher.members
        while True:
            shard = _UnitShard(self, unit, limit, advance)
            try:
                shard.encode(read(unit))
                if any(member["reason"] == "missing" for member in shard.rejected):
                    self._require_media(unit)
                return shard
            except BaseException as error:
                shard.drop()
                if not model_loading.is_out_of_memory(error):
                    raise
                if shard.batch and self.indivisible(shard.batch, limit):
                    problem = str(error).strip().partition("\n")[0]
                    raise LatentpressError(f"out of memory at a batch of one: {problem}", self.advice) from error
            if limit == self.batch_limit:
                prefetcher.skip(unit)
            advance(-shard.counted)
            limit, read = max(1, min(limit, self.cost(shard.batch) if shard.batch else 0) // 2), prefetcher.reread
            del shard
            model_loading.release_memory()  # here, where no traceback holds the batch's tensors

    def _require_media(self, unit: Unit) -> None:
        """Stop where most files are missing, rather than publish a shard without their members."""
        some = pa.array(media_locations.spread_evenly(pa.array(unit.members, pa.string())))
        wanted = self.plan.active_text_ids if self.kind == "text" else self.plan.active_sample_ids
        tried = wanted.filter(pc.is_in(wanted, value_set=some)).to_pylist()
        media_locations.require_media(self.locations, self.kind, {*self.job.probed_members, *tried})


class FrameWorker(UnitWorker):
    """Reads of each member its own frames alone, not the source images that its latents are conditioned on. listed_as:
    the kind of members by which their files are found."""

    listed_as = "items"

    def member_bytes(self, unit: Unit) -> int:
        """Return the bytes of the frames as they are read, before they are resized."""
        bucket = Bucket.parse(unit.bucket)
        return 3 * bucket.width * bucket.height * bucket.frames

    def read_request(self, name: str) -> ReadRequest:
        files = tuple(self.locations.planned_files(self.listed_as, name))
        return ReadRequest(files, self.plan.samples[name], None, self.config.latents.decoder)


class _UnitShard:
    """The shard of one unit while it is made. limit: of a batch's cost. rejected: rows of REJECTS_SCHEMA. batch: the
    members in work. counted: members that were reported to `advance`."""

    def __init__(self, worker: UnitWorker, unit: Unit, limit: int, advance: AdvanceProgress) -> None:
        self._worker, self._unit, self.limit, self._advance = worker, unit, limit, advance
        self.rejected: list[dict] = []
        self.batch: list[Any] = []
        self.counted = self._encoded = self._bytes = 0
        self._remarks: Counter[str] = Counter()
        self._rounding = RoundingError()
        job = worker.job
        ids, provenance = list(unit.members), {**worker.provenance, "batch": limit}
        self._meta = ShardMeta(worker.kind, job.fingerprint, unit.unit_id, unit.bucket, ids, provenance=provenance)
        stem = f"{worker.kind}/{job.fingerprint}/{unit.unit_id}"
        columns, format = worker.column_dtypes(), worker.config.cache.format
        self._writer: BaseShardWriter = open_writer(worker.store, stem, self._meta, columns, format)
        self._writer.__enter__()

    def encode(self, read: PreparedMembers) -> None:
        """Encode the members that `read` gives. A batch's rows are taken when the next batch is queued, so that the
        device computes while the host writes."""
        queued: tuple[list[Any], Iterable[ShardRow | RefusedMember]] | None = None
        for names, batch in chain(self._batches(read), END):
            before, self.batch = queued, batch
            queued = (batch, self._worker.encode(names, batch, self.limit)) if batch else None
            if before is not None:
                self.batch, rows = before
                for row in rows:
                    self._add(row)
                self._count(len(self.batch))

    def _count(self, members: int) -> None:
        self.counted += members
        self._advance(members)

    def _batches(self, read: PreparedMembers) -> Iterator[tuple[list[str], list[Any]]]:
        """Names and members in the unit's order, in batches as large as the limit allows; what can't be read is
        rejected."""
        names: list[str] = []
        batch: list[Any] = []
        for name, item in read:
            if isinstance(item, MediaError):
                self._set_aside(name, item.path, item.reason, str(item), item.reason in ("missing", "changed"))
                self._count(1)
                continue
            if batch and self._worker.cost([*batch, item]) > self.limit:
                yield names, batch
                names, batch = [], []
            names.append(name)
            batch.append(item)
        if batch:
            yield names, batch

    def _add(self, row: ShardRow | RefusedMember) -> None:
        """Write a row; one with NaN or infinities is rejected."""
        if isinstance(row, RefusedMember):
            self._set_aside(row.id, row.error.path, row.error.reason, str(row.error), False)
            return
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
        self._rounding += self._worker.rounding(row)
        self._encoded += 1
        self._bytes += sum(array.nbytes for array in row.tensors.values())

    def _set_aside(self, name: str, path: str, reason: str, message: str, retry: bool) -> None:
        self.rejected.append(make_reject(self._worker.stage, name, path, reason, message, retry))

    def finish(self) -> UnitResult:
        """Publish the shard."""
        worker, unit = self._worker, self._unit.unit_id
        try:
            for member in self.rejected:
                self._writer.set_aside(RejectedMember(member["item"], member["reason"], member["message"]))
            folder = reject_folder(worker.stage, worker.job.fingerprint)
            if names := {member["item"] for member in self.rejected}:
                # Before the shard, which marks the unit as done, and with the earlier rows, some of which may be
                # encoded now: after a kill in between, the list lacks nothing.
                earlier = [row for row in read_undamaged(worker.store, folder, unit) if row["item"] not in names]
                write_rejects(worker.store, folder, unit, [*self.rejected, *earlier])
            path = self._writer.finish()
        finally:
            self.drop()
        fitting, usual = "", worker.batch_limit
        if self.limit < usual:
            option = f"{worker.section}.{worker.batch_limit_option}"
            fitting = f"it fits with {option}: {self.limit}, which saves trying {usual}"
        return UnitResult(
            unit,
            path,
            self._encoded,
            self._bytes,
            set_aside=tuple(self.rejected),
            truncated=tuple(self._meta.truncated),
            fitting_batch=fitting,
            remarks=dict(self._remarks),
            rounding=self._rounding,
        )

    def drop(self) -> None:
        """Remove what was written of an unfinished shard."""
        self._writer.__exit__(None, None, None)
