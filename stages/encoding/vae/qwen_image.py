"""Qwen-Image's autoencoder: 16 channels, stride 8. It is one for videos, of which an image is the first frame."""

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Images: T is 1."""

    vae_class = AutoencoderKLQwenImage

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        assert pixels_BCTHW.shape[2] == 1, f"an image has one frame: {tuple(pixels_BCTHW.shape)}"
        return self._vae.encode(pixels_BCTHW).latent_dist.parameters

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        return self._vae.decode(z_BCTHW).sample
