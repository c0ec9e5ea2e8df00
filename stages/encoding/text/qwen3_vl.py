"""Qwen3-VL as a text encoder: the hidden states of `Template.layers` of a prompt without images, without the tokens of
the template's prefix. Its vision model is removed.

Krea 2: equal to the real tokens of the pipeline's `encode_prompt`, which pads between the caption and the template's
end, and gives padding no position.
"""

from pathlib import Path

from transformers import Qwen3VLModel

from stages.encoding.text.qwen_image import PromptEncoder
from stages.encoding.text.reader import PrefixCachedModel


class Qwen3VLWithoutHead(Qwen3VLModel):
    """Qwen3-VL, also from the checkpoint of a model with a head, without a report that its head is unused."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012  # as transformers declares it


class Encoder(PromptEncoder):
    def _load(self, folder: Path) -> PrefixCachedModel:
        self._check_template()
        model = self._language_model(Qwen3VLWithoutHead, folder, ("visual",))
        return self._make_reader(PrefixCachedModel, model.language_model, self.crop)
