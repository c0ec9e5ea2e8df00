"""The example family's autoencoder: AutoencoderKL, frame by frame."""

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from schemas.family import Normalisation
from stages.vae import base

PARTS = base.PARTS


class Autoencoder:
    def __init__(
        self,
        source: str,
        revision: str | None,
        dtype: torch.dtype,
        device: torch.device,
        levers: base.Levers = base.NO_LEVERS,
        normalisation: Normalisation = base.SCALED,
    ) -> None:
        self._vae = base.load(AutoencoderKL, source, revision, dtype, device)
        self._normaliser = base.Normaliser.of(self._vae, normalisation)

    def settings(self) -> dict[str, bool | int]:
        return {}

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.Posterior) -> torch.Tensor:
        pixels_BCTHW = pixels_BCTHW.to(self._vae.device, self._vae.dtype)
        frames = [self._vae.encode(frame).latent_dist.parameters for frame in pixels_BCTHW.unbind(2)]
        return base.draw(torch.stack(frames, 2), seeds, posterior, self._normaliser).cpu()

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        latents_BCTHW = base.means(latents_BCTHW, self._vae.config.latent_channels)
        z_BCTHW = self._normaliser.undo(latents_BCTHW.to(self._vae.device, self._vae.dtype))
        return base.to_bytes(torch.stack([self._vae.decode(frame).sample for frame in z_BCTHW.unbind(2)], 2))
