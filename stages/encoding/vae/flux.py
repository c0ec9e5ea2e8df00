"""The Flux VAE of Kandinsky 5 Image: 16 channels, stride 8."""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Images: T is 1. Scales by scaling_factor and does not shift: Kandinsky's pipelines ignore shift_factor."""

    vae_class = AutoencoderKL

    @classmethod
    def apply_memory_options(cls, vae: Any, memory_options: base.MemoryOptions) -> None:
        """By default diffusers takes the tile from the checkpoint's sample_size, which is 1024 for Flux: no tiles at
        1024x1024."""
        vae.use_slicing = memory_options.slicing
        if memory_options.tile is not None and memory_options.tile_stride is not None:
            vae.enable_tiling()
            vae.tile_sample_min_size = memory_options.tile
            vae.tile_latent_min_size = memory_options.tile >> (len(vae.config.block_out_channels) - 1)
            vae.tile_overlap_factor = 1 - memory_options.tile_stride / memory_options.tile

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        assert pixels_BCTHW.shape[2] == 1, f"an image has one frame: {tuple(pixels_BCTHW.shape)}"
        return self._vae.encode(pixels_BCTHW[:, :, 0]).latent_dist.parameters.unsqueeze(2)

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        return self._vae.decode(z_BCTHW[:, :, 0]).sample.unsqueeze(2)
