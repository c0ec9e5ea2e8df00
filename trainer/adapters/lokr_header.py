"""One module's LoKr in an adapter file, from its header: W + scale (w1 kron w2). Without torch.

Each matrix is a tensor, lokr_w1 (L, M) and lokr_w2 (K, N, ...), or two factors: lokr_w1_a (L, rank) and lokr_w1_b
(rank, M), the same of w2. In files with diffusers' keys the scale is alpha / rank, both in the header
(peft/tuners/lokr). LyCORIS and ComfyUI take alpha from a tensor and the rank from the factors, and ignore alpha where
both matrices are whole (comfy/weight_adapter/lokr.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SIDES = ("lokr_w1", "lokr_w2")
TENSORS = tuple(f"{side}{end}" for side in SIDES for end in ("", "_a", "_b"))
#: Rank that the factors have, or None -> rank and scale that the file's header says.
Strength = Callable[[int | None], tuple[int | None, float]]


@dataclass(frozen=True)
class LokrLayer:
    """keys, shapes: of the layer's tensors, by their names in TENSORS. rank: None where both matrices are whole and no
    header says it."""

    keys: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    rank: int | None
    scale: float

    @property
    def alpha(self) -> float | None:
        """With which the scale is alpha / rank."""
        return None if self.rank is None else self.scale * self.rank

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of the weight that it is added to."""
        (left_out, left_in), (right_out, right_in) = self.matrix(SIDES[0]), self.matrix(SIDES[1])
        return left_out * right_out, left_in * right_in

    def matrix(self, side: str) -> tuple[int, int]:
        """Shape of w1 or w2, multiplied out and with the inputs' axes as one."""
        if side in self.shapes:
            return self.shapes[side][0], math.prod(self.shapes[side][1:])
        return self.shapes[f"{side}_a"][0], math.prod(self.shapes[f"{side}_b"][1:])


def pair_factors(
    name: str,
    keys: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    alpha: float | None,
    strength: Strength,
) -> LokrLayer:
    """The layer of the tensors `keys` (tensor -> key). alpha: of a tensor, where there is one. ValueError where tensors
    are missing or don't belong together."""
    own = {tensor: key for tensor, key in keys.items() if tensor in TENSORS}
    said = {tensor: shapes[key] for tensor, key in own.items()}
    for side in SIDES:
        if {key for key in said if key.startswith(side)} not in ({side}, {f"{side}_a", f"{side}_b"}):
            raise ValueError(f"of {name} it has only {', '.join(keys.values())}")
    flat = all(len(shape) == 2 or (tensor == SIDES[1] and len(shape) > 2) for tensor, shape in said.items())
    ranks = {axis for side in SIDES if side not in said for axis in (*said[f"{side}_a"][1:], *said[f"{side}_b"][:1])}
    if not flat or len(ranks) > 1 or any(0 in shape for shape in said.values()):
        shown = ", ".join(f"{tensor} {list(shape)}" for tensor, shape in said.items())
        raise ValueError(f"the tensors of {name} don't belong together: {shown}")
    rank = next(iter(ranks), None)
    if alpha is None:
        rank, scale = strength(rank)
    else:
        scale = 1.0 if rank is None else alpha / rank
    return LokrLayer(own, said, rank, scale)
