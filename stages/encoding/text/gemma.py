"""Sana: Gemma-2's last hidden states of the complex human instruction and the caption.

The pipeline pads to n + 298 tokens (n: the number of the instruction's tokens) and keeps row 0 and the last 299, that
is, the positions from n - 1 on. The real tokens among them are stored; the transformer masks the rest. The instruction
is computed once, because row 0 is the same for every caption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Gemma2Model

from stages.encoding.text.base import TextEncoder, TextRequest, request_error
from stages.encoding.text.reader import PrefixCachedModel, PreparedPrompt


@dataclass(frozen=True)
class GemmaPrompt(PreparedPrompt):
    """negative: whether the prompt has no instruction."""

    negative: bool


class Encoder(TextEncoder[PrefixCachedModel]):
    components = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> PrefixCachedModel:
        gemma = self._language_model(Gemma2Model, folder)
        self._instruction = len(self._ids(self.template.text.split("{}")[0]))
        return self._make_reader(PrefixCachedModel, gemma, self._instruction - 1)

    def prepare(self, request: TextRequest) -> GemmaPrompt:
        assert not request.images, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
        limit = self.max_length if request.negative else self._instruction + self.max_length - 2
        prompt_ids = ids[:limit]
        if not prompt_ids or (not request.negative and len(prompt_ids) < self._instruction):
            problem = f"it has {len(prompt_ids)} tokens, fewer than its instruction, which has {self._instruction}"
            raise request_error("no-tokens", request, problem, "use the tokenizer of the checkpoint's own repository")
        return GemmaPrompt(prompt_ids, self._reader.shared_length(prompt_ids), len(ids), request.negative)

    def _compute(self, batch: Sequence[GemmaPrompt]) -> tuple[list[torch.Tensor], None]:
        """One forward pass, and a second one if the batch has prompts without the instruction."""
        embeds = []
        for prompt, hidden_LD in zip(batch, self._reader.hidden_states(batch)[0], strict=True):
            if not prompt.negative:  # a negative prompt has no instruction
                prefix_LD = self._reader.prefix_LD
                first_LD = hidden_LD if prefix_LD is None or not prompt.prefix_length else prefix_LD
                hidden_LD = torch.cat([first_LD[:1], hidden_LD[self._instruction - 1 - prompt.prefix_length :]])
            embeds.append(hidden_LD)
        return embeds, None
