"""Qwen-Image-2.1's autoencoder: 64 channels, stride 16, pixels with alpha. Pictures are opaque, and the alpha of a
decoded picture is dropped."""

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21

from stages.encoding.vae import base

OPAQUE = 1.0  # alpha in -1..1


class Autoencoder(base.Autoencoder):
    """Images: T is 1."""

    vae_class = AutoencoderKLQwenImage21

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        return super()._parameters(F.pad(pixels_BCTHW, (0, 0, 0, 0, 0, 0, 0, 1), value=OPAQUE))

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        return super()._decode(z_BCTHW)[:, :3]
