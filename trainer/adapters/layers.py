"""Layers of adapters (LoRA, DoRA, LoKr), each added to the weight of one module. Needs torch only for tensors.

A layer is first created from a file's header, with keys and shapes only; rank and strength come from peft's
configuration in the header. `trainer/adapters/files.py` loads its tensors, and `trainer/adapters/header.py` describes
the formats.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from cache.store.json_checks import check_count, check_object, printable
from schemas.json_records import parse_json

if TYPE_CHECKING:
    import torch

Kind = Literal["LoRA", "DoRA", "LoKr"]
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, "torch.Tensor"]
#: Rank of the factors, or None -> rank and scale according to the file's header.
Strength = Callable[[int | None], tuple[int | None, float]]

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
SIDES = ("lokr_w1", "lokr_w2")
LOKR_TENSORS = tuple(f"{side}{end}" for side in SIDES for end in ("", "_a", "_b"))
METADATA_KEY = "lora_adapter_metadata"
MAX_ALPHA = 1e30  # well below the largest number of float32, the dtype in which other programs read alpha
MAX_PATTERNS = 10_000


@dataclass(frozen=True)
class Lora:
    """W + scale B A. The tensors are named by the ends of diffusers' keys: DOWN is A (rank, inputs, ...), UP is B
    (outputs, rank, ...), and for a DoRA, MAGNITUDE (outputs,) is the norm of each output's weights.

    keys: tensor -> key in the file. shapes: tensor -> shape. tensors: tensor -> values; empty until they are loaded.
    outputs: (first, end) of each part of this module's outputs in the file's layer, in the module's order; empty: the
    layer has the module's outputs in their order.
    """

    keys: dict[str, str]
    shapes: Shapes
    scale: float
    tensors: Tensors = field(default_factory=dict)
    outputs: tuple[tuple[int, int], ...] = ()

    def take(self, tensors: Tensors) -> Tensors:
        """This layer's tensors. tensors: key in the file -> tensor."""
        values = {tensor: tensors[key] for tensor, key in self.keys.items()}
        if not self.outputs:
            return values
        import torch

        return {
            name: tensor if name == DOWN else torch.cat([tensor[slice(*part)] for part in self.outputs])
            for name, tensor in values.items()
        }

    def split(self, sizes: Sequence[int]) -> "list[Lora]":
        """One layer per module, for modules with these numbers of outputs, which this layer concatenates."""
        layers = []
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            cut = {name: shape if name == DOWN else (size, *shape[1:]) for name, shape in self.shapes.items()}
            layers.append(replace(self, shapes=cut, outputs=((end - size, end),)))
        return layers

    def swap(self) -> "Lora":
        """The layer of a module whose outputs have their second half first in the file."""
        outputs = self.size[0]
        return replace(self, outputs=((outputs // 2, outputs), (0, outputs // 2)))

    @property
    def kind(self) -> Kind:
        return "DoRA" if MAGNITUDE in self.keys else "LoRA"

    @property
    def rank(self) -> int:
        return self.shapes[DOWN][0]

    file_rank = rank

    @property
    def alpha(self) -> float:
        """The alpha for which the scale is alpha / rank."""
        return self.scale * self.rank

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs) of the weight to which the layer is added."""
        return self.shapes[UP][0], math.prod(self.shapes[DOWN][1:])

    def apply(self, weight: "torch.Tensor") -> "torch.Tensor":
        """The float32 weight (outputs, inputs, ...) with the update. For a DoRA, each output's weights are then scaled
        to the norm in MAGNITUDE for any `scale`, as in peft (peft/tuners/lora/variants.py, after `set_scale`)."""
        product = self.tensors[UP].float().flatten(1) @ self.tensors[DOWN].float().flatten(1)
        weight = weight + self.scale * product.reshape(weight.shape)
        if MAGNITUDE not in self.tensors:
            return weight
        factor = self.tensors[MAGNITUDE].float().flatten() / weight.flatten(1).norm(dim=1)
        return factor.reshape(-1, *[1] * (weight.ndim - 1)) * weight

    def tensors_and_alpha(self) -> tuple[Tensors, float]:
        """The tensors, and the alpha that ComfyUI reads."""
        return self.tensors, self.alpha

    def with_strength(self) -> "Lora":
        """The same layer with the scale 1: B is multiplied by the scale."""
        return replace(self, scale=1.0, tensors={**self.tensors, UP: self.tensors[UP].float() * self.scale})


@dataclass(frozen=True)
class Lokr:
    """W + scale (w1 kron w2). The tensors have the names of LOKR_TENSORS.

    Each matrix is one tensor, lokr_w1 (L, M) or lokr_w2 (K, N, ...), or two factors: lokr_w1_a (L, rank) and lokr_w1_b
    (rank, M), and the same for w2. In files with diffusers' keys the scale is alpha / rank, both from the header
    (peft/tuners/lokr). LyCORIS and ComfyUI take alpha from a tensor and the rank from the factors, and ignore alpha if
    both matrices are whole (comfy/weight_adapter/lokr.py).

    keys: tensor -> key in the file. shapes: tensor -> shape. file_rank: rank; None if both matrices are whole and the
    header has no rank. tensors: tensor -> values; empty until they are loaded.
    """

    keys: dict[str, str]
    shapes: Shapes
    scale: float
    file_rank: int | None
    tensors: Tensors = field(default_factory=dict)
    kind: ClassVar[Kind] = "LoKr"

    def take(self, tensors: Tensors) -> Tensors:
        """This layer's tensors. tensors: key in the file -> tensor."""
        return {tensor: tensors[key] for tensor, key in self.keys.items()}

    @property
    def rank(self) -> int:
        """The given rank, or else a rank with which peft keeps both matrices whole."""
        return self.file_rank or max(max(self.matrix_shape(side)) for side in SIDES)

    @property
    def alpha(self) -> float:
        """The alpha for which the scale is alpha / rank."""
        return self.scale * self.rank

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs) of the weight to which the layer is added."""
        (outputs, inputs), (right_outputs, *right_inputs) = (self.matrix_shape(side) for side in SIDES)
        return outputs * right_outputs, inputs * math.prod(right_inputs)

    def matrix_shape(self, side: str) -> tuple[int, ...]:
        """Shape of the whole w1 (L, M) or w2 (K, N, ...)."""
        if side in self.shapes:
            return self.shapes[side]
        return self.shapes[f"{side}_a"][0], *self.shapes[f"{side}_b"][1:]

    def matrix(self, side: str) -> "torch.Tensor":
        """The whole w1 (L, M) or w2 (K, N, ...), in float32."""
        if side in self.tensors:
            return self.tensors[side].float()
        return self.tensors[f"{side}_a"].float() @ self.tensors[f"{side}_b"].float()

    def apply(self, weight: "torch.Tensor") -> "torch.Tensor":
        """The float32 weight (outputs, inputs, ...) with the update. The axes of a convolution's kernel are the last
        axes of both w2 and the weight, so flattening them into the inputs keeps their order."""
        product = self.matrix(SIDES[0]).kron(self.matrix(SIDES[1]).flatten(1))
        return weight + self.scale * product.reshape(weight.shape)

    def tensors_and_alpha(self) -> tuple[Tensors, float]:
        """The tensors and alpha that LyCORIS and ComfyUI read. If both matrices are whole, the first is multiplied by
        the scale."""
        if self.tensors.keys() != set(SIDES):
            return self.tensors, self.alpha
        return self.with_strength().tensors, float(self.rank)

    def with_strength(self) -> "Lokr":
        """The same layer with the scale 1: w1, or its first factor, is multiplied by the scale."""
        first = SIDES[0] if SIDES[0] in self.tensors else f"{SIDES[0]}_a"
        return replace(self, scale=1.0, tensors={**self.tensors, first: self.tensors[first].float() * self.scale})


Layer = Lora | Lokr


def pair_lora(name: str, keys: dict[str, str], shapes: Shapes, alpha: float | None, strength: Strength) -> Lora:
    """The LoRA or DoRA layer of a module. ValueError if tensors are missing or don't belong together.

    name: name of the module. keys: tensor -> key. shapes: key -> shape. alpha: value of the alpha tensor; None if the
    file has no such tensor. strength: function that returns rank and scale if `alpha` is None.
    """
    if not {DOWN, UP} <= keys.keys() <= {DOWN, UP, MAGNITUDE}:
        raise ValueError(f"{name} is incomplete: it has only {', '.join(keys.values())}")
    sizes = {tensor: shapes[key] for tensor, key in keys.items()}
    down, up = sizes[DOWN], sizes[UP]
    if len(down) < 2 or len(down) != len(up) or 0 in (*down, *up) or down[0] != math.prod(up[1:]):
        raise ValueError(f"the tensors of {name} don't belong together: A {list(down)}, B {list(up)}")
    if MAGNITUDE in sizes and (numbers := math.prod(sizes[MAGNITUDE])) != up[0]:
        raise ValueError(f"{name} has {up[0]} outputs, and {keys[MAGNITUDE]} {numbers}")
    return Lora(keys, sizes, strength(down[0])[1] if alpha is None else alpha / down[0])


def pair_lokr(name: str, keys: dict[str, str], shapes: Shapes, alpha: float | None, strength: Strength) -> Lokr:
    """The LoKr layer of a module, with the parameters and errors of `pair_lora`."""
    sizes = {tensor: shapes[key] for tensor, key in keys.items()}
    for side in SIDES:
        if {key for key in sizes if key.startswith(side)} not in ({side}, {f"{side}_a", f"{side}_b"}):
            raise ValueError(f"{name} is incomplete: it has only {', '.join(keys.values())}")
    flat = all(len(shape) == 2 or (tensor == SIDES[1] and len(shape) > 2) for tensor, shape in sizes.items())
    ranks = {axis for side in SIDES if side not in sizes for axis in (*sizes[f"{side}_a"][1:], *sizes[f"{side}_b"][:1])}
    if not flat or len(ranks) > 1 or any(0 in shape for shape in sizes.values()):
        matrices = ", ".join(f"{tensor} {list(shape)}" for tensor, shape in sizes.items())
        raise ValueError(f"the tensors of {name} don't belong together: {matrices}")
    rank = next(iter(ranks), None)
    if alpha is None:
        rank, scale = strength(rank)
    else:
        scale = 1.0 if rank is None else alpha / rank
    return Lokr(keys, sizes, scale, rank)


def check_alpha(value: Any, label: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:
        raise ValueError(f"{label} must be a number up to {MAX_ALPHA:g}, not {printable(repr(value))}")
    return float(value)


def read_configs(
    header: Mapping[str, str], names: Iterable[str]
) -> Callable[[str, int | None], tuple[int | None, float]]:
    """A function strength_of(name, rank of the tensors or None) that returns rank and scale according to the peft
    configurations in the header. ValueError if the configurations are malformed. names: all possible names,
    "<component>.<module path>"."""
    text = header.get(METADATA_KEY)
    metadata = {} if text is None else check_object(parse_json(text.encode()), METADATA_KEY)

    @cache
    def config_of(part: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        # The keys have no component if the transformer's own save_lora_adapter wrote them.
        config = {key.removeprefix(f"{part}."): value for key, value in metadata.items() if key.startswith(f"{part}.")}
        config = config or metadata
        modules = [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]
        ranks, alphas = (_by_pattern(config.get(key) or {}, key, modules) for key in ("rank_pattern", "alpha_pattern"))
        return config, ranks, alphas

    def strength_of(name: str, rank: int | None) -> tuple[int | None, float]:
        part, _, module = name.partition(".")
        config, ranks, alphas = config_of(part)
        if not config:
            return rank, 1.0
        rank_entry = check_count(ranks.get(module, config.get("r")), f"the header's rank of {name}")
        if rank not in (None, rank_entry) or not rank_entry:
            raise ValueError(f"{module} has rank {rank_entry} in the header, but {rank or 'another'} in its tensors")
        alpha = alphas.get(module, config.get("lora_alpha", config.get("alpha")))  # "alpha" for a LoKr
        divisor = math.sqrt(rank_entry) if config.get("use_rslora") else rank_entry
        return rank_entry, check_alpha(alpha, "lora_alpha") / divisor

    return strength_of


def _by_pattern(patterns: Any, label: str, modules: list[str]) -> dict[str, Any]:
    """Module -> value of the first pattern that matches the end of its path, as in peft's get_pattern_key. The regular
    expressions are evaluated by RE2, in time proportional to the text; Python's own engine takes forever with some
    patterns."""
    if len(check_object(patterns, label)) > MAX_PATTERNS:
        raise ValueError(f"{label} has {len(patterns)} patterns, more than {MAX_PATTERNS}")
    by_module, paths = dict[str, Any](), pa.array(modules, pa.string())
    for key, value in reversed(patterns.items()):
        try:
            matched = pc.match_substring_regex(paths, pattern=rf"^(.*\.)?({key})$")
        except pa.ArrowInvalid as error:
            raise ValueError(f"{label} has a pattern that is not a valid RE2 expression: {error}") from error
        by_module |= dict.fromkeys(paths.filter(matched).to_pylist(), value)
    return by_module
