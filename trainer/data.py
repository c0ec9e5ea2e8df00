"""From shards to tensors: the only place where numpy becomes torch.

Noise, sigma and the draw from a stored posterior are functions of (seed, step, position in the global batch), so a
resumed run, or one on another number of ranks, gets the same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from cache.schedule import BatchSchedule, Ints, choose_captions, draw_caption_dropout
from cache.tensors import Array
from cache.trainset import Sample, SetError, TrainSet
from schemas.catalogue import FAMILIES
from schemas.family import Family
from schemas.identity import derive_seed
from trainer.batch import Batch, pad_text, stack

T = TypeVar("T")

PREFETCH_STEPS = 2  # steps read ahead


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on one rank. noise_BCTHW and sigma_normal_B (for sigma): standard normal, float32."""

    batch: Batch
    noise_BCTHW: torch.Tensor
    sigma_normal_B: torch.Tensor


@dataclass(frozen=True)
class StepBatches:
    """This rank's share of one optimizer step."""

    step: int
    epoch: int
    bucket: str
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


def draw_noise(seed: int, step: int, positions: Ints, shape_CTHW: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(noise_BCTHW, normal_B), standard normal, of the given positions of a step's global batch."""
    noises, normals = [], []
    for position in positions:
        generator = torch.Generator().manual_seed(derive_seed(f"{seed}/{step}/{int(position)}", "noise"))
        normals.append(torch.randn((), generator=generator))
        noises.append(torch.randn(tuple(shape_CTHW), generator=generator))
    return torch.stack(noises), torch.stack(normals)


@dataclass(frozen=True)
class BatchLoader:
    """Reads the steps of one rank. batch_size: samples of one forward pass."""

    data: TrainSet
    schedule: BatchSchedule
    batch_size: int
    caption_dropout: float
    rank: int = 0
    world: int = 1

    @property
    def family(self) -> Family:
        return FAMILIES[self.data.meta["family"]]

    def step(self, number: int) -> StepBatches:
        """The micro-batches of optimizer step `number` (from 0). DamageError where a shard is damaged."""
        positions, share = self.schedule.batch(number).for_rank(self.rank, self.world)
        seed, micro_batches = self.schedule.seed, []
        captions = choose_captions(seed, share.rows, share.passes, self.data.caption_counts(share.rows))
        dropped = draw_caption_dropout(seed, number, positions, self.caption_dropout)
        for first in range(0, len(positions), self.batch_size):
            indices = range(first, first + self.batch_size)
            samples = [self.data.sample(int(share.rows[i]), int(captions[i]), bool(dropped[i])) for i in indices]
            draws = [f"{seed}/{number}/{positions[i]}/{it.id}" for i, it in zip(indices, samples, strict=True)]
            batch = collate(samples, share.bucket, self.family, draws)
            noise, normal = draw_noise(seed, number, positions[first : indices.stop], batch.latents_BCTHW.shape[1:])
            micro_batches.append(MicroBatch(batch, noise, normal))
        return StepBatches(number, share.epoch, share.bucket, micro_batches)

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
