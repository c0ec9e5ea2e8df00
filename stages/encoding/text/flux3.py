"""Qwen3-VL behind a chat template, without images: the hidden states of `Template.layers` of the whole prompt, equal to
the pipeline's prompt embeddings.

The pipeline pads a prompt to a multiple of `Template.window` tokens, and its transformer reads the padding. All padding
tokens of a prompt have the same position and see only its real tokens, so their states are equal. One of them is
computed and stored, after the real tokens, unless the prompt has no padding; `trainer/families/flux3.py` repeats it.
"""

from pathlib import Path

from stages.encoding.text import qwen3
from stages.encoding.text.base import OptionError, TextRequest
from stages.encoding.text.qwen3_vl import Qwen3VLWithoutHead
from stages.encoding.text.reader import PaddedModel, PreparedPrompt, TextReader

PADDING_POSITION = 1  # in the pipeline


class Encoder(qwen3.Encoder):
    components: tuple[str, ...] = ("text_encoder",)
    tokenizer = "text_encoder"

    def _load(self, folder: Path) -> TextReader:
        if self.max_length % self.window and self.max_length != self.template.max_length:
            raise OptionError(
                f"text.max_length: {self.max_length} is not a multiple of {self.window}, but the transformer reads "
                f"texts padded to multiples of {self.window} tokens",
                f"set text.max_length to {max(self.max_length // self.window, 1) * self.window}, or remove it",
            )
        self._check_chat_template()
        self._check_attention()
        model = self._language_model(Qwen3VLWithoutHead, folder, ("visual",)).language_model
        return PaddedModel(model, self._pad_id, self.device, self.template.layers, PADDING_POSITION)

    @property
    def window(self) -> int:
        assert self.template.window is not None, f"{self.template.name} has no window"
        return self.template.window

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        assert not request.images, f"{self.template.name} takes no image"
        with self._lock:
            ids = self._ids(self.template.render(request.text, negative=request.negative))
        kept = ids[: self.max_length]
        is_padded = len(kept) % self.window and len(kept) < self.max_length
        return PreparedPrompt(kept + [self._pad_id] * bool(is_padded), 0, len(ids))
