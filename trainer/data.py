"""From shards to tensors: the only place where numpy becomes torch.

Noise, the choice of sigma and the draw from a stored posterior are functions of (seed, step, position in the global
batch), so a resumed run, or one on another number of ranks, gets the same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from cache.schedule import BatchSchedule, MicroBatchRows, choose_captions, draw_caption_dropout
from cache.tensors import Array
from cache.trainset import Sample, SetError, TrainSet
from schemas.catalogue import FAMILIES
from schemas.family import Family
from schemas.identity import derive_seed
from trainer.batch import Batch, pad_text, stack
from trainer.timesteps import spread_uniform

T = TypeVar("T")

PREFETCH_STEPS = 2  # steps read ahead


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank.

    noise_BCTHW: standard normal, float32. uniform_B: in 0..1, float32, by which sigma is chosen. identities: (B,) text
    that is unique to a position of a step's global batch, for further random numbers.
    """

    batch: Batch
    noise_BCTHW: torch.Tensor
    uniform_B: torch.Tensor
    identities: list[str]


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


def seeded_noise(identity: str, purpose: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise, a function of its arguments: float32, on the CPU."""
    generator = torch.Generator().manual_seed(derive_seed(identity, purpose))
    return torch.randn(tuple(shape), generator=generator)


def sample_latents(stored_CTHW: torch.Tensor, family: Family, identity: str) -> torch.Tensor:
    """float32 latents (C, T, h, w) from stored ones, or from moments, of twice the channels; else SetError.

    Moments are mean and log-variance in model space, joined along the channels; the latent is mean + exp(logvar / 2) *
    noise, with standard normal noise that `identity` determines, the same on every device.
    """
    stored, channels = stored_CTHW.float(), family.latent_channels
    if len(stored) == channels:
        return stored
    if len(stored) != 2 * channels or not family.posterior:
        raise SetError(
            f"a stored latent has {len(stored)} channels; {family.name} has {channels}"
            + (f", or {2 * channels} with the log-variance" if family.posterior else ""),
            "Its shard was made for another model: run `latentpress encode-latents` and `latentpress index`.",
        )
    mean, logvar = stored.chunk(2)
    return mean + (logvar / 2).exp() * seeded_noise(identity, "posterior", mean.shape)


def collate(samples: Sequence[Sample], bucket: str, family: Family, draws: Sequence[str]) -> Batch:
    """Samples of one bucket as a float32 batch on the CPU; text is padded with zeros to the longest.

    draws: of each sample, the identity that seeds the draw from its posterior where the shard has moments.
    """
    columns = []
    for sample, draw in zip(samples, draws, strict=True):
        tensors = {name: to_tensor(array) for name, array in sample.tensors.items()}
        if sample.regularisation:
            tensors["regularisation"] = torch.tensor(True)
        for name, identity in (("latent", draw), ("condition", f"{draw}/condition")):
            if name in tensors:
                tensors[name] = sample_latents(tensors[name], family, identity)
        tensors |= {f"text.{name}": to_tensor(array) for name, array in sample.text.items() if name != "embeds"}
        columns.append({name: it.float() if it.is_floating_point() else it for name, it in tensors.items()})
    ids = [sample.id for sample in samples]
    text, mask = pad_text([to_tensor(sample.text["embeds"]).float() for sample in samples])
    extras = stack(ids, columns)
    latent, condition, pooled = extras.pop("latent"), extras.pop("condition", None), extras.pop("text.pooled", None)
    return Batch(latent, condition, text, mask, pooled, ids, bucket, extras)


def draw_noise(identities: Sequence[str], shape_CTHW: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(noise_BCTHW, uniform_B): standard normal noise and a number in 0..1 of each identity."""
    noises, uniforms = [], []
    for identity in identities:
        generator = torch.Generator().manual_seed(derive_seed(identity, "noise"))
        uniforms.append(torch.rand((), generator=generator))
        noises.append(torch.randn(tuple(shape_CTHW), generator=generator))
    return torch.stack(noises), torch.stack(uniforms)


@dataclass(frozen=True)
class BatchLoader:
    """Reads the steps of one rank. low_discrepancy: of the choice of sigma, `spread_uniform`."""

    data: TrainSet
    schedule: BatchSchedule
    caption_dropout: float
    rank: int = 0
    world: int = 1
    low_discrepancy: bool = False

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
        draws = [f"{identity}/{it.id}" for identity, it in zip(identities, samples, strict=True)]
        batch = collate(samples, drawn.bucket, self.family, draws)
        noise, uniform = draw_noise(identities, batch.latents_BCTHW.shape[1:])
        if self.low_discrepancy:
            uniform = spread_uniform(seed, step, drawn.positions, self.schedule.global_batch)
        return MicroBatch(batch, noise, uniform, identities)

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
