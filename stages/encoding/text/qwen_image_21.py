"""Qwen-Image-2.1: Qwen3-VL's states of a prompt after its last layer, before its last norm, without the tokens of the
template's prefix and of images, equal to the pipeline's `encode_prompt`. The transformer reads latents in the places of
an image's tokens; the number of stored tokens before each image is stored, too.

A reference is resized once, by the stage. The image processor would resize it again only if its smallest or largest
number of pixels did not permit it; then an image would have another number of tokens than latents, and is rejected.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
from transformers import Qwen3VLForConditionalGeneration

from cache.models.weights import WeightsError
from stages.encoding.text import qwen_image_edit
from stages.encoding.text.base import TextRequest, request_error
from stages.encoding.text.qwen3_vl_images import DeepstackPromptModel
from stages.encoding.text.qwen_image import PromptEncoder
from stages.encoding.text.reader import PrefixCachedModel, PreparedPrompt


class Encoder(qwen_image_edit.Encoder):
    components = ("text_encoder", "processor")
    tokenizer = "processor"

    def _load(self, folder: Path) -> PrefixCachedModel:
        self._check_prefix()
        unused = ("lm_head",) if self.template.with_image else ("lm_head", "model.visual")
        model = self._language_model(Qwen3VLForConditionalGeneration, folder, unused).model
        if not self.template.is_normed:
            model.language_model.norm = torch.nn.Identity()
        if not self.template.with_image:
            return self._make_reader(PrefixCachedModel, model.language_model, self.crop)
        return self._load_with_images(DeepstackPromptModel, model, folder)

    def _check_prefix(self) -> None:
        """Raises WeightsError if the pipeline, which removes the system turn, would remove other tokens."""
        turn = self.template.text[: self.template.text.index("<|im_start|>user")]
        if (length := len(self._ids(turn))) != self.crop:
            raise WeightsError(
                f"{self.source}: the template {self.template.name} begins with {length} tokens of instruction instead "
                f"of {self.crop}",
                "use processor/ of the repository that the text encoder comes from",
            )

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        if not self.template.with_image:
            return PromptEncoder.prepare(self, request)
        for image in request.images:
            if self._images.is_resized(image):
                problem = f"a reference of {image.width}x{image.height} pixels would be resized by the image processor"
                advice = "use preprocessor_config.json of the published checkpoint"
                raise request_error("image-shape", request, problem, advice)
        return super().prepare(request)

    def _compute(self, batch: Sequence[PreparedPrompt]) -> tuple[list[torch.Tensor], None]:
        if not self.template.with_image:
            return super()._compute(batch)
        kept = [torch.tensor(self._is_text(prompt)).nonzero()[:, 0] for prompt in batch]
        embeds, kept = self._embed(batch, kept)
        return [embeds_LD.index_select(0, kept_L) for embeds_LD, kept_L in zip(embeds, kept, strict=True)], None

    def _is_text(self, prompt: PreparedPrompt) -> list[bool]:
        """Whether each token after the prefix is stored."""
        return [token != self._image_id for token in prompt.ids[self.crop :]]

    def _image_places(self, prompt: PreparedPrompt) -> torch.Tensor | None:
        if not self.template.with_image:
            return None
        places, text = [], 0
        for is_text, run in groupby(self._is_text(prompt)):
            if is_text:
                text += len([*run])
            else:
                places.append(text)
        return torch.tensor(places, dtype=torch.int32)
