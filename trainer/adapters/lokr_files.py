"""LoKr tensors of one module: what they add to a weight, and how each program's files hold them.

`trainer/adapters/lokr_header.py` describes the tensors and where their scale is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.adapters.header import AdapterError
from trainer.adapters.lokr_header import SIDES

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Lokr:
    """W + scale (w1 kron w2) of one module. tensors: by the names of `lokr_header.TENSORS`. given_rank: None where both
    matrices are whole and no header says it."""

    tensors: Tensors
    given_rank: int | None
    scale: float

    @property
    def rank(self) -> int:
        """The given one, or one with which peft keeps both matrices whole."""
        return self.given_rank or max(*self.matrix(SIDES[0]).shape, *self.matrix(SIDES[1]).shape)

    @property
    def alpha(self) -> float:
        return self.scale * self.rank

    def matrix(self, side: str) -> torch.Tensor:
        """w1 (L, M) or w2 (K, N, ...) in float32, multiplied out."""
        if side in self.tensors:
            return self.tensors[side].float()
        return self.tensors[f"{side}_a"].float() @ self.tensors[f"{side}_b"].float()

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """The float32 weight (outputs, inputs, ...) with the update. Axes of a kernel are the last of w2's and of the
        weight's, so they stay together as inputs."""
        product = torch.kron(self.matrix(SIDES[0]), self.matrix(SIDES[1]).flatten(1))
        return weight + self.scale * product.reshape(weight.shape)

    def with_alpha(self) -> Tensors:
        """The tensors and alpha as LyCORIS and ComfyUI read them: of two whole matrices the first has the scale."""
        tensors, alpha = dict(self.tensors), self.alpha
        if tensors.keys() == set(SIDES):
            tensors[SIDES[0]], alpha = self.matrix(SIDES[0]) * self.scale, float(self.rank)
        return {**tensors, "alpha": torch.tensor(alpha)}


def find_decomposition(layers: Mapping[str, Lokr]) -> dict[str, Any]:
    """decompose_factor and decompose_both with which peft makes matrices of these sizes. AdapterError where there are
    none, as other programs divide sides differently."""
    from peft.tuners.lokr.layer import factorization

    both = any(SIDES[0] not in layer.tensors for layer in layers.values())
    sides = dict[int, tuple[int, str]]()  # product -> its first factor, and a module that has it
    for name, layer in layers.items():
        w1, w2 = layer.matrix(SIDES[0]).shape, layer.matrix(SIDES[1]).shape
        whole = not (both and layer.rank < max(w1) / 2), layer.rank >= max(w2[:2]) / 2
        same = all(sides.setdefault(a * b, (a, name))[0] == a for a, b in zip(w1, w2[:2], strict=True))
        if whole != tuple(side in layer.tensors for side in SIDES) or not same:
            raise _unlike_peft(name, layer)
    most = max(first for first, _ in sides.values())
    for factor in (-1, *range(1, most + 1)):
        if all(factorization(product, factor)[0] == first for product, (first, _) in sides.items()):
            return {"decompose_factor": factor, "decompose_both": both}
    name = next(name for product, (first, name) in sides.items() if factorization(product)[0] != first)
    raise _unlike_peft(name, layers[name])


def _unlike_peft(name: str, layer: Lokr) -> AdapterError:
    shown = ", ".join(f"{key} {list(value.shape)}" for key, value in layer.tensors.items())
    return AdapterError(
        f"the LoKr of {name} can't be in diffusers' format: peft does not divide a weight into {shown}",
        "Merge it into the model: latentpress export-adapter --merge --to FOLDER",
    )
