"""Choice of the noise levels that are trained: uniform draws, and the distributions that they are mapped to.

A function in TIMESTEP_SAMPLING is the inverse of a cumulative distribution (falling or rising): it maps uniform draws
(B,) in 0..1 to sigma (B,) before the shift, so evenly spread draws give evenly spread quantiles. Reference: Esser et
al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 3.1.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.config.methods import Timesteps
from schemas.identity import derive_seed
from schemas.randomness import permute
from trainer.flow import shift_sigma

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def uniform(uniform_B: torch.Tensor, settings: Timesteps) -> torch.Tensor:
    return uniform_B


def logit_normal(uniform_B: torch.Tensor, settings: Timesteps) -> torch.Tensor:
    """The sigmoid of a normal variable: around mean 0 middle noise levels are the most frequent."""
    return torch.sigmoid(settings.mean + settings.std * torch.special.ndtri(uniform_B))


def mode(uniform_B: torch.Tensor, settings: Timesteps) -> torch.Tensor:
    """1 - u - scale (cos^2(pi u / 2) - 1 + u): like logit_normal, and the ends keep a density above 0."""
    return 1 - uniform_B - settings.mode_scale * (torch.cos(math.pi / 2 * uniform_B).square() - 1 + uniform_B)


def beta(uniform_B: torch.Tensor, settings: Timesteps) -> torch.Tensor:
    """The beta distribution, density proportional to sigma^(alpha - 1) (1 - sigma)^(beta - 1)."""
    from scipy.special import betaincinv  # a tenth of a second

    quantiles = betaincinv(settings.alpha, settings.beta, uniform_B.double().cpu().numpy())
    return torch.from_numpy(np.asarray(quantiles, np.float32)).to(uniform_B.device)


def listed(uniform_B: torch.Tensor, settings: Timesteps) -> torch.Tensor:
    """One of `values`, each with the same probability."""
    values = torch.tensor(settings.values, dtype=torch.float32, device=uniform_B.device)
    return values[(uniform_B * len(values)).long().clamp(max=len(values) - 1)]


TIMESTEP_SAMPLING: dict[str, Callable[[torch.Tensor, Timesteps], torch.Tensor]] = {
    "logit_normal": logit_normal,
    "uniform": uniform,
    "mode": mode,
    "beta": beta,
    "list": listed,
}


def sample_sigma(uniform_B: torch.Tensor, settings: Timesteps, shift: float) -> torch.Tensor:
    """Uniform draws (B,) -> sigma (B,) in 0..1. A shift above 1 moves the distribution towards noise; a list is not
    shifted."""
    sigma_B = TIMESTEP_SAMPLING[settings.sampling](uniform_B, settings).clamp(0, 1)
    return sigma_B if settings.sampling == "list" else shift_sigma(sigma_B, shift)


def spread_uniform(seed: int, step: int, positions: NDArray[np.int64], global_batch: int) -> torch.Tensor:
    """(B,) float32 draws in 0..1 at `positions` of a step's global batch, spread evenly over the batch and over steps.

    One in each of `global_batch` equal parts of 0..1, at the same place in each (Kingma et al. 2021, "Variational
    Diffusion Models"); the place moves on by the golden ratio from step to step, so that successive steps
    fill the gaps. Which position gets which part is a permutation of the step's own, as positions are ordered by
    bucket. A function of its arguments: the same for any number of ranks. Each draw is uniform over seeds.
    """
    start = derive_seed(str(seed), "noise levels") / 2**63
    part = permute(positions, global_batch, derive_seed(f"{seed}/{step}", "noise levels"))
    return torch.from_numpy(((part + (start + step * GOLDEN_RATIO) % 1) / global_batch).astype(np.float32))
