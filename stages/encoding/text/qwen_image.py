"""Qwen-Image: Qwen2.5-VL's hidden states of the caption and of the template's end, equal to the pipeline's
`encode_prompt`. An over-long prompt loses its end, that of the template included."""

from collections.abc import Sequence
from pathlib import Path

import torch

from stages.encoding.text.base import TextRequest
from stages.encoding.text.prefix_cache import PrefixCachedModel
from stages.encoding.text.qwen_vl import PrefixCroppedEncoder
from stages.encoding.text.reader import PreparedPrompt


class Encoder(PrefixCroppedEncoder):
    components: tuple[str, ...] = ("text_encoder", "tokenizer")

    def _load(self, folder: Path) -> PrefixCachedModel:
        return self._make_reader(PrefixCachedModel, self._load_qwen(folder).model.language_model, self.crop)

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        assert not request.images, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
        self._check_length(ids, request)
        kept = ids[: self.crop + self.max_length]
        return PreparedPrompt(kept, self._reader.shared_length(kept), len(ids))

    def _compute(self, batch: Sequence[PreparedPrompt]) -> tuple[list[torch.Tensor], None]:
        return self._embed(batch)[0], None
