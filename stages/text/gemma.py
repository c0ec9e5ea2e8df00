"""Sana: Gemma-2's last hidden states of the complex human instruction and the caption.

The pipeline pads to n + 298 tokens (n: the instruction's) and keeps row 0 and the last 299, that is, the
positions from n - 1 on. Stored are the real ones among them; the transformer masks the rest, which therefore
changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, Gemma2Model

from schemas.catalogue import Template
from schemas.prompts import render
from stages.text.request import TextRequest, TextResult
from stages.weights import resolve

PARTS = ("text_encoder", "tokenizer")


class Encoder:
    """Loads Gemma-2 once; `encode` is one forward pass."""

    def __init__(
        self,
        source: str,
        revision: str | None,
        template: Template,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """max_length: the pipeline's max_sequence_length. Raises WeightsError where a part is missing."""
        folder = resolve(source, revision, PARTS)
        self.template, self.max_length, self.dtype, self.device = template, max_length, dtype, device
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="right")
        gemma: Any = Gemma2Model.from_pretrained(folder / "text_encoder", dtype=dtype)
        self._gemma = gemma.to(device).eval()
        self._instruction = len(self._ids(template.text.split("{}")[0]))

    def length(self, request: TextRequest) -> int:
        """Tokens that the model reads for this request; for sorting into batches."""
        return min(len(self._all_ids(request)), self._limit(request))

    @torch.no_grad()
    def encode(self, requests: Sequence[TextRequest]) -> list[TextResult]:
        """One forward pass for all."""
        tokens = [self._all_ids(request) for request in requests]
        kept = [ids[: self._limit(request)] for ids, request in zip(tokens, requests, strict=True)]
        inputs = self._tokenizer.pad({"input_ids": kept}, return_tensors="pt").to(self.device)
        hidden_BLD = self._gemma(**inputs, use_cache=False).last_hidden_state
        results = []
        for row, request in enumerate(requests):
            embeds_LD = self._selected(hidden_BLD[row, : len(kept[row])], request)
            untruncated = embeds_LD.shape[0] + len(tokens[row]) - len(kept[row])
            results.append(TextResult(embeds_LD, None, untruncated, embeds_LD.shape[0]))
        return results

    def _ids(self, text: str) -> list[int]:
        # verbose: it would warn of texts longer than the tokenizer's own limit, which is not the one here.
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def _all_ids(self, request: TextRequest) -> list[int]:
        assert request.image is None, f"{self.template.name} takes no image"
        return self._ids(render(request.text, self.template, negative=request.negative))

    def _limit(self, request: TextRequest) -> int:
        return self.max_length if request.negative else self._instruction + self.max_length - 2

    def _selected(self, hidden_LD: torch.Tensor, request: TextRequest) -> torch.Tensor:
        """The rows that the transformer is given. A negative prompt has no instruction: all of them."""
        if not request.negative:
            hidden_LD = torch.cat([hidden_LD[:1], hidden_LD[self._instruction - 1 :]])
        return hidden_LD.to("cpu", self.dtype, copy=True)
