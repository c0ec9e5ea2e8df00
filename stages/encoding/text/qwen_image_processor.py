"""Qwen2-VL's image processor with the pipelines' results, which are torchvision's, without torchvision.

transformers has one on tensors, by torchvision, which the pipelines' Qwen2VLProcessor needs, and one on Pillow images.
They differ by 8-bit levels in some pixels and in the order of the arithmetic. This class computes as the first and
takes everything else from the second: for bytes on a CPU, torchvision's bicubic resize is one call of torch
(transforms/v2/functional/_geometry.py). It is used where torchvision is installed, too, so bytes do not depend on that.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from cache.models.weights import WeightsError


class QwenImageProcessor(Qwen2VLImageProcessorPil):
    """Images are uint8 (3, H, W) until they are normalised.

    The resize computes in integers with weights of 16 bits, with and without AVX2, so its bytes are the same on every
    CPU; one subtraction and one division in float32 follow.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.resample != Image.Resampling.BICUBIC:
            raise WeightsError(
                f"tokenizer/preprocessor_config.json has resample: {self.resample}; it should be 3 (bicubic)",
                "replace the file with that of the published checkpoint",
            )

    def resize(  # type: ignore[override]  # as the parent's own resize
        self, image: np.ndarray, size: Any, resample: Any, factor: int, **_: Any
    ) -> np.ndarray:
        height, width = image.shape[-2:]
        wanted = smart_resize(height, width, factor, size.shortest_edge, size.longest_edge)
        if wanted == (height, width):
            return image
        pixels_1CHW = torch.from_numpy(np.ascontiguousarray(image))[None]
        resized = interpolate(pixels_1CHW, size=wanted, mode="bicubic", align_corners=False, antialias=True)
        return resized[0].numpy()

    def rescale(self, image: np.ndarray, scale: float, *_: Any, **__: Any) -> np.ndarray:
        """`normalize` does this, too."""
        assert self.do_normalize
        return image

    def normalize(self, image: np.ndarray, mean: Any, std: Any, *_: Any, **__: Any) -> np.ndarray:
        factor = 1.0 / self.rescale_factor
        mean_C11, std_C11 = (torch.tensor(values)[:, None, None] * factor for values in (mean, std))
        return torch.from_numpy(np.ascontiguousarray(image)).float().sub_(mean_C11).div_(std_C11).numpy()
