"""Texts read by a model whose tokens see each other in both directions: each text sees itself alone, by a mask.

Nothing can be shared between texts, as the first tokens' states depend on the last ones. A text's states are those of
the text by itself, however long the others of its pass are.
"""

from collections.abc import Sequence

import torch

from stages.encoding.text.reader import PreparedPrompt, TextReader


class MaskedModel(TextReader):
    """An encoder, such as T5's, that is called with ids and a mask of the padding."""

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """ids_BL, and what is added to attention's scores, mask_B11L. Of a mask with two axes transformers would ask
        the device whether it leaves anything out; one with four is used as it is."""
        ids_BL = self._ids(texts)
        lengths_B1 = torch.tensor([[text.cost] for text in texts])
        padding_BL = torch.arange(ids_BL.shape[1]) >= lengths_B1
        mask_BL = torch.zeros(ids_BL.shape, dtype=self._model.dtype)
        return [ids_BL, mask_BL.masked_fill_(padding_BL, torch.finfo(mask_BL.dtype).min)[:, None, None]]

    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        ids_BL, mask_B11L = inputs
        self.stats.whole += len(texts)
        return self._run(input_ids=ids_BL, attention_mask=mask_B11L)
