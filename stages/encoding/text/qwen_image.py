"""Vision-language models as text encoders: the hidden states of a prompt without the tokens of the template's prefix,
which is computed once (`reader.py`).

Qwen-Image: Qwen2.5-VL's hidden states of the caption and of the template's end, equal to the pipeline's
`encode_prompt`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from cache.models.weights import WeightsError
from stages.encoding.text.base import TextEncoder, TextRequest, request_error
from stages.encoding.text.reader import PrefixCachedModel, PreparedPrompt


class PrefixCroppedEncoder(TextEncoder[PrefixCachedModel]):
    """max_length: number of tokens kept after the template's prefix, whose length is `Template.crop`."""

    def _load_qwen(self, folder: Path) -> Any:
        """Qwen2.5-VL, without its vision model if the template has no image. Raises WeightsError for a tokenizer with
        which the template is not longer than its prefix."""
        self._check_template()
        # Loaded whole, as in the pipeline, so that the weights' names are understood in any checkpoint; then used
        # without lm_head, whose output for every token would be far larger than the hidden states.
        unused = ("lm_head",) if self.template.with_image else ("lm_head", "model.visual")
        return self._language_model(Qwen2_5_VLForConditionalGeneration, folder, unused)

    def _check_template(self) -> None:
        template, template_tokens = self.template, len(self._ids(self.template.render("")))
        if not template.with_image and template_tokens <= self.crop:
            raise WeightsError(
                f"{self.source}: the template {template.name} with an empty caption has {template_tokens} tokens, and "
                f"the pipeline removes the first {self.crop}, so that a short caption would have no tokens",
                "use tokenizer/ of the repository that the text encoder comes from",
            )

    @property
    def crop(self) -> int:
        assert self.template.crop is not None, f"{self.template.name} names no prefix length"
        return self.template.crop

    def _check_length(self, ids: list[int], request: TextRequest) -> None:
        """Raises RequestError if no token remains after the prefix is cut off."""
        if len(ids) <= self.crop:
            problem = f"it has {len(ids)} tokens with its template, of which the first {self.crop} are removed"
            raise request_error("no-tokens", request, problem, "use the tokenizer of the checkpoint's own repository")

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        """At most `limit` ids of a prompt, see `Template.keeps_end`. Call it with the lock."""
        if len(ids) <= limit:
            return ids
        end = self._ids(self.template.text.split("{}")[1]) if self.template.keeps_end else []
        return ids[: limit - len(end)] + end

    def _embed(
        self, batch: Sequence[PreparedPrompt], extras: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """embeds_LD of each prompt, and the tensors `extras` on the device. Prompts that do not begin with the
        prefix's ids take a second forward pass. extras: tensors on the host, which are copied to the device
        together with the inputs."""
        hidden, device_tensors = self._reader.hidden_states(batch, extras)
        embeds = [
            hidden_LD[self.crop - prompt.prefix_length :] for prompt, hidden_LD in zip(batch, hidden, strict=True)
        ]
        return embeds, device_tensors


class PromptEncoder(PrefixCroppedEncoder):
    """An encoder of prompts without images."""

    components: tuple[str, ...] = ("text_encoder", "tokenizer")

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        assert not request.images, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
            prompt_ids = self._cut(ids, self.crop + self.max_length)
        self._check_length(ids, request)
        return PreparedPrompt(prompt_ids, self._reader.shared_length(prompt_ids), len(ids))

    def _compute(self, batch: Sequence[PreparedPrompt]) -> tuple[list[torch.Tensor], None]:
        return self._embed(batch)[0], None


class Encoder(PromptEncoder):
    def _load(self, folder: Path) -> PrefixCachedModel:
        return self._make_reader(PrefixCachedModel, self._load_qwen(folder).model.language_model, self.crop)
