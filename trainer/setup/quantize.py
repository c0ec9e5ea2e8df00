"""Quantize base weights to 8 or 4 bits, one matrix at a time, so that the host never holds a second copy of the model.

The family names the linear layers to quantize: attention and feed-forward of the blocks, which are nearly all weights.
Biases, norms, embeddings of time and text, convolutions, final layers and most modulations keep their dtype. diffusers'
quantizers treat the modules that a model lists for float32 in the same way, but are not used: the bitsandbytes
quantizer of diffusers requires a GPU, and its quanto quantizer is deprecated.

Sharding and offloading treat a quantized weight as the plain tensors that it consists of: its values and their scales.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from trainer.families.base import ModelFamily
from trainer.setup.adapters import choose_targets

MIB = 1 << 20
NF4_COLUMN_MULTIPLE = 64  # values that share a scale; with other row lengths two rows would share one

Make = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def take_apart(weight: torch.Tensor) -> tuple[list[torch.Tensor], Make]:
    """The tensors that a weight consists of, and a function that makes a weight of the same kind from such tensors."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        assert not state.nested, "scales are float32 here, and not quantized themselves"
        settings = {name: getattr(state, name) for name in ("shape", "blocksize", "quant_type", "dtype")}
        return [weight.data, state.absmax, state.code], partial(make_nf4, settings)
    if hasattr(weight, "__tensor_flatten__"):  # torch's protocol for wrapper tensors (quanto, torchao)
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
    """bitsandbytes' weight from `parts`: packed values, scales, and the 16 numbers that a 4-bit value can stand for.
    settings: arguments of its QuantState."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    packed, absmax, code = parts
    layout = {name: settings[name] for name in ("blocksize", "quant_type")} | {"quant_storage": packed.dtype}
    state = QuantState(absmax, code=code, **settings)
    return Params4bit(packed, quant_state=state, compress_statistics=False, bnb_quantized=True, **layout)


def remake(weight: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Parameter:
    """A new frozen weight of the same kind, made by applying `change` to each tensor that `weight` consists of."""
    parts, make = take_apart(weight)
    result = make([change(part) for part in parts])
    return result if isinstance(result, torch.nn.Parameter) else torch.nn.Parameter(result, requires_grad=False)


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, including its scales."""
    return sum(part.nbytes for part in take_apart(weight)[0])


def base_matrices(model: Any, family: ModelFamily) -> dict[str, torch.nn.Linear]:
    """Full path -> linear layer, for the layers that may be quantized."""
    paths = choose_targets(model, [family.QUANTIZED])
    return {path: part for path in paths if isinstance(part := model.get_submodule(path), torch.nn.Linear)}


def can_quantize(part: torch.nn.Linear, name: str) -> bool:
    return name != "nf4-bnb" or part.in_features % NF4_COLUMN_MULTIPLE == 0


def packed_bytes(part: torch.nn.Linear, name: str) -> int:
    """Bytes of the layer's weight after quantization: 8 or 4 bits per value, and scales: one per row in the weight's
    dtype, or for nf4-bnb one per 64 values in float32."""
    count = part.weight.numel()
    return int(count * 0.5625) if name == "nf4-bnb" else count + part.out_features * part.weight.element_size()


def quantize_base(
    model: Any, family: ModelFamily, name: str, via: str, device: torch.device, home: torch.device | None = None
) -> str:
    """Quantize the base in place and move it to `home`; returns a remark for the log.

    model: transformer on the CPU. via: "cpu", or "device" to move each matrix to the device first and quantize it
    there, which is faster. home: default `device`.
    """
    home = home or device
    can = {path: can_quantize(part, name) for path, part in base_matrices(model, family).items()}
    paths, before, after = [path for path in can if can[path]], 0, 0  # references to layers would keep their weights
    for path in paths:
        part = model.get_submodule(path)
        before += part.weight.numel() * part.weight.element_size()
        part = QUANTIZERS[name](part.to(device) if via == "device" else part).to(home)
        model.set_submodule(path, part)
        after += stored_bytes(part.weight)
        with suppress(AttributeError):  # a C library without malloc_trim
            # glibc keeps freed blocks below 32 MiB, and the host would hold 2.4 times the model.
            ctypes.CDLL(None).malloc_trim(0)
    model.to(home)
    count, remark = len(can) - len(paths), ""
    if count:
        remark = f"; {count} keep their dtype, because their sides are not multiples of {NF4_COLUMN_MULTIPLE}"
    sizes = f"{before / MIB:,.1f} MiB before, {after / MIB:,.1f} MiB now"
    return f"{len(paths)} matrices of the base quantized ({name}): {sizes}{remark}"


def count_numbers(weights: Iterable[torch.Tensor]) -> int:
    """The number of values in weights that may be quantized. bitsandbytes packs two values of 4 bits into one byte."""
    states = ((weight, getattr(weight, "quant_state", None)) for weight in weights)
    return sum(weight.numel() if state is None else state.shape.numel() for weight, state in states)


def to_int8_quanto(part: torch.nn.Linear) -> torch.nn.Linear:
    from optimum.quanto import QLinear, qint8

    quantized = QLinear.from_module(part, weights=qint8)
    quantized.freeze()
    return quantized


def to_torchao(kind: str, part: torch.nn.Linear) -> torch.nn.Linear:
    """Quantize the layer in place. kind: start of the name of torchao's configuration class, such as Int8."""
    from torchao import quantization

    quantization.quantize_(part, getattr(quantization, f"{kind}WeightOnlyConfig")(version=2))
    return part


def to_nf4_bnb(part: torch.nn.Linear) -> torch.nn.Linear:
    """The layer quantized by `Params4bit.to`, on the same device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    settings: dict[str, Any] = {"compress_statistics": False, "quant_type": "nf4"}
    dtype, device = part.weight.dtype, part.weight.device
    quantized = Linear4bit(
        part.in_features, part.out_features, part.bias is not None, compute_dtype=dtype, device="meta", **settings
    )
    quantized.weight = Params4bit(part.weight.data, requires_grad=False, module=quantized, **settings)
    quantized.bias = part.bias
    # On CPUs with AVX512-BF16, the layer would repack its weights at the first validation. The kernel for repacked
    # weights has no backward pass, so that gradients would be lost without an error.
    quantized.support_avx512bf16_for_cpu = False
    return quantized.to(device)


QUANTIZERS: dict[str, Callable[[torch.nn.Linear], torch.nn.Linear]] = {
    "int8-quanto": to_int8_quanto,
    "int8-torchao": partial(to_torchao, "Int8"),
    "fp8-torchao": partial(to_torchao, "Float8"),
    "nf4-bnb": to_nf4_bnb,
}
