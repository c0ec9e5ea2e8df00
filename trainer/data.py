"""From shards to tensors: the only place where numpy becomes torch.

Noise, the choice of sigma and the draw from a stored posterior are functions of (seed, step, position in the global
batch), so a resumed run, or one on another number of ranks, gets the same. On a CPU the thread that reads ahead draws
them, on other devices the step does, so that nothing of them is copied and no thread computes them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from cache.schedule import BatchSchedule, MicroBatchRows, choose_captions, draw_caption_dropout
from cache.tensors import Array
from cache.trainset import Sample, TrainSet
from schemas.catalogue import FAMILIES
from schemas.family import Family
from trainer.batch import Batch, pad_text, stack
from trainer.noise import draw_latents, seeded_noise, seeded_uniform
from trainer.timesteps import spread_uniform

T = TypeVar("T")

PREFETCH_STEPS = 2  # steps read ahead


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    batch: with latents as they are stored, perhaps as moments, where there is no noise yet. identities: (B,) text that
    is unique to a position of a step's global batch, and determines random numbers. uniform_B: in 0..1, float32, on the
    CPU, by which sigma is chosen. noise_BCTHW: standard normal, float32.
    """

    batch: Batch
    identities: list[str]
    uniform_B: torch.Tensor
    noise_BCTHW: torch.Tensor | None = None

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


def to_tensor(array: Array) -> torch.Tensor:
    """A writable torch tensor of the same dtype: one copy out of the memory map."""
    copied = torch.from_numpy(np.array(array.numpy()))
    return copied.view(torch.bfloat16) if array.dtype == "bfloat16" else copied


def collate(samples: Sequence[Sample], bucket: str) -> Batch:
    """Samples of one bucket as a float32 batch on the CPU, with moments as they are stored (`draw_latents`); text is
    padded with zeros to the longest."""
    columns = []
    for sample in samples:
        tensors = {name: to_tensor(array) for name, array in sample.tensors.items()}
        if sample.regularisation:
            tensors["regularisation"] = torch.tensor(True)
        tensors |= {f"text.{name}": to_tensor(array) for name, array in sample.text.items() if name != "embeds"}
        columns.append({name: it.float() if it.is_floating_point() else it for name, it in tensors.items()})
    ids = [sample.id for sample in samples]
    text, mask = pad_text([to_tensor(sample.text["embeds"]).float() for sample in samples])
    extras = stack(ids, columns)
    latent, condition, pooled = extras.pop("latent"), extras.pop("condition", None), extras.pop("text.pooled", None)
    return Batch(latent, condition, text, mask, pooled, ids, bucket, extras)


@dataclass(frozen=True)
class BatchLoader:
    """Reads the steps of one rank.

    low_discrepancy: of the choice of sigma, `spread_uniform`. draw_noise: while reading, on the CPU; else
    `MicroBatch.draw` is left to the step.
    """

    data: TrainSet
    schedule: BatchSchedule
    caption_dropout: float
    rank: int = 0
    world: int = 1
    low_discrepancy: bool = False
    draw_noise: bool = True

    @property
    def family(self) -> Family:
        return FAMILIES[self.data.meta["family"]]

    def step(self, number: int) -> StepBatches:
        """The micro-batches of optimizer step `number` (from 0). DamageError where a shard is damaged."""
        rows = self.schedule.step(number, self.rank, self.world)
        micro_batches = [self._read(number, each) for each in rows]
        return StepBatches(number, rows[0].epoch, self.schedule.step_buckets(number), micro_batches)

    def _read(self, step: int, drawn: MicroBatchRows) -> MicroBatch:
        seed, rows = self.schedule.seed, drawn.rows
        captions = choose_captions(seed, rows, drawn.passes, self.data.caption_counts(rows))
        dropped = draw_caption_dropout(seed, step, drawn.positions, self.caption_dropout)
        samples = [
            self.data.sample(int(row), int(caption), bool(drop))
            for row, caption, drop in zip(rows, captions, dropped, strict=True)
        ]
        identities = [f"{seed}/{step}/{int(position)}" for position in drawn.positions]
        uniform = seeded_uniform(identities, "sigma")
        if self.low_discrepancy:
            uniform = spread_uniform(seed, step, drawn.positions, self.schedule.global_batch)
        read = MicroBatch(collate(samples, drawn.bucket), identities, uniform)
        return read.draw("cpu", self.family) if self.draw_noise else read

    def steps(self, first: int, last: int) -> Iterator[StepBatches]:
        """Steps first..last-1, read ahead by a thread."""
        return prefetch(self.step, range(first, last))


def prefetch(read: Callable[[int], T], numbers: range, depth: int = PREFETCH_STEPS) -> Iterator[T]:
    """`read(n)` of each number in order, at most `depth` results ahead, by one background thread.

    An exception in the thread is raised at its place in the order. Leaving the iterator ends the thread. One thread is
    enough: reading is a memory map and a checksum, both of which release the GIL.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        for number in numbers:
            pending.append(pool.submit(read, number))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
