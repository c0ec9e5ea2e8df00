"""Kandinsky 5: Qwen2.5-VL's hidden states and CLIP's pooled output, equal to the pipelines' `encode_prompt`.

The template's prefix is computed once (`reader.py`), and so are Qwen2.5-VL's vision features of each distinct
image inside prompts (`qwen_vl_images.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer

from cache.models.weights import load_pretrained
from stages.encoding.text.base import CLIP_MAX_TOKENS, TextRequest, request_error
from stages.encoding.text.qwen_image import PrefixCroppedEncoder
from stages.encoding.text.qwen_vl_images import (
    CachedImageProcessor,
    ImagePromptModel,
    PreparedImagePrompt,
    ProcessedImage,
)
from stages.encoding.text.reader import PrefixCachedModel

# Tokens after the caption, in addition to the image's own tokens: <|vision_start|>, <|vision_end|>, <|im_end|>.
IMAGE_SUFFIX_TOKENS = 3


def halve(image: Image.Image) -> Image.Image:
    """The image as the pipeline puts it into a prompt: each side halved, with Pillow's default filter."""
    return image.resize((image.width // 2, image.height // 2))


@dataclass(frozen=True)
class KandinskyPrompt(PreparedImagePrompt):
    """clip_ids: token ids of the caption alone, for CLIP, cut to CLIP's limit. clip_tokens: their number without the
    limit."""

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
        """Tokenize a request and prepare its images. Raises RequestError if the request can't be encoded."""
        with self._lock:
            ids, untruncated = self._tokenize(request)
            clip_ids = self._clip_tokenizer(request.text, verbose=False)["input_ids"]
        self._check_length(ids, request)
        prefix_length = self._reader.shared_length(ids)
        pictures: tuple[ProcessedImage, ...] = ()
        positions_3L = None
        if self._images is not None and request.images:
            assert isinstance(self._reader, ImagePromptModel)
            pictures = tuple(self._images.picture(halve(image)) for image in request.images)
            positions_3L = self._reader.prompt_positions(ids, prefix_length, pictures)
        # Cut as in the pipeline: the caption's first tokens, then the end token.
        cut = clip_ids if len(clip_ids) <= CLIP_MAX_TOKENS else clip_ids[: CLIP_MAX_TOKENS - 1] + clip_ids[-1:]
        return KandinskyPrompt(ids, prefix_length, untruncated, pictures, positions_3L, tuple(cut), len(clip_ids))

    @torch.no_grad()
    def _compute(self, batch: Sequence[KandinskyPrompt]) -> tuple[list[torch.Tensor], torch.Tensor]:
        embeds, (clip_ids_BL,) = self._embed(batch, [self._clip_ids(batch)])
        return embeds, self._clip(input_ids=clip_ids_BL).pooler_output

    def _clip_tokens(self, prompt: KandinskyPrompt) -> int:
        return prompt.clip_tokens

    def _tokenize(self, request: TextRequest) -> tuple[list[int], int]:
        """The prompt's ids, and their number without the limit.

        An over-long prompt is cut as in the pipeline: first by the number of characters that the surplus tokens decode
        to, counted from the end of the rendered template; then the tokens that still exceed the limit.
        """
        text = self.template.render(request.text, negative=request.negative)
        if self.template.with_image:
            return self._tokenize_with_image(text, request)
        assert not request.images, f"{self.template.name} takes no image"
        ids, limit = self._ids(text), self.crop + self.max_length
        untruncated = len(ids)
        if untruncated > limit:
            if removed := self._tokenizer.decode(ids[self.crop : -2][self.max_length - 2 :]):
                ids = self._ids(text[: -len(removed)])
            ids = ids[:limit]
        return ids, untruncated

    def _tokenize_with_image(self, text: str, request: TextRequest) -> tuple[list[int], int]:
        """Replace the placeholder by the image's tokens. An over-long caption is cut, and the tokens after it are kept.

        This differs from the pipeline, which cuts the end of the prompt, a part of the template: a caption one or two
        tokens over the limit loses `<|im_end|>` and `<|vision_end|>` instead, and from three tokens on the cut reaches
        the image's tokens and the pipeline fails.
        """
        assert len(request.images) == 1 and self._images is not None, f"{self.template.name} needs an image"
        ids = self._ids(text)
        try:
            patches = self._images.tokens(halve(request.images[0]))
        except (ValueError, ZeroDivisionError) as error:
            raise request_error("image-shape", request, f"its image can't be used ({error})", "crop it") from error
        if sum(token in self._media_ids for token in ids) != 1:
            problem = "contains <|image_pad|> or <|video_pad|>, which are placeholders for media"
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
