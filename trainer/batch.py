"""The batch of one forward pass, and padding of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

#: Fill value of a tensor that only some samples of a batch have: without a mask, everything is trained on.
ABSENT = {"mask": 1.0, "regularisation": False}


@dataclass
class Batch:
    """Samples of one bucket, latents in model space (normalised).

    latents_BCTHW: images have T = 1. condition_BCTHW: the first frames encoded alone (i2v), or the source image (i2i).
    text_BLD: zero-padded on the right; text_mask_BL: True for real tokens. bucket: "WxH@F". extras: every other tensor
    (B, ...) by its encoding stage's name, such as "mask"; those of the text as "text.<name>"; "regularisation" (B,),
    bool, where some sample of the batch is regularisation data.
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
        """On a device, with floating-point tensors in a dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        moved: dict[str, Any] = {name: move(it) for name, it in vars(self).items() if isinstance(it, torch.Tensor)}
        return replace(self, **moved, extras={name: move(value) for name, value in self.extras.items()})

    def select(self, rows: torch.Tensor) -> "Batch":
        """The samples at these positions (R,), on the batch's device, with as many text tokens."""
        chosen: dict[str, Any] = {name: it[rows] for name, it in vars(self).items() if isinstance(it, torch.Tensor)}
        extras = {name: value[rows] for name, value in self.extras.items()}
        return replace(self, **chosen, ids=[self.ids[row] for row in rows.tolist()], extras=extras)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device. The host does not wait for what is queued on a CUDA device, as it does where it copies
    from pages that are not locked."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


def stack(ids: Sequence[str], samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """name -> (B, ...). ValueError where shapes differ, or a sample lacks a tensor that is not in ABSENT."""
    stacked = {}
    for name in sorted({name for tensors in samples for name in tensors}):
        first = next(tensors[name] for tensors in samples if name in tensors)
        lacking = [id for id, tensors in zip(ids, samples, strict=True) if name not in tensors]
        if lacking and name not in ABSENT:
            raise ValueError(f"sample {lacking[0]} has no {name}, and others of its batch have one")
        rows = [tensors[name] if name in tensors else torch.full_like(first, ABSENT[name]) for tensors in samples]
        shape = tuple(first.shape)
        if others := {tuple(row.shape) for row in rows} - {shape}:
            raise ValueError(f"{name} is of shape {shape} in one sample of a batch and {min(others)} in another")
        stacked[name] = torch.stack(rows)
    return stacked


def pad_text(texts_LD: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (L_i, D) of unequal length -> (B, max L, D) zero-padded on the right, (B, max L) bool mask."""
    if not texts_LD:
        raise ValueError("no texts to pad; a batch has at least one sample")
    lengths = [text.shape[0] for text in texts_LD]
    if min(lengths) == 0:
        raise ValueError(f"text {lengths.index(0)} of the batch has no tokens; even an empty prompt has some")
    text_BLD = torch.nn.utils.rnn.pad_sequence(list(texts_LD), batch_first=True)
    positions_L = torch.arange(max(lengths), device=text_BLD.device)
    return text_BLD, positions_L < torch.tensor(lengths, device=text_BLD.device)[:, None]
