"""Qwen-Image's autoencoder: 16 channels, stride 8. It is an autoencoder for videos; an image is a video's first
frame."""

from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Images: T is 1."""

    vae_class = AutoencoderKLQwenImage
