"""From shards to tensors: the only place where numpy becomes torch.

Noise, the choice of sigma and the draw from a stored posterior are functions of (seed, step, position in the global
batch), so a resumed run, or one on another number of ranks, gets the same. On a CPU the thread that reads ahead draws
them, on other devices the step does, so that nothing of them is copied and no thread computes them.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from cache.order.schedule import BatchSchedule, Ints, MicroBatchRows
from cache.sets.draws import choose_captions, draw_caption_dropout
from cache.sets.row_reader import RowReader
from cache.sets.trainset import Sample, SetError, TrainSet
from cache.shards.tensors import Array
from cache.store.damage import DamageError
from cache.supply.shard_needs import needed_shards
from schemas.catalogue import FAMILIES
from schemas.config.training import Reading
from schemas.family import Family
from trainer.batch import Batch, pad_text, stack
from trainer.noise import draw_latents, seeded_noise, seeded_uniform
from trainer.reading import Chosen, read_batches
from trainer.run.host_memory import HostMemory
from trainer.timesteps import spread_uniform

T = TypeVar("T")
SAID_S = 0.5  # a longer wait for data is shown


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    batch: with latents as they are stored, perhaps as moments, where there is no noise yet. identities: (B,) text that
    is unique to a position of a step's global batch, and determines random numbers. uniform_B: in 0..1, float32, on the
    CPU, by which sigma is chosen. noise_BCTHW: standard normal, float32. counts: False where all of its samples were
    set aside and another's stand in, as ranks have to compute equally often: its loss is multiplied by 0.
    """

    batch: Batch
    identities: list[str]
    uniform_B: torch.Tensor
    noise_BCTHW: torch.Tensor | None = None
    counts: bool = True

    def draw(self, device: torch.device | str, family: Family) -> "MicroBatch":
        """On the device in float32, with latents drawn from moments and with noise. Both are computed there, unless
        they were before."""
        batch = self.batch.to(device, torch.float32)
        if self.noise_BCTHW is not None:
            return replace(self, batch=batch, noise_BCTHW=self.noise_BCTHW.to(device))
        batch = draw_latents(batch, family, [f"{one}/{id}" for one, id in zip(self.identities, batch.ids, strict=True)])
        noise_BCTHW = seeded_noise(self.identities, "noise", batch.latents_BCTHW.shape[1:], device)
        return replace(self, batch=batch, noise_BCTHW=noise_BCTHW)


@dataclass(frozen=True)
class StepBatches:
    """This rank's share of one optimizer step. epoch: of its first micro-batch. buckets: bucket -> micro-batches of all
    ranks together."""

    step: int
    epoch: int
    buckets: dict[str, int]
    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class MicroBatchPlan:
    """What is read of a micro-batch. whole: whether all rows of its shards are where the set expects them. counts: as
    of MicroBatch."""

    drawn: MicroBatchRows
    chosen: Chosen
    whole: bool
    counts: bool = True


def to_tensor(array: Array) -> torch.Tensor:
    """A writable torch tensor of the same dtype: one copy out of the memory map."""
    copied = torch.from_numpy(np.array(array.numpy()))
    return copied.view(torch.bfloat16) if array.dtype == "bfloat16" else copied


def collate(samples: Sequence[Sample], bucket: str) -> Batch:
    """Samples of one bucket as a batch on the CPU as they are stored, moments too (`draw_latents`); text is padded with
    zeros to the longest. `trainer.reading.read_batches` makes the same batch with one copy."""
    columns = []
    for sample in samples:
        tensors = {name: to_tensor(array) for name, array in sample.tensors.items()}
        if sample.regularisation:
            tensors["regularisation"] = torch.tensor(True)
        tensors |= {f"text.{name}": to_tensor(array) for name, array in sample.text.items() if name != "embeds"}
        columns.append(tensors)
    ids = [sample.id for sample in samples]
    text, mask = pad_text([to_tensor(sample.text["embeds"]) for sample in samples])
    extras = stack(ids, columns)
    latent, condition, pooled = extras.pop("latent"), extras.pop("condition", None), extras.pop("text.pooled", None)
    return Batch(latent, condition, text, mask, pooled, ids, bucket, extras)


@dataclass
class BatchLoader:
    """Reads the steps of one rank.

    low_discrepancy: of the choice of sigma, `spread_uniform`. draw_noise: while reading, on the CPU; else
    `MicroBatch.draw` is left to the step. reading: how rows are read. pinned: whether batches are in page-locked
    memory.
    """

    data: TrainSet
    schedule: BatchSchedule
    caption_dropout: float
    rank: int = 0
    world: int = 1
    low_discrepancy: bool = False
    draw_noise: bool = True
    reading: Reading = field(default_factory=Reading)
    pinned: bool = False

    @property
    def family(self) -> Family:
        return FAMILIES[self.data.meta["family"]]

    def __post_init__(self) -> None:
        self._reader = RowReader(self.data, self.reading.verify)
        self._memory = HostMemory(self.pinned)

    def step(self, number: int) -> StepBatches:
        """The micro-batches of optimizer step `number` (from 0). DamageError where a shard is damaged."""
        rows = self.schedule.step(number, self.rank, self.world)
        found = [self._choose(number, each) for each in rows]
        batches: Sequence[Batch | None] = [None] * len(found)
        with suppress(DamageError):  # the careful way has damaged bytes replaced, or says the same
            if all(each.whole for each in found):
                batches = read_batches(self._reader, self._memory, [each.chosen for each in found])
        micro_batches = [
            self._complete(number, of, collate(self._read_samples(of.chosen), of.drawn.bucket) if it is None else it)
            for of, it in zip(found, batches, strict=True)
        ]
        return StepBatches(number, rows[0].epoch, self.schedule.step_buckets(number), micro_batches)

    def _complete(self, step: int, of: MicroBatchPlan, batch: Batch) -> MicroBatch:
        seed, drawn = self.schedule.seed, of.drawn
        identities = [f"{seed}/{step}/{int(position)}" for position in drawn.positions]
        uniform = seeded_uniform(identities, "sigma")
        if self.low_discrepancy:
            uniform = spread_uniform(seed, step, drawn.positions, self.schedule.global_batch)
        read = MicroBatch(batch, identities, uniform, counts=of.counts)
        return read.draw("cpu", self.family) if self.draw_noise else read

    def _choose(self, step: int, drawn: MicroBatchRows) -> MicroBatchPlan:
        """What is read of a micro-batch; of one of which everything was set aside, the next one's instead."""
        found = self._leave_out(step, drawn)
        later = step
        while not len(found.drawn.rows):
            later += 1
            if later > step + 1 + self.schedule.steps_per_epoch:
                raise SetError(
                    f"all samples of set {self.data.id} were set aside when they were encoded",
                    "See why: `latentpress status --rejects`. Correct them, and run `latentpress run` again.",
                )
            for other in self.schedule.step(later, self.rank, self.world):
                if len(found.drawn.rows) == 0:
                    found = replace(self._leave_out(later, other), counts=False)
        return found

    def _leave_out(self, step: int, drawn: MicroBatchRows) -> MicroBatchPlan:
        """Without the samples that were set aside."""
        captions, dropped = self._choose_texts(step, drawn)
        aside = self.data.find_set_aside(drawn.rows, captions, dropped)
        if aside is not None and aside.any():
            own = {name: getattr(drawn, name)[~aside] for name in ("positions", "rows", "passes")}
            drawn, captions, dropped = replace(drawn, **own), captions[~aside], dropped[~aside]
        return MicroBatchPlan(drawn, Chosen(drawn.rows, captions, dropped, drawn.bucket), aside is None)

    def _choose_texts(self, step: int, drawn: MicroBatchRows) -> tuple[Ints, NDArray[np.bool_]]:
        """Of each sample the number of its caption, and whether it has the null prompt instead."""
        counts = self._reader.caption_counts(drawn.rows)
        captions = choose_captions(self.schedule.seed, drawn.rows, drawn.passes, counts)
        return captions, draw_caption_dropout(self.schedule.seed, step, drawn.positions, self.caption_dropout)

    def _read_samples(self, chosen: Chosen) -> list[Sample]:
        """The samples of a micro-batch, every one of their numbers checked."""
        rows = zip(chosen.rows.tolist(), chosen.captions.tolist(), chosen.dropped.tolist(), strict=True)
        return [self.data.sample(*each) for each in rows]

    def check_step(self, number: int) -> None:
        """DamageError where a number of the step is NaN or infinite, which its checksum does not show. The training
        step looks for such numbers on the device, where that costs nothing, and asks here which row has one."""
        for drawn in self.schedule.step(number, self.rank, self.world):
            self._read_samples(self._choose(number, drawn).chosen)

    def steps(self, first: int, last: int) -> Iterator[StepBatches]:
        """Steps first..last-1, read ahead by threads. Their shards' supply knows which ones come."""
        planned = self.data, self.schedule, self.caption_dropout, first, last, self.rank, self.world
        supply, ahead, threads = self.data.supply, self.reading.steps_ahead, self.reading.threads
        supply.follow(first, (numbers.tolist() for numbers in needed_shards(*planned)))
        with closing(prefetch(self.step, range(first, last), ahead, threads, supply.show_wait)) as steps:
            try:
                for batches in steps:
                    supply.finished(batches.step)
                    yield batches
            finally:
                supply.stop_waiting()  # the threads that read are waited for next


def prefetch(
    read: Callable[[int], T],
    numbers: range,
    depth: int = 2,
    threads: int = 1,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Generator[T]:
    """`read(n)` of each number in order, at most `depth` or `threads` results ahead, by background threads.

    waiting: entered where a result is waited for longer than SAID_S. An exception in a thread is raised at its place in
    the order. Leaving the iterator ends the threads. Threads are enough: reading is copies and checksums, both of which
    release Python's lock. Not an executor, whose futures take as long as copying 256 KiB.
    """
    ahead = max(depth, threads)
    lanes = [(SimpleQueue[int | None](), SimpleQueue[tuple[T | None, BaseException | None]]()) for _ in range(threads)]
    workers = [Thread(target=_work, args=(read, *lane), name="read-ahead", daemon=True) for lane in lanes]
    for worker in workers:
        worker.start()

    def result(place: int) -> T:
        results = lanes[place % threads][1]
        try:
            value, error = results.get(timeout=SAID_S)
        except Empty:
            with waiting():
                value, error = results.get()
        if error is not None:
            raise error
        return cast(T, value)

    try:
        for place, number in enumerate(numbers):
            lanes[place % threads][0].put(number)
            if place >= ahead:
                yield result(place - ahead)
        for place in range(max(0, len(numbers) - ahead), len(numbers)):
            yield result(place)
    finally:
        for todo, _ in lanes:
            with suppress(Empty):
                while True:
                    todo.get_nowait()
            todo.put(None)
        for worker in workers:
            worker.join()


def _work(
    read: Callable[[int], T],
    todo: "SimpleQueue[int | None]",
    done: "SimpleQueue[tuple[T | None, BaseException | None]]",
) -> None:
    """Read what is to be done until None comes."""
    while (number := todo.get()) is not None:
        try:
            found: tuple[T | None, BaseException | None] = (read(number), None)
        except BaseException as error:  # raised where its result is wanted
            found = (None, error)
        done.put(found)
        del found
