"""Noise drawn on the device compared with torch.randn, and its difference from the CPU's noise."""

import torch

from benchmarks.gpu.parts import PartOptions
from benchmarks.noise import NAMES, SHAPES, print_table
from trainer.noise import seeded_noise


def run(options: PartOptions) -> None:
    shapes = ((2, 1, 8, 8),) if options.tiny else SHAPES
    print_table(shapes, torch.device(options.device), 3 if options.tiny else 15)
    values = seeded_noise(NAMES, "noise", shapes[-1], options.device).cpu()
    difference = values - seeded_noise(NAMES, "noise", shapes[-1])
    share, largest = (difference != 0).double().mean().item(), difference.abs().max().item()
    print(
        f"\nOf {difference.numel():,} numbers, a share of {share:.1g} differs from the CPU, by {largest:.1g} at most."
    )
