"""The deep-compression autoencoder of Sana: 32 channels, stride 32, no posterior."""

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Images: T is 1. The same image always gives the same latents: seeds and posterior have no effect.

    Its linear attention sums over the whole image, so tiles change every number and not only the seams.
    """

    vae_class = AutoencoderDC

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.PosteriorMode) -> torch.Tensor:
        return self._normalizer.apply(self._parameters(pixels_BCTHW.to(self._vae.device, self._vae.dtype)))

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        """The latents themselves."""
        assert pixels_BCTHW.shape[2] == 1, f"an image has one frame: {tuple(pixels_BCTHW.shape)}"
        return self._vae.encode(pixels_BCTHW[:, :, 0]).latent.unsqueeze(2)

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        return self._vae.decode(z_BCTHW[:, :, 0]).sample.unsqueeze(2)
