"""The families' autoencoders with tiny weights: ours and diffusers'."""

import importlib
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from PIL import Image

from schemas.catalog import FAMILIES
from schemas.family import Family
from stages.encoding.vae.base import MemoryOptions
from stages.media.sample_reader import normalize_pixels
from tests.project import SETTINGS

CPU = torch.device("cpu")
LIMIT = 1e-5


class Kind(NamedTuple):
    """stride: stride in space. frames: numbers of frames to test. takes_time: whether diffusers' class has an axis of
    time."""

    checkpoint: str
    reference: Any
    stride: int
    frames: tuple[int, ...] = (1,)
    takes_time: bool = False

    @property
    def family(self) -> Family:
        return FAMILIES[SETTINGS[self.checkpoint]["family"]]


AUTOENCODERS = {
    "flux": Kind("kandinsky5-image-i2i", AutoencoderKL, 8),
    "hunyuan_video": Kind("kandinsky5-video-i2v", AutoencoderKLHunyuanVideo, 8, (5, 21), True),
    "dc_ae": Kind("sana", AutoencoderDC, 32),
    "qwen_image": Kind("qwen-image", AutoencoderKLQwenImage, 8, (1,), True),
    "flux2": Kind("flux2-klein", AutoencoderKLFlux2, 16),
    "wan": Kind("wan2.1-t2v", AutoencoderKLWan, 8, (1, 9), True),
    "wan 5B": Kind("wan2.2-5b-i2v", AutoencoderKLWan, 16, (1, 9), True),
    "shifted flux": Kind("z-image", AutoencoderKL, 8),
}


def open_autoencoder(tiny, name: str, **memory_options) -> Any:
    """Our autoencoder, in float32."""
    torch.set_num_threads(1)
    kind = AUTOENCODERS[name]
    module = importlib.import_module(f"stages.encoding.vae.{kind.family.autoencoder}")
    options, normalization = MemoryOptions(**memory_options), kind.family.normalization
    return module.Autoencoder(str(tiny(kind.checkpoint)), None, torch.float32, CPU, options, normalization)


def open_reference(tiny, name: str) -> Any:
    kind = AUTOENCODERS[name]
    return kind.reference.from_pretrained(tiny(kind.checkpoint) / "vae").eval()


def frames(count: int = 1, seed: int = 0, width: int = 96, height: int = 64) -> np.ndarray:
    """uint8 (T, H, W, 3): coarse colored shapes that drift, with grain."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height)))
    moving = np.stack([np.roll(picture, 3 * step, axis=1) for step in range(count)])
    return np.clip(moving.astype(int) + random.integers(-8, 9, moving.shape), 0, 255).astype(np.uint8)


def pixels(*clips: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([normalize_pixels(clip) for clip in clips]))
