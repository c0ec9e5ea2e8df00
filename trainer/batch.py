"""What one forward pass of training reads, and how captions of unequal length share a tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

#: What stands for a tensor that others of a batch have: a sample without a mask is trained everywhere.
ABSENT = {"mask": 1.0}


@dataclass
class Batch:
    """Samples of one bucket, in model space (latents already multiplied by the autoencoder's scaling_factor).

    latents_BCTHW: images have T = 1. condition_BCTHW: i2v the first frame encoded alone (T = 1), i2i the
    source image's latent (T = 1). text_BLD: zero-padded on the right; text_mask_BL: True for real tokens.
    bucket: "WxH@F", pixels and frames. extras: every other tensor of a sample (B, ...), by the name that its encoding
    stage gives it ("mask"); those of its text as "text.<name>".
    """

    latents_BCTHW: torch.Tensor
    condition_BCTHW: torch.Tensor | None
    text_BLD: torch.Tensor
    text_mask_BL: torch.Tensor
    pooled_BD: torch.Tensor | None
    ids: list[str]
    bucket: str
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.latents_BCTHW.shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """On a device, with every tensor of floating point in a dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        moved: dict[str, Any] = {
            key: move(value) for key, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved, extras={name: move(value) for name, value in self.extras.items()})


def stack(ids: Sequence[str], samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """name -> (B, ...) of samples' tensors by name. ValueError where one lacks what another has and nothing stands for
    it, or where their shapes differ."""
    found = {}
    for name in sorted({name for tensors in samples for name in tensors}):
        some = next(tensors[name] for tensors in samples if name in tensors)
        lacking = [id for id, tensors in zip(ids, samples, strict=True) if name not in tensors]
        if lacking and name not in ABSENT:
            raise ValueError(f"sample {lacking[0]} has no {name}, and others of its batch have one")
        rows = [tensors[name] if name in tensors else torch.full_like(some, ABSENT[name]) for tensors in samples]
        if shapes := {tuple(row.shape) for row in rows} - {tuple(some.shape)}:
            raise ValueError(
                f"{name} is of shape {tuple(some.shape)} in one sample of a batch and {min(shapes)} in another"
            )
        found[name] = torch.stack(rows)
    return found


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
