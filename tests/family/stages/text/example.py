"""The example family's text encoder: two layers of Gemma-2, one after the other along the channels."""

from collections.abc import Sequence
from pathlib import Path

from transformers import Gemma2Model

from schemas.prompts import render
from stages.text.models import TextEncoder
from stages.text.prefix import Reader
from stages.text.request import Prepared, TextRequest, TextResult


class Encoder(TextEncoder):
    parts = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> Reader:
        assert self.template.crop is not None
        self._crop = self.template.crop
        return self._make_reader(Reader, self._language_model(Gemma2Model, folder), self._crop)

    def prepare(self, request: TextRequest) -> Prepared:
        with self._lock:
            ids = self._ids(render(request.text, self.template, negative=request.negative))
        kept = ids[: self._crop + self.max_length]
        return Prepared(kept, self._reader.known(kept), len(ids))

    def encode(self, batch: Sequence[Prepared]) -> list[TextResult]:
        results = []
        for prompt, hidden_LD in zip(batch, self._reader.hidden(batch), strict=True):
            embeds_LD = hidden_LD[self._crop - prompt.shared :].to("cpu", self.dtype, copy=True)
            results.append(TextResult(embeds_LD, None, prompt.untruncated - self._crop, len(embeds_LD)))
        return results
