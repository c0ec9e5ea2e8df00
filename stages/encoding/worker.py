"""The common part of the encoding stages' workers, which read units ahead, encode them in batches and write shards."""

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import plans
from cache.sets.plans import Unit
from cache.sets.rejects import make_reject, read_undamaged, write_rejects
from cache.sets.table_checks import Provenance
from cache.shards.shard import BaseShardWriter, RejectedMember, ShardMeta, ShardRow, TruncatedText
from cache.shards.shard_io import open_writer
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from schemas.interruption import wait_for
from stages.discovery import media_locations
from stages.discovery.media_locations import MediaLocations
from stages.encoding import member_reader, model_loading
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.stage_state import reject_folder
from stages.engines.jobs import Job, NextUnit, RoundingError, UnitResult
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError


@dataclass(frozen=True)
class RejectedResult:
    """A member that was encoded but whose result is rejected."""

    id: str
    error: MediaError


AdvanceProgress = Callable[[int], None]
PreparedMembers = Iterable[tuple[str, Any | MediaError]]
PREFETCH_BYTES = 1 << 30  # bytes of members read ahead, if the configuration sets no number
MAX_PREFETCH = 64  # members read ahead, if the configuration sets no number
#: Follows the last batch of a unit: nothing more is queued, and the last batch's rows are taken.
END: list[tuple[list[str], list[Any]]] = [([], [])]


class UnitWorker(ABC):
    """Encodes units; made once per process. A subclass defines a member's type, the cost of a batch, and the
    encoding."""

    stage: str
    kind: str
    section: str  # section of the configuration with the stage's options
    tensors: tuple[str, ...]
    precision: str
    batch_limit_option: str  # the section's option that limits a batch's cost
    advice = "use a larger card or --device cpu"  # if a single member does not fit into memory

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
        """The files to read for the member `name`; None if it has no files. Raises MediaError to reject the member."""

    @abstractmethod
    def prepare(self, name: str, read: MemberPixels | None) -> Any:
        """The member, ready to be encoded. Called in another thread. Raises MediaError to reject the member."""

    @abstractmethod
    def cost(self, batch: list[Any]) -> int:
        """The cost of a batch of these members, in the unit of `batch_limit`."""

    def is_indivisible(self, batch: list[Any], limit: int) -> bool:
        """Whether the batch can't be made smaller."""
        return len(batch) == 1

    @abstractmethod
    def encode(self, names: list[str], batch: list[Any], limit: int) -> Iterable[ShardRow | RejectedResult]:
        """Queue the batch on the device, without waiting for it. Returns a row for each member. The rows are taken
        after the next batch is queued; the first row waits for the results. limit: largest cost of one forward pass,
        which a single member may exceed."""

    def member_bytes(self, unit: Unit) -> int:
        """Memory, in bytes, of a member of this unit after it is read."""
        return 1

    def pinned_revision(self, revision: str | None) -> str | None:
        """The commit of the model's repository in the fingerprint, since the branch may have moved; `revision` if the
        model is not in a repository."""
        record = self.store.read_record(f"{self.kind}/{self.job.fingerprint}/provenance.json", Provenance)
        return (record.weights or {}).get("commit", revision)

    def path(self, name: str) -> str:
        """The path of a sample's file, for a message."""
        return self.plan.active_rows.get(name, self.plan.samples[name])["path"]

    def remarks(self, row: ShardRow) -> Iterable[str]:
        """Remarks on a row; the report counts the rows of each remark. Most rows have none."""
        return ()

    def rounding(self, row: ShardRow) -> RoundingError:
        """The rounding error of a row's tensors that are stored in fewer bits than computed. Called once per row."""
        return RoundingError()

    def column_dtypes(self) -> dict[str, str]:
        """Name of a row's tensor -> its dtype."""
        return dict.fromkeys(self.tensors, self.precision)

    def prefetch_count(self, unit: Unit) -> int:
        """The number of members of this unit to read ahead, if the configuration sets no number."""
        return max(2, min(MAX_PREFETCH, PREFETCH_BYTES // self.member_bytes(unit)))

    def run_units(self, take: NextUnit, advance: AdvanceProgress) -> Iterator[UnitResult]:
        """Make the shards of the units that `take` returns. While a unit is encoded, the next unit is read and the
        previous shard is written, so a unit's result comes after the next unit is encoded, or at the end."""
        with ThreadPoolExecutor(1, "write") as writer, _Prefetcher(self, take) as prefetcher:
            is_complete = False
            try:
                yield from self._encode_units(prefetcher, writer, advance)
                is_complete = not self._is_time_up
            finally:  # do not wait for a decoder that hangs, or for members that were read ahead
                if not is_complete and (processes := self.__dict__.pop("processes", None)):
                    processes.close()

    def _encode_units(
        self, prefetcher: "_Prefetcher", writer: ThreadPoolExecutor, advance: AdvanceProgress
    ) -> Iterator[UnitResult]:
        pending_write: Future[UnitResult] | None = None  # the previous shard, which is being written
        while True:
            unit = None if self._is_time_up else prefetcher.next_unit(wait=pending_write is None)
            if unit is None and pending_write is None:
                return
            shard, existing_path = None, None
            if unit is not None:
                # Checked now and not when the unit is read ahead, since other jobs may have encoded it in between.
                existing_path = self.job.find_shard(self.store, self.kind, unit)
                if existing_path is not None:
                    prefetcher.skip(unit)
                else:
                    shard = self._encode(unit, prefetcher, advance)
            try:
                if pending_write is not None:
                    yield wait_for(pending_write)
            except BaseException:
                if shard is not None:
                    shard.drop()
                raise
            pending_write = writer.submit(shard.finish) if shard is not None else None
            if unit is not None and existing_path is not None:
                yield UnitResult(unit.unit_id, existing_path, elsewhere=True)

    @property
    def _is_time_up(self) -> bool:
        return time.monotonic() >= self.job.until

    @cached_property
    def processes(self) -> SandboxPool[ReadRequest, MemberPixels]:
        """The decoding processes. If one crashes or hangs, its item is rejected and this process continues."""
        workers = self.job.resources.readers_per_worker
        return SandboxPool.configured(member_reader.make_member_reader, workers, self.config.stages)

    def _encode(self, unit: Unit, prefetcher: "_Prefetcher", advance: AdvanceProgress) -> "_UnitShard":
        """Encode a unit and return its shard, which is not written yet. If memory runs out, the whole unit starts again
        with half the batch. The next unit has the usual limit again, because a shard must not depend on earlier
        units."""
        limit, read = self.batch_limit, prefetcher.members
        while True:
            shard = _UnitShard(self, unit, limit, advance)
            try:
                shard.encode(read(unit))
                if any(member["reason"] == "missing" for member in shard.result.rejects):
                    self._require_media(unit)
                return shard
            except BaseException as error:
                shard.drop()
                if not model_loading.is_out_of_memory(error):
                    raise
                if shard.batch and self.is_indivisible(shard.batch, limit):
                    problem = str(error).strip().partition("\n")[0]
                    raise LatentpressError(f"out of memory with a batch of one: {problem}", self.advice) from error
            if limit == self.batch_limit:
                prefetcher.skip(unit)
            advance(-shard.member_count)
            limit, read = max(1, min(limit, self.cost(shard.batch) if shard.batch else 0) // 2), prefetcher.reread
            del shard
            model_loading.release_memory()  # outside of `except`: no traceback holds the batch's tensors

    def _require_media(self, unit: Unit) -> None:
        """Raise an error if most files are missing, instead of publishing a shard without their members."""
        some = pa.array(media_locations.spread_evenly(pa.array(unit.members, pa.string())))
        wanted_ids = self.plan.active_text_ids if self.kind == "text" else self.plan.active_sample_ids
        tried = wanted_ids.filter(pc.is_in(wanted_ids, value_set=some)).to_pylist()
        media_locations.require_media(self.locations, self.kind, {*self.job.probed_members, *tried})


class FrameWorker(UnitWorker):
    """Reads only a member's own frames, not the source images that its latents are conditioned on. The `len` of a
    prepared member is its number of frames. listed_as: kind of members for finding their files."""

    listed_as = "items"

    def cost(self, batch: list[Any]) -> int:
        """Number of frames in the batch."""
        return sum(map(len, batch))

    def is_indivisible(self, batch: list[Any], limit: int) -> bool:
        """Whether a pass has only one frame: a clip may take several passes of at most `limit` frames."""
        return min(self.cost(batch), limit) <= 1

    def member_bytes(self, unit: Unit) -> int:
        """Return the bytes of the frames as they are read, before they are resized."""
        bucket = Bucket.parse(unit.bucket)
        return 3 * bucket.width * bucket.height * bucket.frames

    def read_request(self, name: str) -> ReadRequest:
        files = tuple(self.locations.planned_files(self.listed_as, name))
        return ReadRequest(files, self.plan.samples[name], None, self.config.latents.decoder)


@dataclass
class _Reading:
    """A unit whose members are being read. names: names of members whose reading has not begun. results: name and
    result of members that are being read or are ready, in order. depth: largest number of members in progress."""

    unit: Unit
    names: Iterator[str]
    depth: int
    results: deque[tuple[str, Future]]


class _Prefetcher:
    """Reads members of the units that `take` returns ahead, in the units' order: a decoding process reads a member,
    then one thread prepares it for the encoder. The number of members in progress is bounded, and so is memory.
    Successive members with the same request (texts with one image) share its result."""

    def __init__(self, worker: UnitWorker, take: NextUnit) -> None:
        self._worker, self._take = worker, take
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._readings = deque[_Reading]()  # the first is being encoded
        self._last_read: tuple[ReadRequest, Future[MemberPixels]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def next_unit(self, wait: bool) -> Unit | None:
        """The unit to encode next, after the last unit's members were taken; None if `take` returns None."""
        self._fill(wait)
        return self._readings[0].unit if self._readings else None

    def members(self, unit: Unit) -> PreparedMembers:
        """Yields each member of the unit that `next_unit` returned, in order: its name, and the prepared member or a
        MediaError."""
        results = self._readings[0].results
        for _ in unit.members:
            self._fill(False)
            name, item = results.popleft()
            yield name, _result_or_error(item)
        self._readings.popleft()

    def reread(self, unit: Unit) -> PreparedMembers:
        """Yields the same members again, without reading ahead."""
        for name in unit.members:
            yield name, _result_or_error(self._begin(name))

    def skip(self, unit: Unit) -> None:
        """Drop the rest of the unit that `next_unit` returned."""
        if self._readings and self._readings[0].unit is unit:
            self._readings.popleft()

    def _fill(self, wait: bool) -> None:
        while True:
            last = self._readings[-1] if self._readings else None
            if last is not None and sum(len(reading.results) for reading in self._readings) >= last.depth:
                return
            if last is not None and (name := next(last.names, None)) is not None:
                last.results.append((name, self._begin(name)))
                continue
            unit = self._take(wait and last is None)
            if unit is None:
                return
            depth = self._worker.job.resources.prefetch or self._worker.prefetch_count(unit)
            self._readings.append(_Reading(unit, iter(unit.members), depth, deque()))

    def _begin(self, name: str) -> Future:
        try:
            request = self._worker.read_request(name)
        except MediaError as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed
        if request is None:
            return self._thread.submit(self._worker.prepare, name, None)
        # Compare file names instead of objects, since two path objects may name the same member of an archive.
        named = replace(request, files=tuple((os.fspath(path), media_id) for path, media_id in request.files))
        if self._last_read is None or self._last_read[0] != named:
            processes = self._worker.processes
            self._last_read = named, self._thread.submit(_wait_for, processes, request, processes.begin(request))
        read = self._last_read[1]  # done before `prepare` runs, since the thread runs tasks in order
        return self._thread.submit(lambda: self._worker.prepare(name, read.result()))


def _wait_for(processes: SandboxPool[ReadRequest, MemberPixels], request: ReadRequest, task: Future) -> MemberPixels:
    """Wait for a decoding process's result. Raises MediaError."""
    result = processes.result(request, task)
    if isinstance(result, WorkerFailure):
        raise result.error(request.files[0][0])
    if isinstance(result, MediaError):
        raise result
    return result


def _result_or_error(item: Future) -> Any | MediaError:
    try:
        return wait_for(item)
    except MediaError as error:
        return error


class _UnitShard:
    """The shard of one unit while it is made. limit: largest cost of a batch. batch: members of the batch in progress.
    member_count: number of members reported to `advance`."""

    def __init__(self, worker: UnitWorker, unit: Unit, limit: int, advance: AdvanceProgress) -> None:
        self._worker, self._unit, self.limit, self._advance = worker, unit, limit, advance
        self.result = UnitResult(unit.unit_id)
        self.batch: list[Any] = []
        self.member_count = 0
        job = worker.job
        ids, provenance = list(unit.members), {**worker.provenance, "batch": limit}
        self._meta = ShardMeta(worker.kind, job.fingerprint, unit.unit_id, unit.bucket, ids, provenance=provenance)
        stem = f"{worker.kind}/{job.fingerprint}/{unit.unit_id}"
        columns, format = worker.column_dtypes(), worker.config.cache.format
        self._writer: BaseShardWriter = open_writer(worker.store, stem, self._meta, columns, format)
        self._writer.__enter__()

    def encode(self, read: PreparedMembers) -> None:
        """Encode the members that `read` yields. A batch's rows are taken after the next batch is queued, so that the
        device computes while the host writes."""
        queued: tuple[list[Any], Iterable[ShardRow | RejectedResult]] | None = None
        for names, batch in chain(self._batches(read), END):
            before, self.batch = queued, batch
            queued = (batch, self._worker.encode(names, batch, self.limit)) if batch else None
            if before is not None:
                self.batch, rows = before
                for row in rows:
                    self._add(row)
                self._count(len(self.batch))

    def _count(self, members: int) -> None:
        self.member_count += members
        self._advance(members)

    def _batches(self, read: PreparedMembers) -> Iterator[tuple[list[str], list[Any]]]:
        """Yields names and members in the unit's order, in batches as large as the limit allows. Members that can't be
        read are rejected."""
        names: list[str] = []
        batch: list[Any] = []
        for name, item in read:
            if isinstance(item, MediaError):
                self._reject(name, item.path, item.reason, str(item), item.reason in ("missing", "changed"))
                self._count(1)
                continue
            if batch and self._worker.cost([*batch, item]) > self.limit:
                yield names, batch
                names, batch = [], []
            names.append(name)
            batch.append(item)
        if batch:
            yield names, batch

    def _add(self, row: ShardRow | RejectedResult) -> None:
        """Write a row. A row with NaN or infinite numbers is rejected."""
        if isinstance(row, RejectedResult):
            self._reject(row.id, row.error.path, row.error.reason, str(row.error), False)
            return
        names = [name for name, array in row.tensors.items() if not array.is_finite()]
        if names:
            problem = f"the encoder returned NaN or infinite numbers ({', '.join(names)}) in {self._worker.precision}"
            message = f"{row.id}: {problem}. Set {self._worker.section}.precision: float32"
            self._reject(row.id, "", "not-finite", message, False)
            return
        self._writer.add(row)
        tokens, kept = row.info.get("tokens", 0), row.info.get("kept", 0)
        if tokens > kept:
            self.result.truncated.append(TruncatedText(row.id, tokens, kept))
        self.result.remarks.update(self._worker.remarks(row))
        self.result.rounding += self._worker.rounding(row)
        self.result.encoded += 1
        self.result.bytes += sum(array.nbytes for array in row.tensors.values())

    def _reject(self, name: str, path: str, reason: str, message: str, retry: bool) -> None:
        self.result.rejects.append(make_reject(self._worker.stage, name, path, reason, message, retry))

    def finish(self) -> UnitResult:
        """Publish the shard."""
        worker, result = self._worker, self.result
        try:
            self._meta.truncated = result.truncated
            for member in result.rejects:
                self._writer.reject(RejectedMember(member["item"], member["reason"], member["message"]))
            folder = reject_folder(worker.stage, worker.job.fingerprint)
            if names := {member["item"] for member in result.rejects}:
                # Written before the shard, which marks the unit as done, and together with the earlier rows, although
                # some of their members may be encoded now: if the process is killed in between, the list is complete.
                earlier = [
                    row for row in read_undamaged(worker.store, folder, result.unit_id) if row["item"] not in names
                ]
                write_rejects(worker.store, folder, result.unit_id, [*result.rejects, *earlier])
            result.shard_path = self._writer.finish()
        finally:
            self.drop()
        if self.limit < worker.batch_limit:
            option = f"{worker.section}.{worker.batch_limit_option}"
            result.fitting_batch = f"it fits with {option}: {self.limit} instead of {worker.batch_limit}"
        return result

    def drop(self) -> None:
        """Remove the files of an unfinished shard."""
        self._writer.__exit__(None, None, None)
