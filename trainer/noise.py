"""Random numbers of samples: functions of an identity, a purpose and an index, equal on a CPU and on a GPU.

Word n of a stream is word n of Philox4x64-10, a counter-based generator (Salmon et al. 2011, "Parallel Random Numbers:
As Easy as 1, 2, 3"), with `derive_seed(identity, purpose)` as its key. So a sample's noise does not depend on the rest
of its batch, on ranks, threads or the parts in which it is computed, and it starts with the same numbers in every
shape.

On a CPU the words are numpy's, whose bit generators keep their streams from release to release. On other devices
`philox` computes the same words by torch's integer operations, because libraries do not provide them: the generators of
torch and cuRAND give different numbers on each device, and their counters depend on the kernel launch; Triton's
generator, for custom kernels, needs a GPU and a compiler. These libraries use Philox4x32, which would need our own code
on a CPU too, and would be slower: numpy has 4x64.

Normal numbers are computed in float64 and rounded once. If a logarithm, sine or cosine of another device or processor
differs in its last bit, fewer than one number in ten million differ, by one rounding. `benchmarks/noise.py` has the
cost.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from cache.sets.trainset import SetError
from schemas.devices import has_float64, to_device
from schemas.family import Family
from schemas.identity import derive_seed
from trainer.batch import Batch

#: Number of words computed at a time. On a CPU they fit its caches, and torch computes them in the calling thread, a
#: thread that reads ahead, because the tensor has less than 32768 numbers; on other devices they need some 40 MiB.
CPU_PART, DEVICE_PART = 1 << 14, 1 << 19
LOW_32 = 0xFFFFFFFF
#: Factors of the first and third word of a counter, and increments of a key's words in each round.
FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10


def seeded_noise(
    identities: Sequence[str], purpose: str, shape: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(B, *shape) standard normal numbers of each identity, float32. A word gives two, by Box and Muller's method from
    32 bits each, so none is beyond 6.8."""
    target, count = torch.device(device), math.prod(shape)
    if not has_float64(target):
        return seeded_noise(identities, purpose, shape).to(target)
    noise_BWP = torch.empty(len(identities), -(-count // 2), 2, device=device)
    for rows, places, words in draw_words(identities, purpose, noise_BWP.shape[1], noise_BWP.device):
        radius = (words >> 32).bitwise_and_(LOW_32).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = (words & LOW_32).double().mul_(2 * math.pi * 2.0**-32)
        noise_BWP[rows, places, 0] = angle.cos().mul_(radius)
        noise_BWP[rows, places, 1] = angle.sin_().mul_(radius)
    return noise_BWP.flatten(1)[:, :count].reshape(-1, *shape)


def seeded_uniform(
    identities: Sequence[str], purpose: str, shape: Sequence[int] = (), device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(B, *shape) numbers of each identity in 0..1, 1 excluded: float32, multiples of 2**-24, one of a word's first 24
    bits."""
    uniform_BN = torch.empty(len(identities), math.prod(shape), device=device)
    for rows, places, words in draw_words(identities, purpose, uniform_BN.shape[1], uniform_BN.device):
        uniform_BN[rows, places] = ((words >> 40) & 0xFFFFFF).float().mul_(2.0**-24)
    return uniform_BN.view(-1, *shape)


def draw_latents(batch: Batch, family: Family, identities: Sequence[str]) -> Batch:
    """Returns the batch with latents and condition drawn from moments, if they are stored as moments. Raises SetError
    for an invalid number of channels.

    identities: (B,) strings that determine the noise of each sample's draw.
    """
    condition = batch.condition_BCTHW
    if condition is not None:
        condition = sample_latents(condition, family, identities, "posterior/condition")
    latents = sample_latents(batch.latents_BCTHW, family, identities)
    return replace(batch, latents_BCTHW=latents, condition_BCTHW=condition)


def sample_latents(
    stored_BCTHW: torch.Tensor, family: Family, identities: Sequence[str], purpose: str = "posterior"
) -> torch.Tensor:
    """Returns float32 latents (B, C, T, h, w) from stored latents, or from moments, which have twice the channels.
    Raises SetError for any other number of channels.

    Moments are mean and log-variance in model space, joined along the channels; the latent is mean + exp(logvar / 2) *
    noise, with standard normal noise of each identity, computed on the device of the moments.
    """
    stored_BCTHW, channels = stored_BCTHW.float(), family.latent_channels
    stored_channels = stored_BCTHW.shape[1]
    if stored_channels == channels:
        return stored_BCTHW
    if stored_channels != 2 * channels or not family.posterior:
        raise SetError(
            f"a stored latent has {stored_channels} channels; {family.name} has {channels}"
            + (f", or {2 * channels} with the log-variance" if family.posterior else ""),
            "Its shard was made for another model: run `latentpress encode-latents` and `latentpress index`.",
        )
    mean, logvar = stored_BCTHW.chunk(2, 1)
    return mean + (logvar / 2).exp() * seeded_noise(identities, purpose, mean.shape[1:], mean.device)


def draw_words(
    identities: Sequence[str], purpose: str, count: int, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yields words 0..count-1 of each identity's stream in parts: slice of the identities, slice of the words, and
    their 64 bits as int64 on the device."""
    seeds = [derive_seed(identity, purpose) for identity in identities]
    if device.type == "cpu":
        together = max(1, CPU_PART // count)
        for row in range(0, len(seeds), together):
            streams = [np.random.Philox(key=seed) for seed in seeds[row : row + together]]
            for start in range(0, count, CPU_PART):
                places = slice(start, min(start + CPU_PART, count))
                words = np.stack([stream.random_raw(places.stop - start) for stream in streams])
                yield slice(row, row + len(streams)), places, torch.from_numpy(words.view(np.int64))
        return
    key_B = to_device(torch.tensor(seeds), device)
    part = max(4, DEVICE_PART // len(seeds) // 4 * 4)
    for start in range(0, count, part):
        places = slice(start, min(start + part, count))
        yield slice(None), places, compute_words(key_B, places)


def compute_words(key_B: torch.Tensor, places: slice) -> torch.Tensor:
    """(B, places) words, on the keys' device, of numpy's generator with these keys. The first place is a multiple of 4:
    a counter gives 4 words, and numpy counts before it computes, so from 1."""
    counter_N = torch.arange(places.start // 4 + 1, -(-places.stop // 4) + 1, device=key_B.device)
    counter = torch.stack([counter_N, *[torch.zeros_like(counter_N)] * 3])
    words_4BN = philox(counter[:, None], torch.stack([key_B, torch.zeros_like(key_B)])[..., None])
    return words_4BN.permute(1, 2, 0).flatten(1)[:, : places.stop - places.start]


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(4, ...) words of Philox4x64-10. counter: (4, ...), key: (2, ...), in shapes that can be broadcast. All are int64
    with the bits of unsigned words: torch's sums and products are modulo 2**64 on every device."""
    factors, steps = (constant.view(2, *[1] * (key.dim() - 1)) for constant in constants(key.device))
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for _ in range(ROUNDS):
        high, low = multiply(even, factors)
        even, odd, key = high.flip(0) ^ odd ^ key, low.flip(0), key + steps
    return torch.stack([even[0], odd[0], even[1], odd[1]])


def multiply(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 64 bits of the product of unsigned numbers of 64 bits, from products of their halves. Such a
    product and a half added to it fit 64 bits."""
    (a_high, a_low), (b_high, b_low) = (((factor >> 32) & LOW_32, factor & LOW_32) for factor in (a, b))
    middle = a_high * b_low + ((a_low * b_low >> 32) & LOW_32)
    carried = a_low * b_high + (middle & LOW_32)
    return a_high * b_high + ((middle >> 32) & LOW_32) + ((carried >> 32) & LOW_32), a * b


@cache
def constants(device: torch.device) -> torch.Tensor:
    """(2, 2) int64 on the device: FACTORS and KEY_STEPS."""
    return to_device(torch.from_numpy(np.array([FACTORS, KEY_STEPS], np.uint64).view(np.int64)), device)
