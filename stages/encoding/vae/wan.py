"""Wan's autoencoders: 2.1 with 16 channels and stride 8, and 2.2 TI2V-5B with 48 channels and stride 16; stride 4 in
time.

diffusers encodes a clip's first frame and then 4 frames at a time, and caches the earlier frames' features that the
causal convolutions need. So memory does not grow with the length of a clip, and `latents.chunk_frames` does not apply.
"""

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Clips of 1 + a multiple of 4 frames; for other lengths, diffusers drops the last frames."""

    vae_class = AutoencoderKLWan

    @classmethod
    def apply_memory_options(cls, vae: Any, memory_options: base.MemoryOptions) -> None:
        """diffusers cuts the encoder's input into tiles. In 2.2 one position of this input holds a patch of 2x2 pixels,
        so the tile's sides are divided by 2. When decoding, diffusers takes the same numbers as pixels, so tiles have
        half the side."""
        super().apply_memory_options(vae, memory_options)
        if memory_options.tile is not None and memory_options.tile_stride is not None:
            patch = vae.config.patch_size or 1
            vae.tile_sample_min_height = vae.tile_sample_min_width = memory_options.tile // patch
            vae.tile_sample_stride_height = vae.tile_sample_stride_width = memory_options.tile_stride // patch
