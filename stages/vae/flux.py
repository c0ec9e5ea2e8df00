"""The Flux VAE of Kandinsky 5 Image: 16 channels, stride 8."""

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from stages.vae import base

PARTS = base.PARTS


class Autoencoder:
    """Scales by scaling_factor and does not shift: Kandinsky's pipelines ignore shift_factor."""

    def __init__(self, source: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> None:
        self._vae = base.load(AutoencoderKL, source, revision, dtype, device)

    def settings(self) -> dict[str, bool | int | str]:
        """What else than weights and dtype determines the latents."""
        return {"tiling": self._vae.use_tiling}

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.Posterior) -> torch.Tensor:
        """Scaled latents_BCTHW on the CPU of images in [-1, 1]; T is 1. seeds: one of each sample."""
        assert pixels_BCTHW.shape[2] == 1, f"an image has one frame: {tuple(pixels_BCTHW.shape)}"
        pixels_BCHW = pixels_BCTHW[:, :, 0].to(self._vae.device, self._vae.dtype)
        parameters = self._vae.encode(pixels_BCHW).latent_dist.parameters
        latents_BCHW = base.draw(parameters, seeds, posterior) * self._vae.config.scaling_factor
        return latents_BCHW.unsqueeze(2).cpu()

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 images_BTHWC on the CPU of scaled latents; T is 1."""
        latents_BCHW = latents_BCTHW[:, :, 0].to(self._vae.device, self._vae.dtype)
        images_BCHW = self._vae.decode(latents_BCHW / self._vae.config.scaling_factor).sample
        return base.to_bytes(images_BCHW.unsqueeze(2))
