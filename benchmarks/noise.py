"""Compares the trainer's noise with torch.randn, which returns different numbers on a CPU and a GPU.

    python -m benchmarks.noise [--repeat 15] [--device cuda] [--shape 16,1,128,128]

A micro-batch of 4 samples of each shape, on one CPU thread, because the thread that reads ahead computes it. torch: a
generator with a separate seed for each sample. philox: `trainer/noise.py`. torch operations: the implementation for
other devices, which is not used on a CPU. Figures are medians in milliseconds, and the ratio to torch.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import device_usage
from benchmarks.common import make_parser, measure_by_turns, print_header, print_row
from schemas.identity import derive_seed
from trainer.noise import compute_words, seeded_noise

SHAPES = ((16, 1, 128, 128), (32, 1, 32, 32), (16, 16, 64, 96))  # Image Lite and Sana at 1024x1024, a clip of 61 frames
NAMES = tuple(f"0/0/{position}" for position in range(4))


def torch_noise(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    generators = [torch.Generator(device).manual_seed(derive_seed(name, "noise")) for name in NAMES]
    return torch.stack([torch.randn(*shape, generator=generator, device=device) for generator in generators])


def words_by_torch(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    key_B = torch.tensor([derive_seed(name, "noise") for name in NAMES], device=device)
    return compute_words(key_B, slice(0, math.prod(shape) // 2))


def print_table(shapes: Sequence[Sequence[int]], device: torch.device, repeat: int) -> None:
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "torch": torch_noise,
        "philox": lambda shape, device: seeded_noise(NAMES, "noise", shape, device),
        "its words by torch operations": words_by_torch,
    }
    print_header("shape of a sample", *(f"{way}, ms" for way in ways), "philox / torch")
    for shape in shapes:
        calls = {way: partial(compute, shape, device) for way, compute in ways.items()}
        timed = {way: partial(device_usage.time_call, call, device) for way, call in calls.items()}
        medians = {way: 1000 * statistics.median(it) for way, it in measure_by_turns(timed, repeat, 1).items()}
        print_row(shape, *(f"{value:.3g}" for value in medians.values()), f"{medians['philox'] / medians['torch']:.2f}")


def main() -> None:
    parser = make_parser(__doc__, repeat=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--shape", help="shape of one sample, for example 16,1,128,128; default: shapes of three flavours"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = (tuple(map(int, options.shape.split(","))),) if options.shape else SHAPES
    print_table(shapes, torch.device(options.device), options.repeat)


if __name__ == "__main__":
    main()
