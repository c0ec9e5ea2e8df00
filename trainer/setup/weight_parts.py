"""Weights as the plain tensors that they consist of, quantized ones too: their numbers, and the scales of these."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Make = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def take_apart(weight: torch.Tensor) -> tuple[list[torch.Tensor], Make]:
    """The tensors that a weight consists of, and what makes such a weight of tensors like them."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        assert not state.nested, "scales are float32 here, and not quantized themselves"
        settings = {name: getattr(state, name) for name in ("shape", "blocksize", "quant_type", "dtype")}
        return [weight.data, state.absmax, state.code], partial(make_nf4, settings)
    if hasattr(weight, "__tensor_flatten__"):  # torch's protocol of tensors that wrap others (quanto, torchao)
        names, context = weight.__tensor_flatten__()
        make = partial(unflatten, type(weight), names, context, weight.shape, weight.stride())
        return [getattr(weight, name) for name in names], make
    return [weight.data], lambda parts: parts[0]


def unflatten(
    kind: Any, names: Sequence[str], context: Any, shape: torch.Size, stride: Any, parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    weight: torch.Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, shape, stride)
    return weight


def make_nf4(settings: dict[str, Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """bitsandbytes' weight of its numbers, scales and the 16 values that 4 bits stand for. settings: of its state."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    packed, absmax, code = parts
    layout = {name: settings[name] for name in ("blocksize", "quant_type")} | {"quant_storage": packed.dtype}
    state = QuantState(absmax, code=code, **settings)
    return Params4bit(packed, quant_state=state, compress_statistics=False, bnb_quantized=True, **layout)


def remake(weight: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Parameter:
    """A frozen weight of the same kind, of tensors that `change` makes of its own; that one stays as it is."""
    parts, make = take_apart(weight)
    made = make([change(part) for part in parts])
    return made if isinstance(made, torch.nn.Parameter) else torch.nn.Parameter(made, requires_grad=False)


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, with its scales."""
    return sum(part.nbytes for part in take_apart(weight)[0])
