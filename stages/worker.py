"""What the encoding stages' workers share: a unit's members, by batches, into one shard."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from cache import generations
from cache.generations import Unit
from cache.rejects import reject, write
from cache.shard import Row, SetAside, ShardMeta, writer
from cache.store import Store
from stages import loading
from stages.engines.isolated import Isolated, Lost
from stages.media import members
from stages.media.errors import MediaError
from stages.media.members import Wanted
from stages.stage import Job, Outcome, reject_folder

Advance = Callable[[int], None]


class UnitWorker(ABC):
    """Loaded once in a process. A stage says what a member is, what fits in a batch, and how one is encoded."""

    stage: str
    kind: str
    tensors: tuple[str, ...]
    precision: str
    batch_limit: int  # of whatever `cost` counts

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.store = Store(job.config.root)
        self.plan = generations.load(self.store, job.generation)
        self.device = loading.device(job.resources)
        self._provenance = loading.provenance(job.resources, self.device)

    @abstractmethod
    def read(self, name: str) -> Any:
        """The member `name`, ready to be encoded. MediaError: it is set aside."""

    @abstractmethod
    def cost(self, batch: list[Any]) -> int:
        """What a batch of these members costs, in the unit of `batch_limit`."""

    @abstractmethod
    def encode(self, names: list[str], batch: list[Any]) -> Iterable[Row]:
        """One forward pass: a row for each member."""

    @cached_property
    def _reading(self) -> Isolated[Wanted, members.Read]:
        """A process of its own that decodes: one that crashes or hangs costs its item and not this process."""
        limits = self.config.stages
        return Isolated(members.reader, workers=1, timeout_s=limits.item_timeout_s, memory_mib=limits.item_memory_mib)

    def fetch(self, wanted: Wanted) -> members.Read:
        """The pixels of a member. MediaError: it can't be used, or its decoder crashed, hung or ate memory."""
        found = self._reading(wanted)
        if isinstance(found, Lost):
            found = found.error(wanted.files[0][0])
        if isinstance(found, MediaError):
            raise found
        return found

    def run_unit(self, unit: Unit, advance: Advance) -> Outcome:
        return loading.halving(lambda limit, count: self._attempt(unit, limit, count), self.batch_limit, advance)

    def _attempt(self, unit: Unit, limit: int, advance: Advance) -> Outcome:
        """Make the shard with batches of at most `limit`, which it records."""
        meta = ShardMeta(
            kind=self.kind,
            fingerprint=self.job.fingerprint,
            unit=unit.unit_id,
            bucket=unit.bucket,
            ids=list(unit.members),
            provenance={**self._provenance, "batch": limit},
        )
        stem = f"{self.kind}/{self.job.fingerprint}/{unit.unit_id}"
        columns = dict.fromkeys(self.tensors, self.precision)
        aside: list[dict] = []
        encoded = size = 0
        with writer(self.store, stem, meta, columns, self.config.cache.format) as shard:
            for names, batch in self._batches(unit, limit, aside, advance):
                for row in self.encode(names, batch):
                    shard.add(row)
                    encoded += 1
                    size += sum(array.nbytes for array in row.tensors.values())
                advance(len(batch))
            for member in aside:
                shard.set_aside(SetAside(member["item"], member["reason"], member["message"]))
            if aside:
                # Before the shard, which says "done": killed in between, nothing has left the lists.
                write(self.store, reject_folder(self.stage, self.job.fingerprint), unit.unit_id, aside)
            path = shard.finish()
        return Outcome(unit.unit_id, path, encoded, size, tuple(aside))

    def _batches(
        self, unit: Unit, limit: int, aside: list[dict], advance: Advance
    ) -> Iterator[tuple[list[str], list[Any]]]:
        """Members in the unit's order, as many to a batch as the limit allows; what can't be read goes aside."""
        names: list[str] = []
        batch: list[Any] = []
        for name in unit.members:
            try:
                item = self.read(name)
            except MediaError as error:
                retry = error.reason in ("missing", "changed")
                aside.append(reject(self.stage, name, error.path, error.reason, str(error), retry))
                advance(1)
                continue
            if batch and self.cost([*batch, item]) > limit:
                yield names, batch
                names, batch = [], []
            names.append(name)
            batch.append(item)
        if batch:
            yield names, batch
