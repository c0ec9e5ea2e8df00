"""Qwen3 behind a chat template: the hidden states of `Template.layers` of the whole prompt, template included.

The pipelines render a prompt with the tokenizer's own chat template. Here, the catalog's template renders it; the two
are compared once, when the encoder is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Model

from cache.models.weights import WeightsError
from stages.encoding.text.base import OptionError, TextEncoder, TextRequest
from stages.encoding.text.reader import PaddedModel, PrefixCachedModel, PreparedPrompt, TextReader

PROBE = "a caption"


class Qwen3WithoutHead(Qwen3Model):
    """Qwen3 from the checkpoint of a causal model, without a report that its head is unused."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012  # as transformers declares it


class Encoder(TextEncoder):
    components: tuple[str, ...] = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> TextReader:
        self._check_chat_template()
        if self.template.padded:
            self._check_attention()
            model = self._language_model(Qwen3WithoutHead, folder)
            return PaddedModel(model, self._pad_id, self.device, self.template.layers)
        # The prefix has only three tokens, so computing it once saves no pass.
        return self._make_reader(PrefixCachedModel, self._language_model(Qwen3WithoutHead, folder), 0)

    def _check_chat_template(self) -> None:
        messages = [{"role": "user", "content": PROBE}]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        options["enable_thinking"] = self.template.thinking
        try:
            rendered = self._tokenizer.apply_chat_template(messages, **options)
        except ValueError as error:
            raise WeightsError(f"{self.source}: the tokenizer has no chat template", WHOLE_TOKENIZER) from error
        if rendered != (expected := self.template.render(PROBE)):
            raise WeightsError(
                f"{self.source}: the tokenizer's chat template renders a prompt as {rendered!r}, and the template "
                f"{self.template.name} as {expected!r}",
                WHOLE_TOKENIZER,
            )

    def _check_attention(self) -> None:
        if self._options.attention == "flash_attention_2":
            raise OptionError(
                f"text.attention: flash_attention_2 skips padding, which is a part of {self.template.name}",
                "remove text.attention, or use eager or sdpa",
            )

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
        prompt_ids = ids[: self.max_length]
        if self.template.padded:
            prompt_ids += [self._pad_id] * (self.max_length - len(prompt_ids))
        return PreparedPrompt(prompt_ids, 0, len(ids))

    def _compute(self, batch: Sequence[PreparedPrompt]) -> tuple[list[torch.Tensor], None]:
        return self._reader.hidden_states(batch)[0], None


WHOLE_TOKENIZER = "use the tokenizer's whole folder from the checkpoint's own repository"
