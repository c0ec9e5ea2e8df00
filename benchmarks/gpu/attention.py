"""Kernels of attention at Video Lite's shapes: the kernels alone, and training steps with each.

Forward and backward pass of the kernels (only the forward pass of kernels without a backward pass), each in relation to
"sdpa" in the same pass. Kernels that are not available have the reason in their row. For flash-varlen, two samples of
which one is half padding, in relation to "sdpa" with a mask.
"""

from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu import nabla, video_lite
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, measure_cases
from schemas.config.section import Attention
from trainer.attention import BACKENDS, SDPA, VARLEN, find_problem
from trainer.joint_attention import attend

LORA = {"adapter": {"rank": 32}}
TRAINED = ("sdpa", "cudnn", "flash")
CASES = tuple(Case(f"attention {name}", {**LORA, "attention": name}) for name in TRAINED)
TOKENS = (4096, 24_576)  # of a picture of 1024x1024, and of a clip of 512x768 with 61 frames
COLUMNS = ("kernels", "tokens", "forward, ms", "of sdpa's", "forward and backward, ms", "of sdpa's", "error")


def run(options: PartOptions) -> None:
    device = torch.device(options.device)
    heads, counts = (2, (128,)) if options.tiny else (nabla.HEADS, TOKENS)
    print(f"{heads} heads of {nabla.HEAD_DIM}, bfloat16; error: relative error of the output compared with sdpa.\n")
    print_header(*COLUMNS)
    available = [name for name in get_args(Attention) if name in BACKENDS and is_available(name, device)]
    for tokens in counts:
        compare_kernels(available, tokens, heads, device)
    print()
    cases = [case for case in CASES if case.settings["attention"] in available]
    model = video_lite.model(options.tiny)
    measure_cases(options, model if options.tiny else replace(model, bucket="768x512@29"), cases)


def is_available(name: str, device: torch.device) -> bool:
    """Whether kernels are available. If they are not, print a row with the reason."""
    problem = find_problem(name, nabla.HEAD_DIM, torch.bfloat16, device, trains(name), is_masked=name == VARLEN)
    if problem:
        print_row(name, problem.replace("|", "/")[:200], *[""] * (len(COLUMNS) - 2))
    return not problem


def trains(name: str) -> bool:
    return not name.startswith("sage")


def compare_kernels(names: list[str], tokens: int, heads: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    shape = (3, 2, tokens, heads, nabla.HEAD_DIM)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    inputs = [tensor.requires_grad_() for tensor in values.unbind()]
    mask_BS = torch.ones(shape[1:3], dtype=torch.bool, device=device)
    mask_BS[1, : tokens // 2] = False
    for name in names:
        mask = mask_BS if name == VARLEN else None
        kept = 1 if mask is None else mask[..., None, None]
        kernels, stock = (partial(attend, mask=mask, backend=BACKENDS[each]) for each in (name, SDPA))
        with torch.no_grad():
            error = nabla.relative_errors([kernels(*inputs) * kept], [stock(*inputs) * kept])[0]
            times = [fastest(partial(each, *inputs), device) for each in (kernels, stock)]
        if trains(name):
            times += [fastest(partial(nabla.compute, each, inputs), device) for each in (kernels, stock)]
        pairs = zip(times[::2], times[1::2], strict=True)
        cells = [cell for ours, theirs in pairs for cell in (f"{1e3 * ours:.3g}", f"{ours / theirs:.2f}")]
        print_row(name, f"{tokens:,}", *cells, *[""] * (4 - len(cells)), f"{error:.1g}")


def fastest(work: partial, device: torch.device) -> float:
    work()
    return min(devices.time_call(work, device) for _ in range(3))
