"""Sana: Gemma-2's last hidden states of the complex human instruction and the caption.

The pipeline pads to n + 298 tokens (n: the instruction's) and keeps row 0 and the last 299, that is, the
positions from n - 1 on. Stored are the real ones among them; the transformer masks the rest, which therefore
changes nothing. The instruction is computed once: row 0 is the same for every caption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Gemma2Model

from schemas.prompts import render_prompt
from stages.encoding.text.base import TextEncoder
from stages.encoding.text.prefix_cache import PrefixCachedModel
from stages.encoding.text.request import PreparedPrompt, TextRequest, TextResult, request_error


@dataclass(frozen=True)
class GemmaPrompt(PreparedPrompt):
    """negative: without the instruction."""

    negative: bool


class Encoder(TextEncoder):
    """Gemma-2."""

    components = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> PrefixCachedModel:
        gemma = self._language_model(Gemma2Model, folder)
        self._instruction = len(self._ids(self.template.text.split("{}")[0]))
        return self._make_reader(PrefixCachedModel, gemma, self._instruction - 1)

    def prepare(self, request: TextRequest) -> GemmaPrompt:
        """The request tokenised."""
        assert request.image is None, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(render_prompt(request.text, self.template, negative=request.negative))
        limit = self.max_length if request.negative else self._instruction + self.max_length - 2
        kept = ids[:limit]
        if not kept or (not request.negative and len(kept) < self._instruction):
            problem = f"it has {len(kept)} tokens, and the instruction before it {self._instruction}"
            raise request_error("no-tokens", request, problem, "take the tokenizer of the checkpoint's own repository")
        return GemmaPrompt(kept, self._reader.shared_length(kept), len(ids), request.negative)

    def encode(self, batch: Sequence[GemmaPrompt]) -> list[TextResult]:
        """One forward pass; another one for prompts without the instruction."""
        results = []
        for prompt, hidden_LD in zip(batch, self._reader.hidden_states(batch), strict=True):
            embeds_LD = self._selected(hidden_LD, prompt).to("cpu", self.dtype, copy=True)
            untruncated = embeds_LD.shape[0] + prompt.untruncated - len(prompt.ids)
            results.append(TextResult(embeds_LD, None, untruncated, embeds_LD.shape[0]))
        return results

    def _selected(self, hidden_LD: torch.Tensor, prompt: GemmaPrompt) -> torch.Tensor:
        """The rows that the transformer is given. A negative prompt has no instruction: all of them."""
        if prompt.negative:
            return hidden_LD
        first_LD = hidden_LD if self._reader.prefix_LD is None or not prompt.shared else self._reader.prefix_LD
        return torch.cat([first_LD[:1], hidden_LD[self._instruction - 1 - prompt.shared :]])
