"""Layers of adapters, added to the weight of one module: LoRA, DoRA and LoKr. Without torch until tensors are loaded.

A layer is read from a file's header first, with keys and shapes alone, and rank and strength as peft's configuration in
it says; `trainer/adapters/files.py` loads its tensors. `trainer/adapters/header.py` describes the formats.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
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
#: Rank that the factors have, or None -> rank and scale that the file's header says.
Strength = Callable[[int | None], tuple[int | None, float]]

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
SIDES = ("lokr_w1", "lokr_w2")
LOKR_TENSORS = tuple(f"{side}{end}" for side in SIDES for end in ("", "_a", "_b"))
METADATA_KEY = "lora_adapter_metadata"
MAX_ALPHA = 1e30  # well below float32's largest number, as which other programs read alpha
MAX_PATTERNS = 10_000


@dataclass(frozen=True)
class Lora:
    """W + scale B A. Tensors by the ends of diffusers' keys: DOWN is A (rank, inputs, ...), UP is B (outputs, rank,
    ...); of a DoRA MAGNITUDE, one number for each output: the norm of the output's weights.

    keys: of the tensors in the file. tensors: empty until they are loaded. outputs: the first, and the one after
    the last, of the file's layer, where that is of several modules.
    """

    keys: dict[str, str]
    shapes: Shapes
    scale: float
    tensors: Tensors = field(default_factory=dict)
    outputs: tuple[int, int] | None = None

    def take(self, tensors: Tensors) -> Tensors:
        """Its own of the file's tensors, which are by their keys."""
        taken = {tensor: tensors[key] for tensor, key in self.keys.items()}
        if self.outputs is None:
            return taken
        return {name: tensor if name == DOWN else tensor[slice(*self.outputs)] for name, tensor in taken.items()}

    def split(self, parts: int) -> "list[Lora]":
        """The layers of so many modules of equal size, whose outputs this layer has one after the other."""
        size = self.shapes[UP][0] // parts
        cut = {name: shape if name == DOWN else (size, *shape[1:]) for name, shape in self.shapes.items()}
        return [replace(self, shapes=cut, outputs=(n * size, (n + 1) * size)) for n in range(parts)]

    @property
    def kind(self) -> Kind:
        return "DoRA" if MAGNITUDE in self.keys else "LoRA"

    @property
    def rank(self) -> int:
        return self.shapes[DOWN][0]

    given_rank = rank

    @property
    def alpha(self) -> float:
        """With which the scale is alpha / rank."""
        return self.scale * self.rank

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of the weight that it is added to."""
        return self.shapes[UP][0], math.prod(self.shapes[DOWN][1:])

    def apply(self, weight: "torch.Tensor") -> "torch.Tensor":
        """The float32 weight (outputs, inputs, ...) with the update. Of a DoRA each output's weights then get its
        magnitude as their norm, whatever the scale is, as in peft (peft/tuners/lora/variants.py, after `set_scale`)."""
        product = self.tensors[UP].float().flatten(1) @ self.tensors[DOWN].float().flatten(1)
        weight = weight + self.scale * product.reshape(weight.shape)
        if MAGNITUDE not in self.tensors:
            return weight
        factor = self.tensors[MAGNITUDE].float().flatten() / weight.flatten(1).norm(dim=1)
        return factor.reshape(-1, *[1] * (weight.ndim - 1)) * weight

    def tensors_and_alpha(self) -> tuple[Tensors, float]:
        """The tensors and alpha that ComfyUI reads."""
        return self.tensors, self.alpha


@dataclass(frozen=True)
class Lokr:
    """W + scale (w1 kron w2). Tensors by the names of LOKR_TENSORS.

    Each matrix is a tensor, lokr_w1 (L, M) and lokr_w2 (K, N, ...), or two factors: lokr_w1_a (L, rank) and lokr_w1_b
    (rank, M), the same of w2. In files with diffusers' keys the scale is alpha / rank, both in the header
    (peft/tuners/lokr). LyCORIS and ComfyUI take alpha from a tensor and the rank from the factors, and ignore alpha
    where both matrices are whole (comfy/weight_adapter/lokr.py).

    keys: of the tensors in the file. given_rank: None where both matrices are whole and no header says it. tensors:
    empty until they are loaded.
    """

    keys: dict[str, str]
    shapes: Shapes
    scale: float
    given_rank: int | None
    tensors: Tensors = field(default_factory=dict)
    kind: ClassVar[Kind] = "LoKr"

    def take(self, tensors: Tensors) -> Tensors:
        """Its own of the file's tensors, which are by their keys."""
        return {tensor: tensors[key] for tensor, key in self.keys.items()}

    @property
    def rank(self) -> int:
        """The given one, or one with which peft keeps both matrices whole."""
        return self.given_rank or max(max(self.matrix_shape(side)) for side in SIDES)

    @property
    def alpha(self) -> float:
        """With which the scale is alpha / rank."""
        return self.scale * self.rank

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs of the weight that it is added to."""
        (outputs, inputs), (right_outputs, *right_inputs) = (self.matrix_shape(side) for side in SIDES)
        return outputs * right_outputs, inputs * math.prod(right_inputs)

    def matrix_shape(self, side: str) -> tuple[int, ...]:
        """Shape of w1 (L, M) or w2 (K, N, ...), multiplied out."""
        if side in self.shapes:
            return self.shapes[side]
        return self.shapes[f"{side}_a"][0], *self.shapes[f"{side}_b"][1:]

    def matrix(self, side: str) -> "torch.Tensor":
        """w1 (L, M) or w2 (K, N, ...) in float32, multiplied out."""
        if side in self.tensors:
            return self.tensors[side].float()
        return self.tensors[f"{side}_a"].float() @ self.tensors[f"{side}_b"].float()

    def apply(self, weight: "torch.Tensor") -> "torch.Tensor":
        """The float32 weight (outputs, inputs, ...) with the update. Axes of a kernel are the last of w2's and of the
        weight's, so they stay together as inputs."""
        product = self.matrix(SIDES[0]).kron(self.matrix(SIDES[1]).flatten(1))
        return weight + self.scale * product.reshape(weight.shape)

    def tensors_and_alpha(self) -> tuple[Tensors, float]:
        """The tensors and alpha that LyCORIS and ComfyUI read: of two whole matrices the first has the scale."""
        if self.tensors.keys() != set(SIDES):
            return self.tensors, self.alpha
        return {**self.tensors, SIDES[0]: self.matrix(SIDES[0]) * self.scale}, float(self.rank)


Layer = Lora | Lokr


def pair_lora(name: str, keys: dict[str, str], shapes: Shapes, alpha: float | None, strength: Strength) -> Lora:
    """The layer of the tensors `keys` (tensor -> key) with these shapes (by key), a LoRA or DoRA. alpha: of a tensor,
    where there is one. ValueError where tensors are missing or don't belong together."""
    if not {DOWN, UP} <= keys.keys() <= {DOWN, UP, MAGNITUDE}:
        raise ValueError(f"of {name} it has only {', '.join(keys.values())}")
    sizes = {tensor: shapes[key] for tensor, key in keys.items()}
    down, up = sizes[DOWN], sizes[UP]
    if len(down) < 2 or len(down) != len(up) or 0 in (*down, *up) or down[0] != math.prod(up[1:]):
        raise ValueError(f"the tensors of {name} don't belong together: A {list(down)}, B {list(up)}")
    if MAGNITUDE in sizes and (numbers := math.prod(sizes[MAGNITUDE])) != up[0]:
        raise ValueError(f"{name} has {up[0]} outputs, and {keys[MAGNITUDE]} {numbers}")
    return Lora(keys, sizes, strength(down[0])[1] if alpha is None else alpha / down[0])


def pair_lokr(name: str, keys: dict[str, str], shapes: Shapes, alpha: float | None, strength: Strength) -> Lokr:
    """The layer of a LoKr; arguments and errors as of `pair_lora`."""
    sizes = {tensor: shapes[key] for tensor, key in keys.items()}
    for side in SIDES:
        if {key for key in sizes if key.startswith(side)} not in ({side}, {f"{side}_a", f"{side}_b"}):
            raise ValueError(f"of {name} it has only {', '.join(keys.values())}")
    flat = all(len(shape) == 2 or (tensor == SIDES[1] and len(shape) > 2) for tensor, shape in sizes.items())
    ranks = {axis for side in SIDES if side not in sizes for axis in (*sizes[f"{side}_a"][1:], *sizes[f"{side}_b"][:1])}
    if not flat or len(ranks) > 1 or any(0 in shape for shape in sizes.values()):
        shown = ", ".join(f"{tensor} {list(shape)}" for tensor, shape in sizes.items())
        raise ValueError(f"the tensors of {name} don't belong together: {shown}")
    rank = next(iter(ranks), None)
    if alpha is None:
        rank, scale = strength(rank)
    else:
        scale = 1.0 if rank is None else alpha / rank
    return Lokr(keys, sizes, scale, rank)


def check_alpha(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:
        raise ValueError(f"{what} is no number up to {MAX_ALPHA:g}: {printable(repr(value))}")
    return float(value)


def read_configs(
    header: Mapping[str, str], names: Iterable[str]
) -> Callable[[str, int | None], tuple[int | None, float]]:
    """strength_of(name, rank of the tensors or None): rank and scale by the header's peft configurations. ValueError
    where they are malformed. names: all that it may be asked for, "<component>.<module path>"."""
    text = header.get(METADATA_KEY)
    whole = {} if text is None else check_object(parse_json(text.encode()), METADATA_KEY)

    @cache
    def config_of(part: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        # The keys have no component where the transformer's own save_lora_adapter wrote them.
        config = {key.removeprefix(f"{part}."): value for key, value in whole.items() if key.startswith(f"{part}.")}
        config = config or whole
        modules = [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]
        ranks, alphas = (_by_pattern(config.get(key) or {}, key, modules) for key in ("rank_pattern", "alpha_pattern"))
        return config, ranks, alphas

    def strength_of(name: str, rank: int | None) -> tuple[int | None, float]:
        part, _, module = name.partition(".")
        config, ranks, alphas = config_of(part)
        if not config:
            return rank, 1.0
        stated = check_count(ranks.get(module, config.get("r")), f"the header's rank of {name}")
        if rank not in (None, stated) or not stated:
            raise ValueError(f"the header says rank {stated} for {module}, and its tensors have {rank or 'another'}")
        alpha = alphas.get(module, config.get("lora_alpha", config.get("alpha")))  # the latter of a LoKr
        return stated, check_alpha(alpha, "lora_alpha") / (math.sqrt(stated) if config.get("use_rslora") else stated)

    return strength_of


def _by_pattern(patterns: Any, what: str, modules: list[str]) -> dict[str, Any]:
    """Module -> the value of the first pattern that matches the path's end, as peft's get_pattern_key. By RE2, which
    takes time in proportion to the text, whatever the pattern is; Python's own takes for ever over some."""
    if len(check_object(patterns, what)) > MAX_PATTERNS:
        raise ValueError(f"{what} has {len(patterns)} patterns, more than {MAX_PATTERNS}")
    by_module, paths = dict[str, Any](), pa.array(modules, pa.string())
    for key, value in reversed(patterns.items()):
        try:
            matched = pc.match_substring_regex(paths, pattern=rf"^(.*\.)?({key})$")
        except pa.ArrowInvalid as error:
            raise ValueError(f"a pattern of {what} is no regular expression of RE2: {error}") from error
        by_module |= dict.fromkeys(paths.filter(matched).to_pylist(), value)
    return by_module
