"""Quantised weights as plain tensors, which `fully_shard` splits, gathers and frees like any other.

`fully_shard` copies a weight's values only, so that the tensor subclasses of torchao, optimum-quanto and bitsandbytes
would lose their scales. Here the numbers and the scales of such a weight become parameters of their own, by
torch.nn.utils.parametrize, and the weight is made of them again each time when its layer computes. It shares their
memory, which `fully_shard` fills again before the backward pass reads it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils import parametrize

#: The numbers of 8 or 4 bits go under a dtype that torch takes for floating-point, as each parameter that it shards
#: must be; nothing computes in it.
BYTES = torch.float8_e5m2


class QuantizedWeight(torch.nn.Module):
    """A parametrization: the tensors that a quantised weight consists of, all of them sharded -> the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        parts, self._make = take_apart(weight)
        self._dtypes = [part.dtype for part in parts]

    def right_inverse(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """What the parameters are made of when this is registered."""
        return [part if part.is_floating_point() else part.view(BYTES) for part in take_apart(weight)[0]]

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self._make([part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)])


def take_apart(weight: torch.Tensor) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], torch.Tensor]]:
    """The tensors that a quantised weight consists of, and what makes a weight of such."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        settings = {name: getattr(state, name) for name in ("shape", "code", "blocksize", "quant_type", "dtype")}
        return [weight.data, state.absmax], partial(make_nf4, settings)
    # torch's protocol of tensors that wrap others: torch/utils/_python_dispatch.py
    names, context = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    make = partial(unflatten, type(weight), names, context, weight.shape, weight.stride())
    return [getattr(weight, name) for name in names], make


def unflatten(
    kind: Any, names: Sequence[str], context: Any, shape: torch.Size, stride: Any, parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    found: torch.Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, shape, stride)
    return found


def make_nf4(settings: dict[str, Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """bitsandbytes' weight. settings: of its state; the 16 values that 4 bits stand for move to the parts' device."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    packed, absmax = parts
    settings["code"] = settings["code"].to(absmax.device)
    own = {name: settings[name] for name in ("blocksize", "quant_type")}
    state = QuantState(absmax, **settings)
    return Params4bit(packed, quant_state=state, compress_statistics=False, bnb_quantized=True, **own)


def split_quantized(model: torch.nn.Module) -> None:
    """Replace the quantised weights of a model by parameters that can be sharded. In place."""
    for part in [*model.modules()]:
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if weight is not None and is_quantized(weight):
            parametrize.register_parametrization(part, "weight", QuantizedWeight(weight), unsafe=True)


def is_quantized(weight: torch.Tensor) -> bool:
    return hasattr(weight, "__tensor_flatten__") or getattr(weight, "quant_state", None) is not None
