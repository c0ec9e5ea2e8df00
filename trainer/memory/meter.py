"""Measures memory without allocating it: tensors without bytes with the memory layout of a device's tensors, a meter of
the bytes that they would take, and the memory of an optimizer, measured with small matrices."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents this class under no other name

from schemas.config.training import Optimizer, find_optimizer
from trainer.families.base import ModelFamily
from trainer.run.optimizer_state import collect
from trainer.setup.optimizers import averages_weights, find_class, make_optimizer
from trainer.setup.quantize import base_matrices, can_quantize, packed_bytes

META = torch.device("meta")
TRIAL_SHAPE = (256, 256)
#: Numbers of matrices in two trials. A loop over parameters may still hold the previous parameter's tensors, so a trial
#: has at least two matrices.
FEW, MORE = 2, 6


class MemoryMeter(TorchDispatchMode):
    """Bytes of the storages that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object for as long as the storage is alive
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


class KernelMode(TorchFunctionMode):
    """Imitates a device's kernels on meta tensors: attention that does not store scores, and autocast."""

    CAST = (torch.nn.functional.linear, torch.nn.functional.conv2d, torch.matmul, torch.bmm)

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast = autocast
        self.casts: dict[torch.Tensor, torch.Tensor] = {}  # autocast keeps casts of weights until the pass ends
        self.entered = False

    def __enter__(self) -> "KernelMode":
        self.entered = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered = False
        self.casts.clear()
        super().__exit__(*error)

    def follow(self, block: torch.nn.Module) -> None:
        """Enable the mode when the backward pass, which runs outside the mode, computes a block again."""
        compute = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self.entered else KernelMode(self.autocast):
                return compute(*args, **kwargs)

        block.__dict__["forward"] = run

    def cast(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, torch.nn.Parameter):
            return value.to(self.autocast)
        if value not in self.casts:
            self.casts[value] = value.to(self.autocast)
        return self.casts[value]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attention = func is torch.nn.functional.scaled_dot_product_attention
        if self.autocast and (attention or func in self.CAST):
            args = [self.cast(arg) for arg in args]
            kwargs = {key: self.cast(arg) for key, arg in kwargs.items()}
        if attention:
            return attend(*args, **kwargs)
        return func(*args, **kwargs)


def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, scale: Any = None, **__: Any) -> Any:
    """Attention by a kernel with the memory of any flash kernel: the output and a number for each row."""
    if attn_mask is not None:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=META)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, False, attn_mask=attn_mask, scale=scale)[0]


class SavedOnHost:
    """Hooks for saved tensors that return tensors of the same layout, and count the largest number of bytes that
    `save_on_host` would hold."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> "SavedTensor":
        saved = SavedTensor(tensor)
        self.live += saved.bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(saved, self.drop, saved.bytes)
        return saved

    def drop(self, size: int) -> None:
        self.live -= size

    def unpack(self, saved: "SavedTensor") -> torch.Tensor:
        return torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device=saved.device)


class SavedTensor:
    """Metadata of a tensor: size, stride, dtype, device and bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype, self.device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
        self.bytes = tensor.numel() * tensor.element_size()


class QuantizedLinear(torch.nn.Linear):
    """A linear layer on the meta device whose weight has the storage of a quantized weight, and whose passes create the
    same tensors as the library `name` (optimum-quanto 0.2, torchao 0.18, bitsandbytes 0.50)."""

    def __init__(self, part: torch.nn.Linear, name: str) -> None:
        super().__init__(part.in_features, part.out_features, part.bias is not None, META, part.weight.dtype)
        self.name, self.bias = name, part.bias
        packed = torch.empty(packed_bytes(part, name) // 2, dtype=torch.bfloat16, device=META)
        # The weight has the dtype and shape of the original matrix, because code such as DoRA reads them.
        view = torch.empty(0, dtype=part.weight.dtype, device=META).set_(packed.untyped_storage())
        self.weight = torch.nn.Parameter(view.as_strided(part.weight.shape, (0, 1)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.name.endswith("torchao"):  # an ordinary product: autograd keeps the whole matrix
            matrix = torch.empty(self.weight.shape, dtype=x.dtype, device=x.device)
            scale = torch.empty(self.out_features, dtype=x.dtype, device=x.device)
            out = torch.mm(x.reshape(-1, x.shape[-1]), matrix.t()) * scale
            out = out.reshape(*x.shape[:-1], self.out_features)
        else:
            out = DequantizedProduct.apply(x, self.weight.shape, self.name == "int8-quanto")
        return out if self.bias is None else out + self.bias


class DequantizedProduct(torch.autograd.Function):
    """x times the transposed matrix, which is made in each pass; `keeps_input` keeps the input for the backward pass,
    as optimum-quanto does unnecessarily."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: torch.Size, keeps_input: bool) -> torch.Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*([x] if keeps_input else []))
        matrix = torch.empty(shape, dtype=x.dtype, device=x.device)
        return torch.matmul(x, matrix.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        matrix = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device)
        return torch.matmul(grad, matrix), None, None


def quantize_shapes(model: Any, family: ModelFamily, name: str) -> None:
    """Do what `quantize_base` does, to a model on the meta device."""
    for path, part in base_matrices(model, family).items():
        if can_quantize(part, name):
            model.set_submodule(path, QuantizedLinear(part, name))


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer for each trained number. state: bytes of the state. working: additional bytes during a
    step. working_one: additional bytes during a step that are needed for one parameter at a time. averages: whether the
    optimizer stores averaged weights for saving separately from the trained weights."""

    state: float
    working: float
    working_one: float
    averages: bool


#: Assumed for an optimizer that does not run on a CPU
LIKE_ADAMW = OptimizerMemory(8, 4, 0, False)


def measure_optimizer(settings: Optimizer, dtype: torch.dtype, is_cpu: bool) -> OptimizerMemory:
    """Measure an optimizer by steps on a CPU with few matrices and with more, once in a process for equal settings.
    is_cpu: whether training runs on a CPU, too; on other devices torch's own optimizers update all parameters at once.
    Raises RunError if the optimizer is not installed."""
    return _measure(settings.model_dump_json(), dtype, is_cpu)


@cache
def _measure(settings_json: str, dtype: torch.dtype, is_cpu: bool) -> OptimizerMemory:
    settings = Optimizer.model_validate_json(settings_json)
    kind, arguments = find_class(settings.name), dict(settings.arguments)
    argument_names = {*arguments, *find_optimizer(settings.name).arguments}
    if not is_cpu and kind.__module__.startswith("torch.optim") and not {"foreach", "fused"} & argument_names:
        arguments["foreach"] = True
    settings = settings.changed(groups=(), arguments=arguments)
    try:
        (state, few, averages), (_, more, _) = (trial(settings, dtype, count) for count in (FEW, MORE))
    except (RuntimeError, AssertionError, NotImplementedError):
        return LIKE_ADAMW
    numbers, working = prod(TRIAL_SHAPE), (more - few) / (MORE - FEW)
    return OptimizerMemory(state / numbers, working / numbers, (few - FEW * working) / numbers, averages)


def trial(settings: Optimizer, dtype: torch.dtype, count: int) -> tuple[int, int, bool]:
    """Returns (bytes of one matrix's state, additional bytes during a step of `count` matrices, whether the optimizer
    averages weights)."""
    weights = {str(number): torch.nn.Parameter(torch.ones(TRIAL_SHAPE, dtype=dtype)) for number in range(count)}
    optimizer = make_optimizer(weights, settings)
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()  # makes the state
    tensors, _ = collect(weights, optimizer)
    meter = MemoryMeter()
    for tensor in (*weights.values(), *(weight.grad for weight in weights.values()), *tensors.values()):
        if tensor is not None:
            meter.add(tensor)
    start = meter.live
    with meter:
        optimizer.step()
    state_bytes = sum(value.nbytes for name, value in tensors.items() if name.startswith("0/"))
    return state_bytes, meter.peak - start, averages_weights(optimizer)
