"""FLUX.2's autoencoder: 32 channels, stride 8. The model reads squares of 2x2 latents: 128 channels, stride 16.

Buffers of the autoencoder, the means and variances of the 128 channels, normalize the latents.
"""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

from schemas.family import Normalization
from stages.encoding.vae import base, flux

EDGE = 2  # latents: side of a square


class Autoencoder(flux.Autoencoder):
    """Images: T is 1. Tiles are configured as in AutoencoderKL."""

    vae_class = AutoencoderKLFlux2

    def _make_normalizer(self, named: Normalization) -> base.Normalizer:
        return SquareNormalizer.from_buffers(self._vae)

    def _channels(self) -> int:
        return EDGE**2 * super()._channels()


class SquareNormalizer(base.Normalizer):
    """From the autoencoder's latents (B, C, 1, H, W) to the model's (B, 4 C, 1, H / 2, W / 2)."""

    @classmethod
    def from_buffers(cls, vae: Any) -> "SquareNormalizer":
        """Computed in the buffers' own dtype, as in the pipeline."""
        statistics = vae.bn
        deviation = torch.sqrt(statistics.running_var + vae.config.batch_norm_eps)
        return cls(1.0, tuple(statistics.running_mean.tolist()), tuple(deviation.tolist()))

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        return super().apply(to_squares(z))

    def undo(self, latents: torch.Tensor) -> torch.Tensor:
        return from_squares(super().undo(latents))

    def logvar(self, logvar: torch.Tensor) -> torch.Tensor:
        return super().logvar(to_squares(logvar))


def to_squares(z_BC1HW: torch.Tensor) -> torch.Tensor:
    """(B, 4 C, 1, H / 2, W / 2): for each channel, the four latents of a square, row by row."""
    squares = z_BC1HW.unflatten(4, (-1, EDGE)).unflatten(3, (-1, EDGE))  # B C 1 H/2 2 W/2 2
    return squares.permute(0, 1, 4, 6, 2, 3, 5).flatten(1, 3)


def from_squares(latents_BC1HW: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_squares`."""
    squares = latents_BC1HW.unflatten(1, (-1, EDGE, EDGE))  # B C 2 2 1 H/2 W/2
    return squares.permute(0, 1, 4, 5, 2, 6, 3).flatten(5, 6).flatten(3, 4)
