"""The Flux VAE of Kandinsky 5 Image: 16 channels, stride 8."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from schemas.family import Normalisation
from stages.encoding.vae import base

COMPONENTS = base.COMPONENTS


def apply_memory_options(vae: Any, levers: base.MemoryOptions) -> None:
    """Put the levers in force. By itself diffusers takes a tile from the checkpoint's sample_size, which is 1024 for
    Flux: no tiles at 1024x1024."""
    vae.use_slicing = levers.slicing
    if levers.tile is not None and levers.tile_stride is not None:
        vae.enable_tiling()
        vae.tile_sample_min_size = levers.tile
        vae.tile_latent_min_size = levers.tile >> (len(vae.config.block_out_channels) - 1)
        vae.tile_overlap_factor = 1 - levers.tile_stride / levers.tile


class Autoencoder:
    """Scales by scaling_factor and does not shift: Kandinsky's pipelines ignore shift_factor."""

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
        apply_memory_options(self._vae, levers)
        self._normaliser = base.Normaliser.of(self._vae, normalisation)

    def settings(self) -> dict[str, bool | int]:
        """What else than weights and dtype determines the latents."""
        side = self._vae.tile_sample_min_size
        if not self._vae.use_tiling:
            return {"tiling": False}
        return {"tiling": True, "tile": side, "tile_stride": int(side * (1 - self._vae.tile_overlap_factor))}

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.PosteriorMode) -> torch.Tensor:
        """Scaled latents_BCTHW, or moments, on the CPU of images in [-1, 1]; T is 1. seeds: one of each sample."""
        assert pixels_BCTHW.shape[2] == 1, f"an image has one frame: {tuple(pixels_BCTHW.shape)}"
        pixels_BCHW = pixels_BCTHW[:, :, 0].to(self._vae.device, self._vae.dtype)
        parameters = self._vae.encode(pixels_BCHW).latent_dist.parameters
        return base.latents_from_posterior(parameters, seeds, posterior, self._normaliser).unsqueeze(2).cpu()

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 images_BTHWC on the CPU of scaled latents, or of moments' mean; T is 1."""
        latents_BCTHW = base.posterior_means(latents_BCTHW, self._vae.config.latent_channels)
        latents_BCHW = latents_BCTHW[:, :, 0].to(self._vae.device, self._vae.dtype)
        images_BCHW = self._vae.decode(self._normaliser.undo(latents_BCHW)).sample
        return base.to_uint8(images_BCHW.unsqueeze(2))
