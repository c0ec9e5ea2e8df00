"""Wan: UMT5's last hidden states of the caption, equal to the real tokens of the pipelines' `encode_prompt`.

The pipelines pad to 512 tokens, mask the padding in the encoder, and put zeros in its place behind the real tokens; the
trainer adds the zeros again.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import UMT5EncoderModel

from stages.encoding.text.base import TextEncoder, TextRequest, request_error
from stages.encoding.text.reader import MaskedModel, PreparedPrompt


class Encoder(TextEncoder[MaskedModel]):
    components = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> MaskedModel:
        model = self._language_model(UMT5EncoderModel, folder)
        return MaskedModel(model, self._pad_id, self.device, self.template.layers)

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        """Tokenize a request. An over-long caption keeps its end token, as if the tokenizer had cut it."""
        assert not request.images, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
        if not ids:
            problem = "it has no tokens, and an empty caption has one, the end token"
            raise request_error("no-tokens", request, problem, "use the tokenizer of the checkpoint's own repository")
        prompt_ids = ids if len(ids) <= self.max_length else ids[: self.max_length - 1] + ids[-1:]
        return PreparedPrompt(prompt_ids, 0, len(ids))

    def _compute(self, batch: Sequence[PreparedPrompt]) -> tuple[list[torch.Tensor], None]:
        return self._reader.hidden_states(batch)[0], None
