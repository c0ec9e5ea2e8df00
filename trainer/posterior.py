"""Latents from stored moments: where a shard has mean and log-variance, every training step draws a new sample."""

import torch

from cache.trainset import SetError
from schemas.family import Family
from schemas.identity import derive_seed


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
    generator = torch.Generator().manual_seed(derive_seed(identity, "posterior"))
    return mean + (logvar / 2).exp() * torch.randn(mean.shape, generator=generator)
