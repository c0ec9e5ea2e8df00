"""Kandinsky 5: Qwen2.5-VL's hidden states and CLIP's pooled output, equal to the pipelines' `encode_prompt`.

The tokenizer and Qwen2VLImageProcessorPil are loaded by themselves: Qwen2VLProcessor, which the pipelines
call, also holds a video processor and can't be made without torchvision. What it does for one image is to
repeat the image's placeholder and to mark its tokens (mm_token_type_ids); without that mark the model gives
the image's tokens one-dimensional positions, with no error and another result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration

from schemas.catalogue import Template
from schemas.prompts import render
from stages.text.request import TextRequest, TextResult, refuse
from stages.weights import resolve

PARTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
CLIP_LENGTH = 77
# Beside the image's own tokens, after the caption: <|vision_start|>, <|vision_end|>, <|im_end|>.
IMAGE_SUFFIX = 3


@dataclass(frozen=True)
class Tokens:
    """ids: what the model reads, template included. untruncated: their number without the limit."""

    ids: list[int]
    untruncated: int


class Encoder:
    """Loads Qwen2.5-VL and CLIP once; `encode` is one forward pass of each."""

    def __init__(
        self,
        source: str,
        revision: str | None,
        template: Template,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """max_length: tokens kept after the template's prefix. Raises WeightsError for a missing part."""
        assert template.crop is not None, f"{template.name} names no prefix length"
        folder = resolve(source, revision, PARTS)
        self.template, self.max_length, self.crop = template, max_length, template.crop
        self.dtype, self.device = dtype, device
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="right")
        self._clip_tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
        self._images = _image_processor(folder / "tokenizer") if template.with_image else None
        # Loaded whole, as by the pipeline, so that the weights' names are understood alike in any checkpoint;
        # then used without lm_head, whose output for every token would be far larger than what is kept.
        whole: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype)
        self._qwen = whole.model.to(device).eval()
        clip: Any = CLIPTextModel.from_pretrained(folder / "text_encoder_2", dtype=dtype)
        self._clip = clip.to(device).eval()
        self._image_id = whole.config.image_token_id
        self._media_ids = {whole.config.image_token_id, whole.config.video_token_id}
        self._pad_id = self._tokenizer.pad_token_id or 0

    def length(self, request: TextRequest) -> int:
        """Tokens that the model reads for this request, template and image included, to sort batches by."""
        return len(self._tokens(request).ids)

    @torch.no_grad()
    def encode(self, requests: Sequence[TextRequest]) -> list[TextResult]:
        """One forward pass for all. Raises RequestError for what can't be encoded, as `length` does."""
        tokens = [self._tokens(request) for request in requests]
        ids_BL, mask_BL = self._padded([item.ids for item in tokens])
        images = self._pixels(requests, ids_BL, mask_BL) if self._images else self._positions(ids_BL)
        hidden_BLD = self._qwen(input_ids=ids_BL, use_cache=False, **images).last_hidden_state
        pooled_BD = self._pooled([request.text for request in requests])
        results = []
        for row, item in enumerate(tokens):
            embeds_LD = hidden_BLD[row, self.crop : len(item.ids)].to("cpu", self.dtype, copy=True)
            untruncated = item.untruncated - self.crop
            results.append(TextResult(embeds_LD, pooled_BD[row], untruncated, embeds_LD.shape[0]))
        return results

    def _tokens(self, request: TextRequest) -> Tokens:
        text = render(request.text, self.template, negative=request.negative)
        if self.template.with_image:
            return self._tokens_with_image(text, request)
        assert request.image is None, f"{self.template.name} takes no image"
        ids = self._ids(text)
        if len(ids) > self.crop + self.max_length:
            return Tokens(self._shortened(text, ids), len(ids))
        return Tokens(ids, len(ids))

    def _ids(self, text: str) -> list[int]:
        # verbose: it would warn of texts longer than the tokenizer's own limit, which is not the one here.
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def _shortened(self, text: str, ids: list[int]) -> list[int]:
        """An over-long prompt, cut as the pipeline cuts it.

        As many characters go off the end, the template's own included, as the surplus tokens decode to; then
        whatever still stands over.
        """
        removed = self._tokenizer.decode(ids[self.crop : -2][self.max_length - 2 :])
        if removed:
            ids = self._ids(text[: -len(removed)])
        return ids[: self.crop + self.max_length]

    def _tokens_with_image(self, text: str, request: TextRequest) -> Tokens:
        """The image's placeholder expanded, the caption cut where it stands over, what follows it kept.

        The pipeline fails on an over-long caption here, as it cuts the image's tokens away.
        """
        assert request.image is not None and self._images is not None, f"{self.template.name} needs an image"
        ids, patches = self._ids(text), self._grid(request)
        if sum(token in self._media_ids for token in ids) != 1:
            problem = "contains <|image_pad|> or <|video_pad|>, which stand for media inside a prompt"
            raise refuse("placeholder-in-caption", request, problem, "remove them from the caption")
        place = ids.index(self._image_id)
        head, start, tail = ids[: place - 1], ids[place - 1], ids[place + 1 :]
        room = self.crop + self.max_length - patches - IMAGE_SUFFIX
        if room < self.crop:
            problem = f"its image takes {patches} tokens and text.max_length is {self.max_length}"
            raise refuse("image-too-long", request, problem, "raise text.max_length or lower the resolution")
        suffix = [start, *[self._image_id] * patches, *tail]
        return Tokens(head[:room] + suffix, len(head) + len(suffix))

    def _grid(self, request: TextRequest) -> int:
        """Tokens of the request's image."""
        assert request.image is not None and self._images is not None
        width, height = request.image.width // 2, request.image.height // 2
        try:
            patches = self._images.get_number_of_image_patches(height, width)
        except (ValueError, ZeroDivisionError) as error:
            raise refuse("image-shape", request, f"its image can't be used ({error})", "crop it") from error
        return patches // self._images.merge_size**2

    def _padded(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """ids_BL and mask_BL, padded on the right, where a causal model's real tokens don't see it."""
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [self._pad_id] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return ids.to(self.device), mask.to(self.device)

    def _positions(self, ids_BL: torch.Tensor) -> dict[str, Any]:
        """Positions of plain text, stated: the model itself may use what an earlier call left behind."""
        positions = torch.arange(ids_BL.shape[1], device=self.device)
        return {"position_ids": positions.expand(3, *ids_BL.shape)}

    def _pixels(self, requests: Sequence[TextRequest], ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> dict[str, Any]:
        assert self._images is not None
        halves = [_halved(request.image) for request in requests if request.image is not None]
        pictures = self._images(images=halves, return_tensors="pt")
        return {
            "attention_mask": mask_BL,
            "mm_token_type_ids": (ids_BL == self._image_id).int() * mask_BL,
            "pixel_values": pictures["pixel_values"].to(self.device),
            "image_grid_thw": pictures["image_grid_thw"].to(self.device),
        }

    def _pooled(self, texts: list[str]) -> torch.Tensor:
        """CLIP's pooled_BD of the captions alone, without a template."""
        inputs = self._clip_tokenizer(
            texts, max_length=CLIP_LENGTH, truncation=True, padding="max_length", return_tensors="pt"
        )
        return self._clip(**inputs.to(self.device)).pooler_output.to("cpu", self.dtype)


def _image_processor(folder: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(folder)


def _halved(image: Image.Image) -> Image.Image:
    """As the pipeline shows a source image to the model: half of each side, Pillow's default filter."""
    return image.resize((image.width // 2, image.height // 2))
