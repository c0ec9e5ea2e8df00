"""An optimizer's state as named tensors and JSON, so that a checkpoint holds all of it without pickle.

The state consists of the values that the optimizer stores for each parameter (tensors, numbers, None, nested), and the
values that it stores in its parameter groups in addition to the arguments of its class, such as Prodigy's `d` or
schedule-free's `weight_sum`. Arguments are not saved: a run resumes with the arguments of its configuration.
`torch.optim.Optimizer.load_state_dict` is not used, because it converts the tensors to their parameter's dtype.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from schemas.errors import LatentpressError
from trainer.run.sharded import local, shard_like

Json = Any
#: Keys of a parameter group that training sets, in addition to the arguments of the class.
SET_BY_TRAINING = ("params", "lr", "initial_lr")
PAGED = {"state1", "state2"}  # keys of the states that bitsandbytes' paged optimizers page


class OptimizerStateError(LatentpressError):
    """Raised if the state of an optimizer can't be saved."""


class OtherGroups(ValueError):
    """Raised if a state has another number of parameter groups than the optimizer."""


class _Splitter:
    """Splits values into tensors and JSON. A tensor that several parameters share is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.paths: dict[tuple[Any, ...], str] = {}
        self.storages: set[int] = set()

    def split(self, value: Any, path: str) -> Json:
        match value:
            case torch.Tensor():
                entry = {"tensor": self._keep(value.detach(), path), "host": value.device.type == "cpu"}
                return entry | ({"order": order} if (order := _memory_order(value)) else {})
            case float() if not math.isfinite(value):
                return {"float": repr(value)}
            case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
                return value
            case list() | tuple() if type(value) in (list, tuple):
                return {type(value).__name__: [self.split(part, f"{path}/{i}") for i, part in enumerate(value)]}
            case dict() if all(isinstance(key, str) for key in value):
                return {"dict": {key: self.split(part, f"{path}/{key}") for key, part in value.items()}}
        raise OptimizerStateError(
            f"the optimizer's state has a {type(value).__name__} at {path!r}, which a checkpoint can't store",
            "Choose another train.optimizer.name.",
        )

    def _keep(self, value: torch.Tensor, path: str) -> str:
        storage = local(value).untyped_storage().data_ptr()
        view = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and view in self.paths:
            return self.paths[view]
        # safetensors rejects different views of one storage.
        self.tensors[path] = value.clone() if value.numel() and storage in self.storages else value
        self.paths[view] = path
        self.storages.add(storage)
        return path


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor that is not contiguous, outermost in memory first; [] for all other tensors. The
    order is restored, because a step that multiplies by the tensor rounds differently in another order."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    dense = not value.is_contiguous() and value.permute(order).is_contiguous()
    return order if dense and not isinstance(value, DTensor) else []


class _Joiner:
    """Joins tensors and JSON to values. counts_on_device: whether the optimizer keeps its step counters on the
    parameters' device, like torch's fused optimizers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], counts_on_device: bool) -> None:
        self.tensors, self.counts_on_device = tensors, counts_on_device
        self.placed: dict[tuple[str, torch.device], torch.Tensor] = {}

    def join(self, value: Json, device: torch.device) -> Any:
        """The value that `_Splitter.split` described as `value`, with its tensors on `device`."""
        match value:
            case {"tensor": str(name), "host": bool(host)}:
                tensor = self.tensors[name]
                # A counter may be on the CPU although the parameters are on a GPU.
                stays = host and not tensor.dim() and not self.counts_on_device
                target = torch.device("cpu") if stays else device
                if order := value.get("order"):
                    inverse = [order.index(number) for number in range(tensor.dim())]
                    tensor = tensor.permute(order).contiguous().permute(inverse)
                return self.placed.setdefault((name, target), tensor.to(target))
            case {"float": text}:
                return float(text)
            case {"dict": parts}:
                return {key: self.join(part, device) for key, part in parts.items()}
            case {"list": parts}:
                return [self.join(part, device) for part in parts]
            case {"tuple": parts}:
                return tuple(self.join(part, device) for part in parts)
        return value


def collect(
    trainable: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], Json]:
    """Tensors by "<parameter>/<key>" or "groups/<number>/<key>", and JSON with all other values and the place of each
    tensor. OptimizerStateError for a value that is not a tensor, number, text, None, or a list, tuple or dict of
    these."""
    splitter = _Splitter()
    parameters = {
        name: {key: splitter.split(value, f"{name}/{key}") for key, value in optimizer.state[weight].items()}
        for name, weight in trainable.items()
        if weight in optimizer.state
    }
    groups = [
        {key: splitter.split(group[key], f"groups/{number}/{key}") for key in _state_keys(optimizer, group)}
        for number, group in enumerate(optimizer.param_groups)
    ]
    return splitter.tensors, {"parameters": parameters, "groups": groups}


def _state_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
    """The keys of a parameter group that are state: keys that are not arguments of the class, and arguments with the
    default None for which the optimizer has chosen a value."""
    arguments, keys = inspect.signature(type(optimizer).__init__).parameters, []
    for key, value in group.items():
        default = optimizer.defaults.get(key)
        changed = isinstance(value, torch.Tensor) or key not in optimizer.defaults or value != default
        if key not in SET_BY_TRAINING and changed and (key not in arguments or default is None):
            keys.append(key)
    return keys


def restore(
    trainable: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    description: Json,
) -> None:
    """Set the optimizer's state to the values that `collect` returned, in place and with their dtypes. OtherGroups if
    the optimizer has another number of parameter groups; KeyError, ValueError or TypeError for values that `collect`
    can't have returned."""
    counts_on_device = any(group.get("fused") for group in optimizer.param_groups)
    joiner, groups = _Joiner(tensors, counts_on_device), description["groups"]
    arguments = inspect.signature(type(optimizer).__init__).parameters
    if len(groups) != len(optimizer.param_groups):
        raise OtherGroups(f"it has {len(groups)} parameter groups, and the optimizer has {len(optimizer.param_groups)}")
    for name, values in description["parameters"].items():
        weight = trainable[name]
        state = {key: joiner.join(value, weight.device) for key, value in values.items()}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                state[key] = shard_like(value, weight)
        if getattr(optimizer, "is_paged", False):  # memory that the driver may move to the host
            for key in PAGED & state.keys():
                state[key] = optimizer.get_state_buffer(weight, dtype=state[key].dtype).copy_(state[key])  # type: ignore[attr-defined]
        optimizer.state[weight] = state
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if key not in arguments or group.get(key) is None:
                group[key] = joiner.join(value, group["params"][0].device)
