"""NABLA in training: compiled flex attention compared with dense-mask attention and full attention, at Video Lite's
shapes, forward and backward, and the difference between the results of flex and dense-mask attention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_kandinsky as stock

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu.parts import PartOptions
from trainer.families.kandinsky5 import (
    BLOCK_TOKENS,
    SparseParams,
    dense_attention,
    nabla_attention,
    window_mask,
)

HEADS, HEAD_DIM = 28, 64  # of Video Lite
WINDOW = (11, 3, 3)  # frames, rows, columns of blocks, like in the published checkpoints
#: (frames, rows, columns) of tokens: 512x512 with 29 frames, and 512x768 with 61 and 121.
GRIDS = ((8, 32, 32), (16, 32, 48), (31, 32, 48))
MAX_MASK_BYTES = 8 << 30  # bytes of a dense mask, which attention copies in other dtypes
COLUMNS = ("tokens", "density", "flex, s", "dense mask, s", "full, s", "output's error", "gradients' error")

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_inputs(
    grid: tuple[int, int, int], heads: int, device: torch.device, dtype: torch.dtype, share: float = 0.9
) -> tuple[list[torch.Tensor], SparseParams]:
    """Returns (query, key and value (B, L, heads, D), parameters). Each block attends mainly to some blocks."""
    frames, rows, columns = grid
    generator = torch.Generator(device).manual_seed(0)
    blocks = frames * rows * columns // BLOCK_TOKENS
    centers = torch.randn(1, blocks, 1, heads, HEAD_DIM, generator=generator, device=device)
    noise = torch.randn(3, 1, blocks, BLOCK_TOKENS, heads, HEAD_DIM, generator=generator, device=device)
    tensors = [(part + (0 if number == 2 else centers)).flatten(1, 2).to(dtype) for number, part in enumerate(noise)]
    window = window_mask((frames, rows // 8, columns // 8), WINDOW, device)[None, None]
    return [tensor.requires_grad_() for tensor in tensors], {"sta_mask": window, "P": share}


def choose_blocks(query: torch.Tensor, key: torch.Tensor, sparse: SparseParams) -> Any:
    with torch.no_grad():
        return stock.nablaT_v2(query, key, sparse["sta_mask"], thr=sparse["P"])


def with_dense_mask(sparse: SparseParams) -> Attention:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        blocks = choose_blocks(query, key, sparse)
        return dense_attention(*(x.transpose(1, 2) for x in (query, key, value)), blocks).transpose(1, 2)

    return attend


def full_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def compute(attend: Attention, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the output, and gradients of query, key and value."""
    out = attend(*inputs)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def relative_errors(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """The relative errors of the output and of each gradient."""
    pairs = [(tensor.float(), reference.float()) for tensor, reference in zip(tensors, expected, strict=True)]
    return [float((tensor - reference).norm() / reference.norm()) for tensor, reference in pairs]


def seconds(attend: Attention, inputs: list[torch.Tensor], repeat: int) -> str:
    device = inputs[0].device
    compute(attend, inputs)
    times = [devices.time_call(lambda: compute(attend, inputs), device) for _ in range(repeat)]
    return f"{min(times):.3g}"


def run(options: PartOptions) -> None:
    device = torch.device(options.device)
    heads, grids = (2, ((2, 16, 16),)) if options.tiny else (HEADS, GRIDS)
    print(f"{heads} heads of {HEAD_DIM}, bfloat16, forward and backward pass; flex includes the choice of blocks.\n")
    print_header(*COLUMNS)
    for grid in grids:
        inputs, sparse = make_inputs(grid, heads, device, torch.bfloat16)
        flex: Attention = lambda q, k, v, sparse=sparse: nabla_attention(q, k, v, sparse)  # type: ignore[misc] # noqa: E731
        tokens = inputs[0].shape[1]
        density = choose_blocks(inputs[0], inputs[1], sparse).to_dense().float().mean().item()
        times = [seconds(flex, inputs, 5), "", seconds(full_attention, inputs, 5)]
        errors = ["", ""]
        if heads * tokens**2 <= MAX_MASK_BYTES:
            results = compute(flex, inputs)
            dense = with_dense_mask(sparse)
            times[1] = seconds(dense, inputs, 2)
            output, *gradients = relative_errors(results, compute(dense, inputs))
            errors = [f"{output:.2g}", f"{max(gradients):.2g}"]
        else:
            times[1] = f"mask of {heads * tokens**2 / 2**30:.0f} GiB"
        print_row(f"{tokens:,}", f"{density:.0%}", *times, *errors)
        del inputs
        if device.type == "cuda":
            torch.cuda.empty_cache()
