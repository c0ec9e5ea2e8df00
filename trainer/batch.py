"""The batch of one forward pass, and padding of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cache.shards import tensor_checks
from schemas.devices import to_device
from schemas.family import REFERENCE_PARTS

SCALE = f"text.{tensor_checks.SCALE}"  # float32, factor of the numbers of each token, or of each token and layer
IMAGE_PLACES, NULL_IMAGE_PLACES = (f"{part}.{tensor_checks.IMAGE_PLACES}" for part in ("text", "null"))
NULL_LENGTHS = "null.lengths"  # (B,) int64, numbers of tokens of the null prompts
#: Tensors that stay on the CPU, because Python code reads them.
ON_HOST = frozenset({"regularization", NULL_LENGTHS, IMAGE_PLACES, NULL_IMAGE_PLACES})
NULL_SCALE = f"null.{tensor_checks.SCALE}"
TOKENWISE = ("text.embeds", SCALE, "null.embeds", NULL_SCALE)  # padded to the longest text of a batch
#: Fill value of a tensor that only some samples of a batch have: without a mask, everything is trained on.
ABSENT = {"mask": 1.0}


@dataclass
class Batch:
    """Samples of one bucket, latents in model space (normalized).

    latents_BCTHW: images have T = 1. condition_BCTHW: the first frames, encoded alone or followed by zeros (i2v), or
    the source image (i2i). In batches from the data loader, tensors are on the host in the dtypes in which they are
    stored; `to` converts them. text_BLD: zero-padded on the right; text_mask_BL: True for real tokens. bucket: "WxH@F".
    extras: additional tensors (B, ...) by the name of their encoding stage, such as "mask"; text tensors as
    "text.<name>", including SCALE (B, L) or (B, L, layers) while text_BLD is in 8 bits, and IMAGE_PLACES
    (B, references), int32, which stays on the CPU, if texts are stored without the states of their images;
    "regularization" (B,), bool, which stays on the CPU, if the batch contains regularization data; references, under
    the names of their parts; the null prompts' tensors as "null.<name>" and NULL_LENGTHS, if a method needs them
    (`with_null_text`). lengths: number of tokens of each text; by default computed from the mask.
    """

    latents_BCTHW: torch.Tensor
    condition_BCTHW: torch.Tensor | None
    text_BLD: torch.Tensor
    text_mask_BL: torch.Tensor
    pooled_BD: torch.Tensor | None
    ids: list[str]
    bucket: str
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.lengths:
            self.lengths = self.text_mask_BL.sum(1).tolist()

    @property
    def references(self) -> list[torch.Tensor]:
        """Reference images in their order, (B, C, 1, h, w) each; the sizes may differ."""
        return [self.extras[part] for part in REFERENCE_PARTS if part in self.extras]

    @property
    def padded(self) -> bool:
        """Whether some text has padding; computed on the CPU, because reading the mask would wait for the device."""
        return min(self.lengths) < self.text_BLD.shape[1]

    def __len__(self) -> int:
        return self.latents_BCTHW.shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """Returns the batch on a device, with floating-point tensors in a dtype: tensors are copied, then converted
        there."""
        extras, text_BLD = {**self.extras}, self.text_BLD
        if (scale := extras.pop(SCALE, None)) is not None:
            text_BLD = scale_tokens(text_BLD, scale, device)
        if (scale := extras.pop(NULL_SCALE, None)) is not None:
            extras["null.embeds"] = scale_tokens(extras["null.embeds"], scale, device)
        if len(extras) < len(self.extras):
            return replace(self, text_BLD=text_BLD, extras=extras).to(device, dtype)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = to_device(tensor, torch.device(device))
            return moved.to(dtype) if tensor.is_floating_point() else moved

        moved: dict[str, Any] = {
            name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(
            self,
            **moved,
            extras={name: value if name in ON_HOST else move(value) for name, value in self.extras.items()},
        )

    def is_finite(self) -> torch.Tensor:
        """Returns a bool tensor (), on the batch's device: whether all numbers are finite."""
        tensors = [
            tensor.float() if tensor.itemsize == 1 else tensor  # torch.isfinite does not support float8
            for tensor in (*vars(self).values(), *self.extras.values())
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        ]
        return torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()

    def select(self, rows: torch.Tensor) -> "Batch":
        """Returns the samples at positions `rows` (R,), a CPU tensor; the number of text tokens does not change."""
        device_rows = to_device(rows, self.latents_BCTHW.device)
        values: dict[str, Any] = {
            name: value[device_rows] for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        extras = {name: value[rows if name in ON_HOST else device_rows] for name, value in self.extras.items()}
        values |= {name: [getattr(self, name)[row] for row in rows.tolist()] for name in ("ids", "lengths")}
        return replace(self, **values, extras=extras)

    def with_null_text(self) -> "Batch":
        """Returns the batch with each sample's null prompt in place of its text."""
        lengths = self.extras[NULL_LENGTHS].tolist()
        texts = {name.removeprefix("null."): value for name, value in self.extras.items() if name.startswith("null.")}
        extras = {name: value for name, value in self.extras.items() if not name.startswith(("text.", "null."))}
        further = texts.keys() - {"embeds", "pooled", "lengths"}
        return replace(
            self,
            text_BLD=texts["embeds"],
            text_mask_BL=to_device(text_mask(lengths, texts["embeds"].shape[1]), self.text_BLD.device),
            pooled_BD=texts.get("pooled"),
            extras=extras | {f"text.{name}": texts[name] for name in further},
            lengths=lengths,
        )


def scale_tokens(stored_BLD: torch.Tensor, scale: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns 8-bit texts (B, L, D) as float32 numbers on the device. scale: (B, L) or (B, L, layers)."""
    text_BLD, scale = (to_device(part, torch.device(device)) for part in (stored_BLD, scale))
    scale_BLK = scale if scale.ndim == 3 else scale[..., None]
    text_BLKD = text_BLD.float().unflatten(-1, (scale_BLK.shape[-1], -1)) * scale_BLK[..., None]
    return text_BLKD.flatten(-2)


def make_batch(ids: Sequence[str], bucket: str, tensors: dict[str, torch.Tensor], lengths: Sequence[int]) -> Batch:
    """Make a batch. tensors: name -> (B, ...), with text tensors as "text.<name>". lengths: numbers of text tokens."""
    latent, condition = tensors.pop("latent"), tensors.pop("condition", None)
    text, pooled = tensors.pop("text.embeds"), tensors.pop("text.pooled", None)
    return Batch(latent, condition, text, text_mask(lengths), pooled, list(ids), bucket, tensors, [*lengths])


def text_mask(lengths: Sequence[int], size: int | None = None) -> torch.Tensor:
    """(B, L) bool: True for real tokens of texts with these lengths. size: L; by default the largest length. Raises
    ValueError if a length is 0."""
    if 0 in lengths:
        raise ValueError(f"text {lengths.index(0)} of the batch has no tokens; even an empty prompt has some")
    return torch.arange(size or max(lengths)) < torch.tensor(lengths)[:, None]
