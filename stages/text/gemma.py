"""Sana: Gemma-2's last hidden states of the complex human instruction and the caption.

The pipeline pads to n + 298 tokens (n: the instruction's) and keeps row 0 and the last 299, that is, the
positions from n - 1 on. Stored are the real ones among them; the transformer masks the rest, which therefore
changes nothing. The instruction is computed once: row 0 is the same for every caption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from transformers import AutoTokenizer, Gemma2Model

from cache.weights import resolve
from schemas.catalogue import Template
from schemas.prompts import render
from stages.text import models
from stages.text.prefix import Reader, constant_ids
from stages.text.request import Prepared, Stats, TextRequest, TextResult, refuse

PARTS = ("text_encoder", "tokenizer")


@dataclass(frozen=True)
class Prompt(Prepared):
    """negative: without the instruction."""

    negative: bool


class Encoder:
    """Loads Gemma-2 once. `prepare` tokenises, and may run beside `encode`, which is one forward pass."""

    def __init__(
        self,
        source: str,
        revision: str | None,
        template: Template,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        attention: str | None = None,
        quantization: str = "no_change",
        offload: str = "none",
        share_prefix: bool = True,
    ) -> None:
        """max_length: the pipeline's max_sequence_length. The options: `stages.text.models.load`.

        Raises WeightsError where a part is missing, LatentpressError for an option that can't be had.
        """
        folder = resolve(source, revision, PARTS)
        self.template, self.max_length, self.dtype, self.device = template, max_length, dtype, device
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="right")
        self._lock = Lock()
        options = models.Options(attention, quantization, offload)
        gemma = models.load(Gemma2Model, folder / "text_encoder", dtype, device, options)
        self.unquantized = models.unquantized(gemma) if quantization == "nf4-bnb" else []
        self._instruction = len(self._ids(template.text.split("{}")[0]))
        prefix = constant_ids(self._ids, template, self._instruction - 1) if share_prefix else []
        self._reader = Reader(gemma, prefix, self._tokenizer.pad_token_id or 0, device)

    @property
    def stats(self) -> Stats:
        return self._reader.stats

    def prepare(self, request: TextRequest) -> Prompt:
        """The request tokenised."""
        assert request.image is None, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(render(request.text, self.template, negative=request.negative))
        limit = self.max_length if request.negative else self._instruction + self.max_length - 2
        kept = ids[:limit]
        if not kept or (not request.negative and len(kept) < self._instruction):
            problem = f"it has {len(kept)} tokens, and the instruction before it {self._instruction}"
            raise refuse("no-tokens", request, problem, "take the tokenizer of the checkpoint's own repository")
        return Prompt(kept, self._reader.known(kept), len(ids), request.negative)

    def encode(self, batch: Sequence[Prompt]) -> list[TextResult]:
        """One forward pass; another one for prompts without the instruction."""
        results = []
        for prompt, hidden_LD in zip(batch, self._reader.hidden(batch), strict=True):
            embeds_LD = self._selected(hidden_LD, prompt).to("cpu", self.dtype, copy=True)
            untruncated = embeds_LD.shape[0] + prompt.untruncated - len(prompt.ids)
            results.append(TextResult(embeds_LD, None, untruncated, embeds_LD.shape[0]))
        return results

    def _ids(self, text: str) -> list[int]:
        # verbose: it would warn of texts longer than the tokenizer's own limit, which is not the one here.
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def _selected(self, hidden_LD: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """The rows that the transformer is given. A negative prompt has no instruction: all of them."""
        if prompt.negative:
            return hidden_LD
        first_LD = hidden_LD if self._reader.prefix_LD is None or not prompt.shared else self._reader.prefix_LD
        return torch.cat([first_LD[:1], hidden_LD[self._instruction - 1 - prompt.shared :]])
