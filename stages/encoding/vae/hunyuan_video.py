"""The HunyuanVideo VAE of Kandinsky 5 Video: 16 channels, stride 8 in space and 4 in time.

diffusers encodes clips of more than 16 frames in overlapping windows. The result differs from encoding them whole, and
it is what users of the pipelines get, so it is kept, and part of the cache's fingerprint.
"""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo

from stages.encoding.vae import base, chunked


class Autoencoder(base.Autoencoder):
    """Clips of 1 + a multiple of 4 frames, with diffusers' defaults; `chunk_frames` gives the same with less memory."""

    vae_class = AutoencoderKLHunyuanVideo

    @classmethod
    def apply_memory_options(cls, vae: Any, memory_options: base.MemoryOptions) -> None:
        super().apply_memory_options(vae, memory_options)
        if memory_options.chunk_frames is not None:
            chunked.apply_chunking(vae, memory_options.chunk_frames)

    def settings(self) -> dict[str, bool | int]:
        """window, stride, chunk_frames: frames."""
        chunk = getattr(self._vae, "chunk_frames", None)
        return {
            **super().settings(),
            "framewise": self._vae.use_framewise_encoding,
            "window": self._vae.tile_sample_min_num_frames,
            "stride": self._vae.tile_sample_stride_num_frames,
            **({} if chunk is None else {"chunk_frames": chunk}),
        }

    def _parameters(self, pixels_BCTHW: torch.Tensor) -> torch.Tensor:
        assert pixels_BCTHW.shape[2] % 4 == 1, f"frames: {tuple(pixels_BCTHW.shape)}"
        return self._vae.encode(pixels_BCTHW).latent_dist.parameters

    def _decode(self, z_BCTHW: torch.Tensor) -> torch.Tensor:
        return self._vae.decode(z_BCTHW).sample
