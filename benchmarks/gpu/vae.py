"""HunyuanVideo's autoencoder: encoding a clip with each memory option."""

import torch

from benchmarks import device_usage as devices
from benchmarks import vae_memory
from benchmarks.common import print_header, print_row
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import describe, forget_models
from stages.rehearsing.tiny_models import make_model

NAME, DTYPE = "hunyuan_video", "bfloat16"
SHAPE, TINY_SHAPE = (61, 512, 768), (5, 32, 32)  # frames, height, width
TINY = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}


def cases(tiny: bool) -> list[vae_memory.Case]:
    usual = [case for case in vae_memory.usual_cases(NAME, (DTYPE,)) if case.shape == SHAPE]
    return [vae_memory.Case(NAME, TINY_SHAPE, DTYPE, case.options, TINY) for case in usual[::3]] if tiny else usual


def measure(case: vae_memory.Case, device: torch.device, peak_flops: float) -> list[str]:
    """The cells of a row: seconds, and devices.COLUMNS."""
    part, overrides = vae_memory.MODEL_NAMES[NAME], case.overrides
    vae = make_model(part, "true", dtype=DTYPE, device=device.type, overrides=overrides)
    case.apply_options(vae)
    encode = lambda: case.encode(vae, device.type)  # noqa: E731
    try:
        encode()  # in the first call, kernels are chosen
        usage = devices.measure_usage(encode, device)
    except torch.OutOfMemoryError as error:
        return [describe(error), *[""] * len(devices.COLUMNS)]
    return [f"{usage.seconds:.3g}", *usage.cells(peak_flops)]


def run(options: PartOptions) -> None:
    device = torch.device(options.device)
    print("A clip of one bucket; predicted: `python -m benchmarks.vae_memory`.\n")
    print_header("frames x height x width", "options", "predicted GiB", "s", *devices.COLUMNS)
    for case in cases(options.tiny):
        _, shape, _, memory_options = case.cells
        print_row(
            shape, memory_options, f"{vae_memory.compute_peak(case):.2f}", *measure(case, device, options.peak_flops)
        )
        forget_models()
