"""Kandinsky 5: Qwen2.5-VL's hidden states and CLIP's pooled output, equal to the pipelines' `encode_prompt`.

The template's prefix is computed once (`prefix_cache.py`), and so are Qwen2.5-VL's vision features of each distinct
image inside prompts.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image
from torch.nn.functional import interpolate
from transformers import CLIPTextModel, CLIPTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from cache.models.weights import WeightsError, load_pretrained
from schemas.devices import to_device_together
from stages.encoding.text.base import CLIP_MAX_TOKENS, TextRequest, request_error
from stages.encoding.text.prefix_cache import PrefixCachedModel
from stages.encoding.text.qwen_vl import PrefixCroppedEncoder
from stages.encoding.text.reader import PreparedPrompt

# After the caption, in addition to the image's own tokens: <|vision_start|>, <|vision_end|>, <|im_end|>.
IMAGE_SUFFIX_TOKENS = 3


class QwenImageProcessor(Qwen2VLImageProcessorPil):
    """Qwen2-VL's image processor with the pipelines' results, which are torchvision's, without torchvision.

    transformers has one on tensors, by torchvision, and one on Pillow images. They differ by 8-bit levels in some
    pixels and in the order of the arithmetic. This one computes as the first and takes everything else from the second:
    torchvision's bicubic resize is one call of torch (transforms/v2/functional/_geometry.py). It is used where
    torchvision is installed, too, so bytes do not depend on that. Images are uint8 (3, H, W) until they are normalized.

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
            processed = self._kept.pop(key, None)
            if processed is None:
                made = self._images(images=[half], return_tensors="pt")
                processed = ProcessedImage(key, made["pixel_values"], made["image_grid_thw"][0])
            self._kept[key] = processed
            while len(self._kept) > MAX_CACHED_IMAGES:
                self._kept.popitem(last=False)
        return processed


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
    def hidden_states(
        self, texts: Sequence[PreparedPrompt], others: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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
                features = self._features(text.picture)
            else:
                self.stats.reused += 1
            self._kept[text.picture.key] = self._batch_features[text.picture.key] = features
        while len(self._kept) > MAX_CACHED_FEATURES:
            self._kept.popitem(last=False)
        return super().hidden_states(texts, others)

    def _features(self, picture: ProcessedImage) -> torch.Tensor:
        """(tokens, D). What follows from the image's size is computed here: the model would ask the device for it."""
        grid_13, visual = picture.grid_3[None], self._whole.visual
        merge, config = visual.spatial_merge_size, visual.config
        order, windows = get_vision_window_index(grid_13, merge, visual.window_size, visual.patch_size)
        ends = get_vision_cu_seqlens(grid_13)
        host = [picture.pixels, get_vision_position_ids(grid_13, merge), order]
        longest = {}
        if "flash" in config._attn_implementation:  # other kernels take the windows' ends on the host
            longest = {"max_seqlen": int(ends.diff().max()), "max_window_seqlen": int(windows.diff().max())}
            host += [ends, windows]
        pixels, places, order, *moved = to_device_together(host, self.device)
        ends, windows = moved or (ends, windows)
        prepared = {"position_ids": places, "window_index": order, "cu_seqlens": ends, "cu_window_seqlens": windows}
        return torch.cat(tuple(self._whole.get_image_features(pixels, grid_13, **prepared, **longest).pooler_output))

    def embeds(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor) -> torch.Tensor:
        embeds_BLD = super().embeds(texts, ids_BL)
        for row, text in enumerate(texts):
            assert isinstance(text, PreparedImagePrompt) and text.picture is not None
            features = self._batch_features[text.picture.key].to(embeds_BLD.dtype)
            assert text.ids.count(self._image_id) == len(features)
            first = text.ids.index(self._image_id) - text.shared  # the others follow it
            embeds_BLD[row, first : first + len(features)] = features
        return embeds_BLD

    def positions(self, texts: Sequence[PreparedPrompt], length: int) -> torch.Tensor:
        positions_3BL = torch.zeros(3, len(texts), length, dtype=torch.long)
        for row, text in enumerate(texts):
            assert isinstance(text, PreparedImagePrompt) and text.positions_3L is not None
            positions_3BL[:, row, : text.cost] = text.positions_3L
        return positions_3BL


@dataclass(frozen=True)
class KandinskyPrompt(PreparedImagePrompt):
    """clip_ids: the caption alone, for CLIP, cut to its limit; clip_tokens: their number without the limit."""

    clip_ids: tuple[int, ...] = ()
    clip_tokens: int = 0


class Encoder(PrefixCroppedEncoder):
    """Qwen2.5-VL and CLIP."""

    components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    def _load(self, folder: Path) -> PrefixCachedModel:
        with_image = self.template.with_image
        self._clip_tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
        self._images = CachedImageProcessor(folder / "tokenizer") if with_image else None
        qwen = self._load_qwen(folder)
        self._clip = load_pretrained(CLIPTextModel, folder / "text_encoder_2", dtype=self.dtype).to(self.device).eval()
        self._image_id = qwen.config.image_token_id
        self._media_ids = {qwen.config.image_token_id, qwen.config.video_token_id}
        if with_image:
            return self._make_reader(ImagePromptModel, qwen.model, self.crop)
        return self._make_reader(PrefixCachedModel, qwen.model.language_model, self.crop)

    def prepare(self, request: TextRequest) -> KandinskyPrompt:
        """Raises RequestError for what can't be encoded."""
        with self._lock:
            ids, untruncated = self._tokenize(request)
            clip_ids = self._clip_tokenizer(request.text, verbose=False)["input_ids"]
        self._check_length(ids, request)
        shared = self._reader.shared_length(ids)
        picture = positions_3L = None
        if self._images is not None and request.image is not None:
            assert isinstance(self._reader, ImagePromptModel)
            picture = self._images.picture(request.image)
            positions_3L = self._reader.prompt_positions(ids, shared, picture)
        # As the pipeline cuts: a caption's first tokens, then the end token.
        cut = clip_ids if len(clip_ids) <= CLIP_MAX_TOKENS else clip_ids[: CLIP_MAX_TOKENS - 1] + clip_ids[-1:]
        return KandinskyPrompt(ids, shared, untruncated, picture, positions_3L, tuple(cut), len(clip_ids))

    @torch.no_grad()
    def _compute(self, batch: Sequence[KandinskyPrompt]) -> tuple[list[torch.Tensor], torch.Tensor]:
        embeds, (clip_ids_BL,) = self._embed(batch, [self._clip_ids(batch)])
        return embeds, self._clip(input_ids=clip_ids_BL).pooler_output

    def _clip_tokens(self, prompt: KandinskyPrompt) -> int:
        return prompt.clip_tokens

    def _tokenize(self, request: TextRequest) -> tuple[list[int], int]:
        """The prompt's ids, and their number without the limit.

        An over-long prompt is cut as by the pipeline: as many characters at the end, those of the template included,
        as the surplus tokens decode to; then what is still over the limit.
        """
        text = self.template.render(request.text, negative=request.negative)
        if self.template.with_image:
            return self._tokenize_with_image(text, request)
        assert request.image is None, f"{self.template.name} takes no image"
        ids, limit = self._ids(text), self.crop + self.max_length
        untruncated = len(ids)
        if untruncated > limit:
            if removed := self._tokenizer.decode(ids[self.crop : -2][self.max_length - 2 :]):
                ids = self._ids(text[: -len(removed)])
            ids = ids[:limit]
        return ids, untruncated

    def _tokenize_with_image(self, text: str, request: TextRequest) -> tuple[list[int], int]:
        """The placeholder becomes the image's tokens; an over-long caption is cut, and what follows it is kept.

        This differs from the pipeline, which cuts the end of the prompt, and that is the template's: a caption one or
        two tokens over the limit loses `<|im_end|>` and `<|vision_end|>` instead, and from three on the cut reaches
        the image's tokens and the pipeline fails.
        """
        assert request.image is not None and self._images is not None, f"{self.template.name} needs an image"
        ids = self._ids(text)
        try:
            patches = self._images.tokens(request.image)
        except (ValueError, ZeroDivisionError) as error:
            raise request_error("image-shape", request, f"its image can't be used ({error})", "crop it") from error
        if sum(token in self._media_ids for token in ids) != 1:
            problem = "contains <|image_pad|> or <|video_pad|>, which stand for media inside a prompt"
            raise request_error("placeholder-in-caption", request, problem, "remove them from the caption")
        placeholder = ids.index(self._image_id)
        head, start, tail = ids[: placeholder - 1], ids[placeholder - 1], ids[placeholder + 1 :]
        room = self.crop + self.max_length - patches - IMAGE_SUFFIX_TOKENS
        if room < self.crop:
            problem = f"its image takes {patches} tokens and text.max_length is {self.max_length}"
            raise request_error("image-too-long", request, problem, "raise text.max_length or lower the resolution")
        suffix = [start, *[self._image_id] * patches, *tail]
        return head[:room] + suffix, len(head) + len(suffix)

    def _clip_ids(self, batch: Sequence[KandinskyPrompt]) -> torch.Tensor:
        """CLIP's ids_BL of the captions alone, without a template.

        Padded to the longest instead of to 77: the model is causal and pools at a caption's own last token.
        """
        longest, pad = max(len(prompt.clip_ids) for prompt in batch), self._clip_tokenizer.pad_token_id
        return torch.tensor([[*prompt.clip_ids, *[pad] * (longest - len(prompt.clip_ids))] for prompt in batch])
