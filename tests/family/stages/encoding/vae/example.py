"""The example family's autoencoder: AutoencoderKL, frame by frame."""

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    vae_class = AutoencoderKL

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._vae.encode(frame).latent_dist.parameters for frame in pixels_BCTHW.unbind(2)], 2)

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._vae.decode(frame).sample for frame in z_BCTHW.unbind(2)], 2)
