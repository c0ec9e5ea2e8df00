"""The example family's text encoder: two layers of Gemma-2, one after the other along the channels."""

from collections.abc import Sequence
from pathlib import Path

from transformers import Gemma2Model

from stages.encoding.text.base import TextEncoder, TextRequest, TextResult
from stages.encoding.text.prefix_cache import PrefixCachedModel, PreparedPrompt


class Encoder(TextEncoder):
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

    def encode(self, batch: Sequence[PreparedPrompt]) -> list[TextResult]:
        results = []
        for prompt, hidden_LD in zip(batch, self._reader.hidden_states(batch), strict=True):
            embeds_LD = hidden_LD[self._crop - prompt.shared :].to("cpu", self.dtype, copy=True)
            results.append(TextResult(embeds_LD, None, prompt.untruncated - self._crop, len(embeds_LD)))
        return results
