"""What one forward pass of training reads, and how captions of unequal length share a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass
class Batch:
    """Samples of one bucket, in model space (latents already multiplied by the autoencoder's scaling_factor).

    latents_BCTHW: images have T = 1. condition_BCTHW: i2v the first frame encoded alone (T = 1), i2i the
    source image's latent (T = 1). text_BLD: zero-padded on the right; text_mask_BL: True for real tokens.
    bucket: "WxH@F", pixels and frames.
    """

    latents_BCTHW: torch.Tensor
    condition_BCTHW: torch.Tensor | None
    text_BLD: torch.Tensor
    text_mask_BL: torch.Tensor
    pooled_BD: torch.Tensor | None
    ids: list[str]
    bucket: str

    def __len__(self) -> int:
        return self.latents_BCTHW.shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """On a device, with every tensor but the mask in a dtype."""

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        return replace(
            self,
            latents_BCTHW=self.latents_BCTHW.to(device=device, dtype=dtype),
            condition_BCTHW=move(self.condition_BCTHW),
            text_BLD=self.text_BLD.to(device=device, dtype=dtype),
            text_mask_BL=self.text_mask_BL.to(device=device),
            pooled_BD=move(self.pooled_BD),
        )


def pad_text(texts_LD: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (L_i, D) of unequal length -> (B, max L, D) zero-padded on the right, (B, max L) bool mask."""
    if not texts_LD:
        raise ValueError("no texts to pad; a batch has at least one sample")
    lengths = [text.shape[0] for text in texts_LD]
    if min(lengths) == 0:
        raise ValueError(f"text {lengths.index(0)} of the batch has no tokens; even an empty prompt has some")
    longest, width = max(lengths), texts_LD[0].shape[1]
    text_BLD = texts_LD[0].new_zeros(len(lengths), longest, width)
    mask_BL = torch.zeros(len(lengths), longest, dtype=torch.bool, device=text_BLD.device)
    for i, text in enumerate(texts_LD):
        text_BLD[i, : lengths[i]] = text
        mask_BL[i, : lengths[i]] = True
    return text_BLD, mask_BL
