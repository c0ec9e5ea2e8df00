"""The HunyuanVideo VAE of Kandinsky 5 Video: 16 channels, stride 8 in space and 4 in time.

diffusers encodes clips of more than 16 frames in overlapping windows. That is another result than encoding
them whole, and it is what the pipelines' users have, so it is kept, and named in the cache's fingerprint.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo

from schemas.family import Normalisation
from stages.encoding.vae import base, chunked

COMPONENTS = base.COMPONENTS


def apply_memory_options(vae: Any, levers: base.MemoryOptions) -> None:
    """Put the levers in force."""
    base.apply_memory_options(vae, levers)
    if levers.chunk_frames is not None:
        chunked.apply_chunking(vae, levers.chunk_frames)


class Autoencoder:
    """Encodes and decodes clips with diffusers' defaults; `chunk_frames` computes the same with less memory."""

    def __init__(
        self,
        source: str,
        revision: str | None,
        dtype: torch.dtype,
        device: torch.device,
        levers: base.MemoryOptions = base.DEFAULT_MEMORY_OPTIONS,
        normalisation: Normalisation = base.SCALED,
    ) -> None:
        self._vae = base.load_vae(AutoencoderKLHunyuanVideo, source, revision, dtype, device)
        apply_memory_options(self._vae, levers)
        self._normaliser = base.Normaliser.of(self._vae, normalisation)

    def settings(self) -> dict[str, bool | int]:
        """What else than weights and dtype determines the latents. window, stride, chunk_frames: frames."""
        chunk = getattr(self._vae, "chunk_frames", None)
        return {
            **base.read_tile_settings(self._vae),
            "framewise": self._vae.use_framewise_encoding,
            "window": self._vae.tile_sample_min_num_frames,
            "stride": self._vae.tile_sample_stride_num_frames,
            **({} if chunk is None else {"chunk_frames": chunk}),
        }

    @torch.no_grad()
    def encode(self, pixels_BCTHW: torch.Tensor, seeds: Sequence[int], posterior: base.PosteriorMode) -> torch.Tensor:
        """Scaled latents_BCTHW, or moments, on the CPU of clips in [-1, 1]; T is 1 + a multiple of 4."""
        assert pixels_BCTHW.shape[2] % 4 == 1, f"frames: {tuple(pixels_BCTHW.shape)}"
        pixels_BCTHW = pixels_BCTHW.to(self._vae.device, self._vae.dtype)
        parameters = self._vae.encode(pixels_BCTHW).latent_dist.parameters
        return base.latents_from_posterior(parameters, seeds, posterior, self._normaliser).cpu()

    @torch.no_grad()
    def decode(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """uint8 frames_BTHWC on the CPU of scaled latents, or of moments' mean; 4 (T - 1) + 1 frames."""
        latents_BCTHW = base.posterior_means(latents_BCTHW, self._vae.config.latent_channels)
        latents_BCTHW = latents_BCTHW.to(self._vae.device, self._vae.dtype)
        return base.to_uint8(self._vae.decode(self._normaliser.undo(latents_BCTHW)).sample)
