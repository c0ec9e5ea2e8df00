"""Which noise levels are trained, and how much each counts: named functions of the configuration.

A function in TIMESTEP_SAMPLING maps uniform draws (B,) in 0..1 to sigma (B,) before the shift; one in LOSS_WEIGHTING
maps sigma (B,) to factors (B,) of the loss. References: Esser et al. 2024, "Scaling Rectified Flow Transformers for
High-Resolution Image Synthesis", section 3.1.
"""

import math
from collections.abc import Callable

import torch

from trainer.flow import shift_sigma


def uniform(uniform_B: torch.Tensor) -> torch.Tensor:
    return uniform_B


def logit_normal(uniform_B: torch.Tensor) -> torch.Tensor:
    """The sigmoid of a standard normal variable: middle noise levels are the most frequent."""
    return torch.sigmoid(torch.special.ndtri(uniform_B))


def none(sigma_B: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(sigma_B)


def cosmap(sigma_B: torch.Tensor) -> torch.Tensor:
    """2 / (pi (1 - 2 sigma + 2 sigma^2)): up to twice as much in the middle as at the ends."""
    return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B.square()))


TIMESTEP_SAMPLING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "logit_normal": logit_normal,
    "uniform": uniform,
}
LOSS_WEIGHTING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"none": none, "cosmap": cosmap}


def sample_sigma(uniform_B: torch.Tensor, distribution: str, shift: float) -> torch.Tensor:
    """Uniform draws (B,) -> sigma (B,) in 0..1. A shift above 1 moves the distribution towards noise."""
    return shift_sigma(TIMESTEP_SAMPLING[distribution](uniform_B), shift)
