"""The steps of one rank as batches, read ahead.

Noise, the choice of sigma and the draw from a stored posterior are functions of (seed, step, position in the global
batch), so a resumed run, or one on another number of ranks, gets the same. On a CPU the thread that reads ahead draws
them, on other devices the step does, so that nothing of them is copied and no thread computes them.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from cache.order.schedule import BatchSchedule, Ints, MicroBatchRows
from cache.sets.trainset import SetError, TrainSet
from schemas.catalog import FAMILIES
from schemas.config.training import Reading
from schemas.family import Family
from trainer.batch import Batch
from trainer.flow import spread_uniform
from trainer.noise import draw_latents, seeded_noise, seeded_uniform
from trainer.reading import BatchReader

T = TypeVar("T")
SAID_S = 0.5  # a longer wait for data is shown


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    batch: with latents as they are stored, perhaps as moments, where there is no noise yet. identities: (B,) text that
    is unique to a position of a step's global batch, and determines random numbers. uniform_B: in 0..1, float32, on the
    CPU, by which sigma is chosen. noise_BCTHW: standard normal, float32. counts: False if all of its samples were
    rejected. Since ranks have to compute equally often, it then has the shapes of other samples, zeros for their
    numbers, and no part in the loss.
    """

    batch: Batch
    identities: list[str]
    uniform_B: torch.Tensor
    noise_BCTHW: torch.Tensor | None = None
    counts: bool = True
    finite: bool = True

    def draw(self, device: torch.device | str, family: Family) -> "MicroBatch":
        """On the device in float32, with latents drawn from moments and with noise. Both are computed there, unless
        they were before."""
        batch = self.batch.to(device, torch.float32)
        if self.noise_BCTHW is not None:
            return replace(self, batch=batch, noise_BCTHW=self.noise_BCTHW.to(device))
        batch = draw_latents(
            batch, family, [f"{identity}/{id}" for identity, id in zip(self.identities, batch.ids, strict=True)]
        )
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
        self.reader = BatchReader(self.data, self.pinned)

    def step(self, number: int) -> StepBatches:
        """The micro-batches of optimizer step `number` (from 0). DamageError where a shard is damaged."""
        drawn = self.schedule.step(number, self.rank, self.world)
        micro_batches = [self._read(number, rows) for rows in drawn]
        return StepBatches(number, drawn[0].epoch, self.schedule.step_buckets(number), micro_batches)

    def _read(self, step: int, drawn: MicroBatchRows) -> MicroBatch:
        chosen, texts, counts = self._choose(step, drawn)
        seed, batch = self.schedule.seed, self.reader.read(chosen.rows, texts, chosen.bucket)
        batch = batch if counts else batch.zeros()
        identities = [f"{seed}/{step}/{position}" for position in chosen.positions.tolist()]
        uniform_B = seeded_uniform(identities, "sigma")
        if self.low_discrepancy:
            uniform_B = spread_uniform(seed, step, chosen.positions, self.schedule.global_batch)
        micro_batch = MicroBatch(batch, identities, uniform_B, counts=counts, finite=bool(batch.is_finite()))
        return micro_batch.draw("cpu", self.family) if self.draw_noise else micro_batch

    def _choose(self, step: int, drawn: MicroBatchRows) -> tuple[MicroBatchRows, Ints, bool]:
        """The draws of a micro-batch that are read, their texts, and True; where everything was set aside, those of the
        next one, and False."""
        chosen, texts = self._leave_out(step, drawn)
        later = step
        while not len(chosen.rows):
            later += 1
            if later > step + 1 + self.schedule.steps_per_epoch:
                raise SetError(
                    f"all samples of set {self.data.id} were set aside when they were encoded",
                    "See why: `latentpress status --rejects`. Correct them, and run `latentpress run` again.",
                )
            for other in self.schedule.step(later, self.rank, self.world):
                if not len(chosen.rows):
                    chosen, texts = self._leave_out(later, other)
        return chosen, texts, later == step

    def _leave_out(self, step: int, drawn: MicroBatchRows) -> tuple[MicroBatchRows, Ints]:
        """A micro-batch without the samples that were set aside, and the texts of the others."""
        draws = drawn.positions, drawn.rows, drawn.passes
        texts = self.data.row_texts.draw(self.schedule.seed, self.caption_dropout, step, *draws)
        aside = self.data.find_set_aside(drawn.rows, texts)
        if aside is None or not aside.any():
            return drawn, texts
        positions, rows, passes = (column[~aside] for column in draws)
        return replace(drawn, positions=positions, rows=rows, passes=passes), texts[~aside]

    def check_step(self, number: int) -> None:
        """DamageError where a number of the step is NaN or infinite, which its checksum does not show. The training
        step asks here which row has one, where `MicroBatch.finite` says that some has."""
        for drawn in self.schedule.step(number, self.rank, self.world):
            chosen, texts, counts = self._choose(number, drawn)
            if counts:
                self.reader.explain(chosen.rows, texts)

    def steps(self, first: int, last: int) -> Iterator[StepBatches]:
        """Steps first..last-1, read ahead by threads."""
        supply, ahead, threads = self.data.supply, self.reading.steps_ahead, self.reading.threads
        supply.follow(first)
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
    release Python's lock.
    """
    results = deque[Future[T]]()

    def next_result() -> T:
        result = results.popleft()
        with suppress(TimeoutError):
            return result.result(SAID_S)
        with waiting():
            return result.result()

    pool = ThreadPoolExecutor(threads, "read-ahead")
    try:
        for number in numbers:
            results.append(pool.submit(read, number))
            if len(results) > max(depth, threads):
                yield next_result()
        while results:
            yield next_result()
    finally:
        pool.shutdown(cancel_futures=True)
