"""Texts of which the padding is a part: a causal model's states at every position up to a length.

A real token sees the real tokens up to itself, and padding all real tokens, from its own position: neither itself nor
other padding. So its states depend on the text and on the position, and are computed for each text.
"""

from collections.abc import Sequence

import torch

from stages.encoding.text.reader import PreparedPrompt, TextReader


class PaddedModel(TextReader):
    """A causal language model that reads texts padded on the right, all to one length, as `PreparedPrompt.ids` are."""

    def _inputs(self, texts: Sequence[PreparedPrompt]) -> list[torch.Tensor]:
        """ids_BL, and how many of them are real, lengths_B."""
        return [self._ids(texts), torch.tensor([min(text.untruncated, len(text.ids)) for text in texts])]

    def _pass(self, texts: Sequence[PreparedPrompt], *inputs: torch.Tensor) -> torch.Tensor:
        ids_BL, lengths_B = inputs
        self.stats.whole += len(texts)
        return self._run(input_ids=ids_BL, attention_mask=self._mask(ids_BL.shape[1], lengths_B), use_cache=False)

    def _mask(self, length: int, lengths_B: torch.Tensor) -> torch.Tensor:
        """The mask mask_B1LL that attention adds to its scores, made on the device. Of a mask with two axes
        transformers would ask the device whether it leaves anything out; one with four is used as it is."""
        places_L = torch.arange(length, device=self.device)
        seen_BLL = (places_L <= places_L[:, None]) & (places_L < lengths_B[:, None, None])
        mask_BLL = torch.zeros(seen_BLL.shape, dtype=self._model.dtype, device=self.device)
        return mask_BLL.masked_fill_(~seen_BLL, torch.finfo(mask_BLL.dtype).min)[:, None]
