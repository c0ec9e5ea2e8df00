"""A family's transformer with random weights, of any size, drawn on a device and never written to a disk."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stages.rehearsing.tiny_models import weight_scale
from trainer.families.base import ModelFamily

#: What initializes a tensor in place, of torch.nn.init and of tensors.
IN_PLACE = frozenset({"kaiming_uniform_", "uniform_", "normal_", "constant_", "zero_", "fill_"})


class UninitializedMatrices(TorchFunctionMode):
    """Matrices stay as they are allocated: pages of the host that nobody writes take neither memory nor time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = kwargs.get("tensor", args[0] if args else None)
        if getattr(func, "__name__", "") in IN_PLACE and isinstance(first, torch.Tensor) and first.ndim >= 2:
            return first
        return func(*args, **kwargs)


def make_transformer(
    family: ModelFamily,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    drawn_on: torch.device | str | None = None,
    seed: int = 0,
) -> Any:
    """As the family's `load` would return it for a checkpoint whose config.json has `config`.

    drawn_on: where the numbers are drawn, one weight after the other; a GPU does it a hundred times faster than a CPU.
    Default: `device`.
    """
    drawn_on = drawn_on or device
    with torch.device("meta"):
        dtypes = {name: weight.dtype for name, weight in family.untrained(config, dtype).named_parameters()}
    with UninitializedMatrices():
        model = family.untrained(config)
    generator = torch.Generator(drawn_on).manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = torch.empty(weight.shape, dtype=dtypes[name], device=drawn_on)
        scale = weight_scale(name, weight.shape)
        drawn = drawn.fill_(1.0) if scale is None else drawn.normal_(0.0, scale, generator=generator)
        weight.data = drawn.to(device)
    return model.to(device).eval()
