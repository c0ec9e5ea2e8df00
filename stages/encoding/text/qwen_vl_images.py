"""Images inside Qwen2.5-VL's prompts. They are prepared as in the pipelines' processor, and their vision features are
computed once and replace the placeholders."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image
from torch.nn.functional import interpolate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from cache.models.weights import WeightsError
from schemas.devices import to_device_together
from stages.encoding.text.reader import PrefixCachedModel, PreparedPrompt


class QwenImageProcessor(Qwen2VLImageProcessorPil):
    """Qwen2-VL's image processor with the pipelines' results, which are torchvision's, without torchvision.

    transformers has a processor on tensors, which needs torchvision, and a processor on Pillow images. Their results
    differ by 8-bit levels in some pixels and in the order of the arithmetic. This class computes like the first and
    inherits everything else from the second: torchvision's bicubic resize is one call of torch
    (transforms/v2/functional/_geometry.py). It is also used if torchvision is installed, so bytes do not depend on
    torchvision. Images are uint8 (3, H, W) until they are normalized.

    The resize computes in integers with weights of 16 bits, with and without AVX2, so its bytes are the same on every
    CPU; one subtraction and one division in float32 follow.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        switches = ("do_resize", "do_rescale", "do_normalize")
        for key, expected in {"resample": Image.Resampling.BICUBIC, **dict.fromkeys(switches, True)}.items():
            if (value := getattr(self, key)) != expected:
                raise WeightsError(
                    f"preprocessor_config.json has {key}: {value}; it should be {json.dumps(expected)}",
                    "replace the file with the file of the published checkpoint",
                )

    def resize(  # type: ignore[override]  # as the parent's own resize
        self, image: np.ndarray, size: Any, resample: Any, factor: int, **_: Any
    ) -> np.ndarray:
        height, width = image.shape[-2:]
        target_size = smart_resize(height, width, factor, size.shortest_edge, size.longest_edge)
        if target_size == (height, width):
            return image
        pixels_1CHW = torch.from_numpy(np.ascontiguousarray(image))[None]
        resized = interpolate(pixels_1CHW, size=target_size, mode="bicubic", align_corners=False, antialias=True)
        return resized[0].numpy()

    def rescale(self, image: np.ndarray, scale: float, *_: Any, **__: Any) -> np.ndarray:
        """Returns the image unchanged, since `normalize` rescales it."""
        return image

    def normalize(self, image: np.ndarray, mean: Any, std: Any, *_: Any, **__: Any) -> np.ndarray:
        factor = 1.0 / self.rescale_factor
        mean_C11, std_C11 = (torch.tensor(values)[:, None, None] * factor for values in (mean, std))
        return torch.from_numpy(np.ascontiguousarray(image)).float().sub_(mean_C11).div_(std_C11).numpy()


# An image of 512 x 512 has 324 tokens, 2.3 MB of bfloat16 features on the device, 6 MB of pixels on the host.
MAX_CACHED_FEATURES = 64
MAX_CACHED_IMAGES = 16


@dataclass(frozen=True)
class ProcessedImage:
    """An image, ready for the vision model. key: hash of its content. grid_3: number of patches in time, height and
    width."""

    key: bytes
    pixels: torch.Tensor
    grid_3: torch.Tensor


@dataclass(frozen=True)
class PreparedImagePrompt(PreparedPrompt):
    """pictures: images in the order of their placeholders. positions_3L: positions of the tokens after the shared
    prefix."""

    pictures: tuple[ProcessedImage, ...] = ()
    positions_3L: torch.Tensor | None = None


class CachedImageProcessor:
    """Prepares Pillow images and caches the last few, since an image has several captions and a null prompt."""

    def __init__(self, folder: Path) -> None:
        """folder: directory with preprocessor_config.json."""
        self._images = QwenImageProcessor.from_pretrained(folder)
        self._cache: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._lock = Lock()

    def tokens(self, image: Image.Image) -> int:
        """The number of tokens of an image. Raises ValueError or ZeroDivisionError for an image that can't be used."""
        patches = self._images.get_number_of_image_patches(image.height, image.width)
        return patches // self._images.merge_size**2

    def is_resized(self, image: Image.Image) -> bool:
        """Whether the processor changes the size of the image."""
        size: Any = self._images.size
        factor, sides = self._images.patch_size * self._images.merge_size, (image.height, image.width)
        return smart_resize(*sides, factor, size.shortest_edge, size.longest_edge) != sides

    def picture(self, image: Image.Image) -> ProcessedImage:
        """The image prepared for the vision model."""
        key = xxhash.xxh3_128(image.tobytes(), seed=image.width).digest()
        with self._lock:
            processed = self._cache.pop(key, None)
            if processed is None:
                inputs = self._images(images=[image], return_tensors="pt")
                processed = ProcessedImage(key, inputs["pixel_values"], inputs["image_grid_thw"][0])
            self._cache[key] = processed
            while len(self._cache) > MAX_CACHED_IMAGES:
                self._cache.popitem(last=False)
        return processed


def vision_features(
    model: Any, pixels: torch.Tensor, grid_N3: torch.Tensor, device: torch.device, are_clips: bool = False
) -> tuple[torch.Tensor, ...]:
    """Features (tokens, D) of each picture or, with clips=True, of each clip. Positions and windows are computed here,
    because the model would wait for the device to read the sizes. model: the Qwen2_5_VLModel. pixels: patches, on the
    host. grid_N3: number of patches of each picture or clip in time, height and width."""
    visual = model.visual
    merge, config = visual.spatial_merge_size, visual.config
    order, windows = get_vision_window_index(grid_N3, merge, visual.window_size, visual.patch_size)
    ends = get_vision_cu_seqlens(grid_N3)
    host = [pixels, get_vision_position_ids(grid_N3, merge), order]
    longest = {}
    if "flash" in config._attn_implementation:  # other kernels read the windows' ends on the host
        longest = {"max_seqlen": int(ends.diff().max()), "max_window_seqlen": int(windows.diff().max())}
        host += [ends, windows]
    pixels, positions, order, *moved = to_device_together(host, device)
    ends, windows = moved or (ends, windows)
    prepared = {"position_ids": positions, "window_index": order, "cu_seqlens": ends, "cu_window_seqlens": windows}
    encode = model.get_video_features if are_clips else model.get_image_features
    return tuple(encode(pixels, grid_N3, **prepared, **longest).pooler_output)


class ImagePromptModel(PrefixCachedModel):
    """Reads prompts with images. Features replace the placeholders' embeddings, and positions are three-dimensional."""

    def __init__(
        self, model: Any, prefix: list[int], pad_id: int, device: torch.device, layers: Sequence[int] = (-1,)
    ) -> None:
        """model: the vision-language model without its head, whose language model reads the prompts."""
        super().__init__(model.language_model, prefix, pad_id, device, layers)
        self._model_with_vision = model
        self._image_id = model.config.image_token_id
        self._cache: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._batch_features: dict[bytes, torch.Tensor] = {}  # (tokens, D) of images in the current batch

    def prompt_positions(self, ids: list[int], prefix_length: int, pictures: Sequence[ProcessedImage]) -> torch.Tensor:
        """positions_3L of the tokens after the shared prefix. The images' tokens must be marked: otherwise the
        positions silently become one-dimensional.
        """
        ids_1L = torch.tensor([ids])
        marks_1L = (ids_1L == self._image_id).int()
        positions_31L, _ = self._model_with_vision.get_rope_index(
            ids_1L, marks_1L, image_grid_thw=torch.stack([picture.grid_3 for picture in pictures])
        )
        return positions_31L[:, 0, prefix_length:]

    @torch.no_grad()
    def hidden_states(
        self, texts: Sequence[PreparedPrompt], extras: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Encodes the batch's images first, since passes are divided by length instead of by image.

        Each image is encoded alone, so that its features depend on nothing else. The last features are cached, since a
        batch may end between the texts of one image.
        """
        self._batch_features = {}
        for picture in (picture for text in texts for picture in self._pictures(text)):
            features = self._cache.pop(picture.key, None)
            if features is None:
                self.stats.images += 1
                features = self._features(picture)
            else:
                self.stats.reused += 1
            self._cache[picture.key] = self._batch_features[picture.key] = features
        while len(self._cache) > MAX_CACHED_FEATURES:
            self._cache.popitem(last=False)
        return super().hidden_states(texts, extras)

    def _pictures(self, text: PreparedPrompt) -> tuple[ProcessedImage, ...]:
        assert isinstance(text, PreparedImagePrompt) and text.pictures
        return text.pictures

    def _features(self, picture: ProcessedImage) -> torch.Tensor:
        """Features (tokens, D) of one image."""
        return torch.cat(vision_features(self._model_with_vision, picture.pixels, picture.grid_3[None], self.device))

    def embeds(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor) -> torch.Tensor:
        embeds_BLD = super().embeds(texts, ids_BL)
        for row, place, features in self._placed_features(texts):
            embeds_BLD[row, place] = features.to(embeds_BLD.dtype)
        return embeds_BLD

    def _placed_features(self, texts: Sequence[PreparedPrompt]) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """The row of each image in the batch, the places of its tokens after the shared prefix, and its features."""
        for row, text in enumerate(texts):
            end = text.prefix_length
            for picture in self._pictures(text):
                features = self._batch_features[picture.key]
                first = text.ids.index(self._image_id, end)
                end = first + len(features)
                if set(text.ids[first:end]) != {self._image_id}:
                    raise WeightsError(
                        f"the vision model returns {len(features)} features for an image, and the prompt has "
                        "fewer placeholders: merge_size in preprocessor_config.json and spatial_merge_size of the text "
                        "encoder differ",
                        "replace both files with the files of the published checkpoint",
                    )
                yield row, slice(first - text.prefix_length, end - text.prefix_length), features

    def positions(self, texts: Sequence[PreparedPrompt], length: int) -> torch.Tensor:
        positions_3BL = torch.zeros(3, len(texts), length, dtype=torch.long)
        for row, text in enumerate(texts):
            assert isinstance(text, PreparedImagePrompt) and text.positions_3L is not None
            positions_3BL[:, row, : text.cost] = text.positions_3L
        return positions_3BL
