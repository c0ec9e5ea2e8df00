"""Attention backends at Video Lite's shapes: the kernels alone, and training steps with each.

Forward and backward pass of the kernels (only the forward pass of kernels without a backward pass), each in relation to
"native" in the same pass. A backend that is not available has the reason in its row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu import nabla, video_lite
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, measure_cases
from schemas.config.section import AttentionBackend
from trainer.attention import find_problem

LORA = {"adapter": {"rank": 32}}
TRAINED = ("native", "_native_flash", "_native_cudnn", "flash", "_flash_3_hub")
CASES = tuple(Case(f"attention {name}", {**LORA, "attention_backend": name}) for name in TRAINED)
TOKENS = (4096, 24_576)  # of a picture of 1024x1024, and of a clip of 512x768 with 61 frames
MAX_SCORES = 8 << 30  # bytes of scores in a backend that stores them
COLUMNS = ("backend", "tokens", "forward, ms", "of native's", "forward and backward, ms", "of native's", "error")


def run(options: PartOptions) -> None:
    device = torch.device(options.device)
    heads, counts = (2, (128,)) if options.tiny else (nabla.HEADS, TOKENS)
    print(f"{heads} heads of {nabla.HEAD_DIM}, bfloat16; error: relative error of the output compared with native.\n")
    print_header(*COLUMNS)
    available = [name for name in get_args(AttentionBackend) if is_available(name, device)]
    for tokens in counts:
        compare_kernels(available, tokens, heads, device)
    print()
    cases = [case for case in CASES if case.settings["attention_backend"] in available]
    model = video_lite.model(options.tiny)
    measure_cases(options, model if options.tiny else replace(model, bucket="768x512@29"), cases)


def is_available(name: str, device: torch.device) -> bool:
    """Whether a backend is available. If it is not, print a row with the reason."""
    problem = find_problem(name, nabla.HEAD_DIM, torch.bfloat16, device, gradient=trains(name))
    if problem:
        print_row(name, problem.replace("|", "/")[:200], *[""] * (len(COLUMNS) - 2))
    return not problem


def trains(name: str) -> bool:
    return not name.startswith("sage")


def compare_kernels(names: list[str], tokens: int, heads: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    shape = (3, 1, tokens, heads, nabla.HEAD_DIM)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    inputs = [tensor.requires_grad_() for tensor in values.unbind()]
    baseline: dict[str, float] = {}
    expected = None
    for name in names:
        if name == "_native_math" and 2 * heads * tokens**2 > MAX_SCORES:
            print_row(name, f"{tokens:,}", f"scores of {2 * heads * tokens**2 / 2**30:.0f} GiB", *[""] * 4)
            continue
        with use_backend(name) as attend, torch.no_grad():
            output = attend(*inputs)
            expected = output if expected is None else expected
            error = nabla.relative_errors([output], [expected])[0]
            times = {"forward": fastest(partial(attend, *inputs), device)}
        if trains(name):
            with use_backend(name) as attend:
                times["both"] = fastest(partial(nabla.compute, attend, inputs), device)
        baseline = baseline or times
        cells = [
            cell
            for key in ("forward", "both")
            for cell in ([f"{1e3 * times[key]:.3g}", f"{times[key] / baseline[key]:.2f}"] if key in times else ["", ""])
        ]
        print_row(name, f"{tokens:,}", *cells, f"{error:.1g}")


@contextmanager
def use_backend(name: str) -> Iterator[nabla.Attention]:
    with attention_backend(name):
        yield partial(dispatch_attention_fn, backend=AttentionBackendName(name))


def fastest(work: partial, device: torch.device) -> float:
    work()
    return min(devices.time_call(work, device) for _ in range(3))
