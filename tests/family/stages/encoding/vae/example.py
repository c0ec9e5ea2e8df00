"""The example family's autoencoder: AutoencoderKL, frame by frame."""

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from schemas.family import Normalisation
from stages.encoding.vae import base

PARTS = base.COMPONENTS


class Autoencoder:
    def __init__(
        self,
        source: str,
        revision: str | None,
        dtype: torch.dtype,
        device: torch.device,
        levers: base.MemoryOptions = base.DEFAULT_MEMORY_OPTIONS,
        normalisation: Normalisation = base.SCALED,
    ) -> None:
        self._vae = base.load_vae(AutoencoderKL, source, revision, dtype, device)
        self._normaliser = base.Normaliser.of(self._vae, normalisation)

    def settings(self) -> dict[str, bool | int]:
        return {}

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.PosteriorMode) -> torch.Tensor:
        pixels_BCTHW = pixels_BCTHW.to(self._vae.device, self._vae.dtype)
        frames = [self._vae.encode(frame).latent_dist.parameters for frame in pixels_BCTHW.unbind(2)]
        return base.latents_from_posterior(torch.stack(frames, 2), seeds, posterior, self._normaliser).cpu()

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        latents_BCTHW = base.posterior_means(latents_BCTHW, self._vae.config.latent_channels)
        z_BCTHW = self._normaliser.undo(latents_BCTHW.to(self._vae.device, self._vae.dtype))
        return base.to_uint8(torch.stack([self._vae.decode(frame).sample for frame in z_BCTHW.unbind(2)], 2))
