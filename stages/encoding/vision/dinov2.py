"""DINOv2's patch tokens of frames, by `transformers`, pooled to a clip's latent frames."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cache.models.single_model import CONFIG_FILE
from stages.encoding import model_loading
from stages.encoding.vision.features import PATCH_SIZE, GridSize, require_dinov2_class
from stages.encoding.vision.pooling import pool_space, pool_time

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def resize_frames(
    frames_FHWC: np.ndarray, grid: GridSize, mapped: Callable[..., Iterable[np.ndarray]] = map
) -> np.ndarray:
    """uint8 frames at the size that gives these patches, by Pillow's bicubic as in DINOv2's image processor.

    each: `map`, or that of a thread pool: Pillow releases the GIL.
    """
    assert frames_FHWC.dtype == np.uint8 and frames_FHWC.shape[-1] == 3, frames_FHWC.shape
    size = (grid[1] * PATCH_SIZE, grid[0] * PATCH_SIZE)

    def resized(frame_HWC: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(frame_HWC).resize(size, Image.Resampling.BICUBIC))

    return np.stack(list(mapped(resized, frames_FHWC)))


class Encoder:
    """One DINOv2, with or without register tokens, for inference."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises WeightsError for damaged weights and for missing ones."""
        import transformers

        model_class = getattr(transformers, require_dinov2_class(str(folder), folder / CONFIG_FILE))
        with model_loading.reading_errors(str(folder), "the DINOv2"):
            mask = "embeddings.mask_token"  # for training only
            model = model_loading.load_complete(model_class, folder, dtype, unneeded=[mask])
        self._model: Any = model.to(device)
        #: Before the patches: class and registers.
        self._leading_tokens = 1 + getattr(model.config, "num_register_tokens", 0)
        self._mean = torch.tensor(IMAGENET_MEAN, device=device).view(1, 3, 1, 1)
        self._deviation = torch.tensor(IMAGENET_STD, device=device).view(1, 3, 1, 1)

    @torch.no_grad()
    def patches(self, frames_BHWC: np.ndarray) -> torch.Tensor:
        """features_BHWC of the patches, after the last norm, on the model's device in its dtype.

        frames_BHWC: uint8, sides multiples of 14.
        """
        height, width = frames_BHWC.shape[1:3]
        assert height % PATCH_SIZE == width % PATCH_SIZE == 0, f"{width}x{height} has no whole patches"
        bytes_BHWC = torch.from_numpy(np.ascontiguousarray(frames_BHWC)).to(self._mean.device)
        unit_BCHW = bytes_BHWC.permute(0, 3, 1, 2).float() * (1 / 255)
        pixels_BCHW = (unit_BCHW - self._mean) / self._deviation
        tokens_BLC = self._model(pixels_BCHW.to(self._model.dtype)).last_hidden_state[:, self._leading_tokens :]
        return tokens_BLC.unflatten(1, (height // PATCH_SIZE, width // PATCH_SIZE))

    def clips(self, clips: list[np.ndarray], grid: GridSize, stride: int, limit: int) -> list[torch.Tensor]:
        """bfloat16 features_THWC on the CPU, pooled to `grid` and to latent frames, of uint8 clips_FHWC of one size.

        limit: frames of one forward pass; a longer clip takes several. Pooling is in float32.
        """
        frames_BHWC = clips[0] if len(clips) == 1 else np.concatenate(clips)
        starts = range(0, len(frames_BHWC), limit)
        pooled = [pool_space(self.patches(frames_BHWC[start : start + limit]), grid) for start in starts]
        pooled_clips = torch.cat(pooled).split([len(clip) for clip in clips])
        return [pool_time(features_FHWC, stride).to(torch.bfloat16).cpu() for features_FHWC in pooled_clips]
