"""The example family's text encoder: two layers of Gemma-2, one after the other along the channels."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Gemma2Model

from stages.encoding.text.base import TextEncoder, TextRequest
from stages.encoding.text.reader import PrefixCachedModel, PreparedPrompt


class Encoder(TextEncoder[PrefixCachedModel]):
    components = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> PrefixCachedModel:
        assert self.template.crop is not None
        self._crop = self.template.crop
        return self._make_reader(PrefixCachedModel, self._language_model(Gemma2Model, folder), self._crop)

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
        kept = ids[: self._crop + self.max_length]
        return PreparedPrompt(kept, self._reader.shared_length(kept), len(ids))

    def _compute(self, batch: Sequence[PreparedPrompt]) -> tuple[list[torch.Tensor], None]:
        hidden, _ = self._reader.hidden_states(batch)
        pairs = zip(batch, hidden, strict=True)
        return [hidden_LD[self._crop - prompt.prefix_length :] for prompt, hidden_LD in pairs], None
