"""Wan's autoencoders: of 2.1, 16 channels, stride 8, and of 2.2 TI2V-5B, 48 channels, stride 16; both 4 in time.

diffusers encodes a clip's first frame and then 4 frames at a time, with what the causal convolutions need of the frames
before. So the memory does not grow with the length of a clip, and `latents.chunk_frames` has nothing to change.
"""

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Clips of 1 + a multiple of 4 frames; of other lengths diffusers leaves the last frames out."""

    vae_class = AutoencoderKLWan

    @classmethod
    def apply_memory_options(cls, vae: Any, memory_options: base.MemoryOptions) -> None:
        """diffusers cuts the encoder's input, of which 2.2 has made each square of 2x2 pixels one; in decoding the same
        numbers are pixels, and tiles have half the side there."""
        super().apply_memory_options(vae, memory_options)
        if memory_options.tile is not None and memory_options.tile_stride is not None:
            patch = vae.config.patch_size or 1
            vae.tile_sample_min_height = vae.tile_sample_min_width = memory_options.tile // patch
            vae.tile_sample_stride_height = vae.tile_sample_stride_width = memory_options.tile_stride // patch
