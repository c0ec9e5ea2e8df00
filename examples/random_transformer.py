"""A family's transformer with random weights, of any size, drawn on a device and never written to a disk."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stages.rehearsing.tiny_models import weight_scale
from trainer.families.base import ModelFamily

#: Names of functions of torch.nn.init and methods of tensors that initialize a tensor in place.
IN_PLACE = frozenset({"kaiming_uniform_", "uniform_", "normal_", "constant_", "zero_", "fill_"})


class UninitializedMatrices(TorchFunctionMode):
    """Mode in which matrices are not initialized, because pages of the host that are not written take neither memory
    nor time."""

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
    draw_device: torch.device | str | None = None,
    seed: int = 0,
) -> Any:
    """Make the transformer that the family's `load` returns for a checkpoint with this config.json.

    config: content of config.json. draw_device: device that draws the numbers, one weight after the other, by default
    `device`; a GPU is a hundred times faster than a CPU.
    """
    draw_device = draw_device or device
    with torch.device("meta"):
        dtypes = {name: weight.dtype for name, weight in family.untrained(config, dtype).named_parameters()}
    with UninitializedMatrices():
        model = family.untrained(config)
    generator = torch.Generator(draw_device).manual_seed(seed)
    for name, weight in model.named_parameters():
        values = torch.empty(weight.shape, dtype=dtypes[name], device=draw_device)
        scale = weight_scale(name, weight.shape)
        values = values.fill_(1.0) if scale is None else values.normal_(0.0, scale, generator=generator)
        weight.data = values.to(device)
    return model.to(device).eval()
