"""The deep-compression autoencoder of Sana: 32 channels, stride 32, no posterior."""

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC

from schemas.family import Normalisation
from stages.encoding.vae import base

COMPONENTS = base.COMPONENTS
apply_memory_options = base.apply_memory_options


class Autoencoder:
    """Encodes and decodes images; the same image always gives the same latents, whatever the seed.

    Its linear attention sums over the whole picture, so tiles change every number and not the seams alone.
    """

    def __init__(
        self,
        source: str,
        revision: str | None,
        dtype: torch.dtype,
        device: torch.device,
        levers: base.MemoryOptions = base.DEFAULT_MEMORY_OPTIONS,
        normalisation: Normalisation = base.SCALED,
    ) -> None:
        self._vae = base.load_vae(AutoencoderDC, source, revision, dtype, device)
        apply_memory_options(self._vae, levers)
        self._normaliser = base.Normaliser.of(self._vae, normalisation)

    def settings(self) -> dict[str, bool | int]:
        """What else than weights and dtype determines the latents."""
        return base.read_tile_settings(self._vae)

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.PosteriorMode) -> torch.Tensor:
        """Scaled latents_BCTHW on the CPU of images in [-1, 1]; T is 1. seeds, posterior: of no effect."""
        assert pixels_BCTHW.shape[2] == 1, f"an image has one frame: {tuple(pixels_BCTHW.shape)}"
        pixels_BCHW = pixels_BCTHW[:, :, 0].to(self._vae.device, self._vae.dtype)
        latents_BCHW = self._normaliser.apply(self._vae.encode(pixels_BCHW).latent)
        return latents_BCHW.unsqueeze(2).cpu()

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 images_BTHWC on the CPU of scaled latents; T is 1."""
        latents_BCHW = latents_BCTHW[:, :, 0].to(self._vae.device, self._vae.dtype)
        images_BCHW = self._vae.decode(self._normaliser.undo(latents_BCHW)).sample
        return base.to_uint8(images_BCHW.unsqueeze(2))
