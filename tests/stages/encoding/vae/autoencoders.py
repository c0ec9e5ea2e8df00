"""The families' autoencoders with tiny weights: ours and diffusers'."""

import importlib
from typing import Any, NamedTuple

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from schemas.family import Family
from stages.encoding.vae.base import MemoryOptions
from tests.conformance.flavours import ROWS

CPU = torch.device("cpu")
LIMIT = 1e-5


class Kind(NamedTuple):
    """checkpoint: row of the conformance suite. takes_time: whether diffusers' class knows an axis of time."""

    checkpoint: str
    reference: Any
    takes_time: bool = False

    @property
    def family(self) -> Family:
        return ROWS[self.checkpoint].spec


AUTOENCODERS = {
    "flux": Kind("kandinsky5-image-i2i", AutoencoderKL),
    "hunyuan_video": Kind("kandinsky5-video-i2v", AutoencoderKLHunyuanVideo, True),
    "dc_ae": Kind("sana", AutoencoderDC),
    "qwen_image": Kind("qwen-image", AutoencoderKLQwenImage, True),
    "flux2": Kind("flux2-klein", AutoencoderKLFlux2),
    "wan": Kind("wan2.1-t2v", AutoencoderKLWan, True),
    "wan 5B": Kind("wan2.2-5b-i2v", AutoencoderKLWan, True),
}


def open_autoencoder(tiny, name: str, **memory_options) -> Any:
    """Ours, in float32."""
    torch.set_num_threads(1)
    kind = AUTOENCODERS[name]
    module = importlib.import_module(f"stages.encoding.vae.{kind.family.autoencoder}")
    options, normalization = MemoryOptions(**memory_options), kind.family.normalization
    return module.Autoencoder(str(tiny(kind.checkpoint)), None, torch.float32, CPU, options, normalization)


def open_reference(tiny, name: str) -> Any:
    kind = AUTOENCODERS[name]
    return kind.reference.from_pretrained(tiny(kind.checkpoint) / "vae").eval()
