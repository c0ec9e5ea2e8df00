"""Images inside prompts: Qwen2.5-VL's vision features, once for each distinct image, and its positions."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import xxhash
from PIL import Image

from stages.encoding.text.prefix_cache import PrefixCachedModel
from stages.encoding.text.request import PreparedPrompt

# A source of 1024 x 1024 has 324 tokens, 2.3 MB of bfloat16 features on the device, 6 MB of pixels on the host.
MAX_CACHED_FEATURES = 64
MAX_CACHED_IMAGES = 16


@dataclass(frozen=True)
class ProcessedImage:
    """An image, ready for the vision model. key: hash of its content. grid_3: patches in time, height and width."""

    key: bytes
    pixels: torch.Tensor
    grid_3: torch.Tensor


@dataclass(frozen=True)
class PreparedImagePrompt(PreparedPrompt):
    """positions_3L: of the tokens after the shared ones."""

    picture: ProcessedImage | None = None
    positions_3L: torch.Tensor | None = None


class CachedImageProcessor:
    """Prepares Pillow images and caches the last few, since a source has several captions and a null prompt."""

    def __init__(self, folder: Path) -> None:
        from stages.encoding.text.qwen_image_processor import QwenImageProcessor

        self._images = QwenImageProcessor.from_pretrained(folder)
        self._kept: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._lock = Lock()

    def tokens(self, image: Image.Image) -> int:
        """The number of tokens of an image. Raises ValueError or ZeroDivisionError for one that can't be used."""
        patches = self._images.get_number_of_image_patches(image.height // 2, image.width // 2)
        return patches // self._images.merge_size**2

    def picture(self, image: Image.Image) -> ProcessedImage:
        """Prepared as by the pipeline: each side halved, Pillow's default filter."""
        half = image.resize((image.width // 2, image.height // 2))
        key = xxhash.xxh3_128(half.tobytes(), seed=half.width).digest()
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                made = self._images(images=[half], return_tensors="pt")
                found = ProcessedImage(key, made["pixel_values"], made["image_grid_thw"][0])
            self._kept[key] = found
            while len(self._kept) > MAX_CACHED_IMAGES:
                self._kept.popitem(last=False)
        return found


class ImagePromptModel(PrefixCachedModel):
    """Reads prompts with an image: features replace its placeholders' embeddings, positions are three-dimensional."""

    def __init__(
        self, whole: Any, prefix: list[int], pad_id: int, device: torch.device, layers: Sequence[int] = (-1,)
    ) -> None:
        """whole: the Qwen2_5_VLModel, whose language model reads the prompts."""
        super().__init__(whole.language_model, prefix, pad_id, device, layers)
        self._whole = whole
        self._image_id = whole.config.image_token_id
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._batch_features: dict[bytes, torch.Tensor] = {}  # (tokens, D) of the batch that is being read

    def prompt_positions(self, ids: list[int], shared: int, picture: ProcessedImage) -> torch.Tensor:
        """positions_3L of the tokens after the shared ones.

        The image's tokens must be marked: otherwise the positions silently become one-dimensional.
        """
        ids_1L = torch.tensor([ids])
        marks_1L = (ids_1L == self._image_id).int()
        positions_31L, _ = self._whole.get_rope_index(ids_1L, marks_1L, image_grid_thw=picture.grid_3[None])
        return positions_31L[:, 0, shared:]

    @torch.no_grad()
    def hidden_states(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """Encodes the batch's images first, since its passes are divided by length and not by image.

        Each image is encoded alone, so that its features depend on nothing else. The last ones are cached, since a
        batch may end between the texts of one image.
        """
        self._batch_features = {}
        for text in texts:
            assert isinstance(text, PreparedImagePrompt) and text.picture is not None
            features = self._kept.pop(text.picture.key, None)
            if features is None:
                self.stats.images += 1
                grid_13, pixels = text.picture.grid_3[None].to(self.device), text.picture.pixels.to(self.device)
                features = torch.cat(tuple(self._whole.get_image_features(pixels, grid_13).pooler_output))
            else:
                self.stats.reused += 1
            self._kept[text.picture.key] = self._batch_features[text.picture.key] = features
        while len(self._kept) > MAX_CACHED_FEATURES:
            self._kept.popitem(last=False)
        return super().hidden_states(texts)

    def embeds(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor) -> torch.Tensor:
        embeds_BLD = super().embeds(texts, ids_BL)
        for row, text in enumerate(texts):
            assert isinstance(text, PreparedImagePrompt) and text.picture is not None
            # Without the padding, which could be the image's token in an odd tokenizer.
            columns = (ids_BL[row, : text.cost] == self._image_id).nonzero()[:, 0]
            embeds_BLD[row, columns] = self._batch_features[text.picture.key].to(embeds_BLD.dtype)
        return embeds_BLD

    def positions(self, texts: Sequence[PreparedPrompt], shared: int, length: int) -> torch.Tensor:
        positions_3BL = torch.zeros(3, len(texts), length, dtype=torch.long)
        for row, text in enumerate(texts):
            assert isinstance(text, PreparedImagePrompt) and text.positions_3L is not None
            positions_3BL[:, row, : text.cost] = text.positions_3L
        return positions_3BL.to(self.device)
