"""Flow matching as pure functions of tensors: the path, the loss, and the distribution and the weighting of noise
levels.

x_sigma = (1 - sigma) x0 + sigma noise; the model predicts the velocity noise - x0. sigma is 1 for noise, 0 for data. A
shift above 1 moves the distribution of sigma towards noise, one below 1 towards data.

A function in LOSS_TYPES maps errors (B, ...) and c, which can be broadcast to the errors, to losses of the same shape.
A function in LOSS_WEIGHTING maps sigma (B,) to factors (B,) of each sample's loss. `bell` and `cosmap` have the mean 1
over uniform sigma; the remaining functions are not normalized. A function in TIMESTEP_SAMPLING is the inverse of a
cumulative distribution (falling or rising): it maps uniform draws (B,) in 0..1 to sigma (B,) before the shift, so
evenly spread draws give evenly spread quantiles. Reference: Esser et al. 2024, "Scaling Rectified Flow Transformers for
High-Resolution Image Synthesis", section 3.1.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.config.methods import Loss, Timesteps
from schemas.identity import derive_seed, permute

SMALLEST_SIGMA = 1e-3  # smallest sigma of diffusers' 1000 timesteps, at which sigma_sqrt is largest
BELL_END = math.exp(-0.5)  # exp(-2 (sigma - 1/2)^2) at sigma 0 and 1
BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - BELL_END
ALL_SIGMAS = (0.0, 1.0)
BISECTIONS = 50
MIN_SHARE = 1e-6  # smallest share of a distribution in an expert's range
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def shift_sigma(u_B: torch.Tensor, shift: float) -> torch.Tensor:
    """s u / (1 + (s - 1) u): monotonic from 0 to 1; the shift 1 / s is its inverse."""
    if shift <= 0:
        raise ValueError(f"shift must be greater than 0, not {shift}; 1 has no effect")
    return shift * u_B / (1 + (shift - 1) * u_B)


def interpolate(x0_BCTHW: torch.Tensor, noise_BCTHW: torch.Tensor, sigma_B: torch.Tensor) -> torch.Tensor:
    sigma = sigma_B.to(x0_BCTHW.dtype).view(-1, *[1] * (x0_BCTHW.ndim - 1))
    return (1 - sigma) * x0_BCTHW + sigma * noise_BCTHW


def velocity(x0_BCTHW: torch.Tensor, noise_BCTHW: torch.Tensor) -> torch.Tensor:
    """The prediction's target, the same at every sigma."""
    return noise_BCTHW - x0_BCTHW


def loss_per_sample(
    prediction_BCTHW: torch.Tensor,
    target_BCTHW: torch.Tensor,
    skip_frames: int = 0,
    weight_BTHW: torch.Tensor | None = None,
    loss_of_error: Callable[[torch.Tensor], torch.Tensor] = torch.square,
) -> torch.Tensor:
    """Mean loss (B,) in float32, without the `skip_frames` leading latent frames that are given (i2v: 1).

    weight_BTHW: factors of the losses before the mean; T is 1 if all frames share them. loss_of_error: function from
    errors (B, C, T, h, w) to losses of the same shape.
    """
    assert prediction_BCTHW.shape == target_BCTHW.shape, (prediction_BCTHW.shape, target_BCTHW.shape)
    frames = target_BCTHW.shape[2]
    if frames <= skip_frames:
        raise ValueError(f"all {frames} latent frames are given, so that none is trained; use longer clips")
    losses = loss_of_error(prediction_BCTHW[:, :, skip_frames:].float() - target_BCTHW[:, :, skip_frames:].float())
    if weight_BTHW is not None:
        weight_BCTHW = weight_BTHW.float()[:, None]
        losses = losses * (weight_BCTHW if weight_BCTHW.shape[2] == 1 else weight_BCTHW[:, :, skip_frames:])
    return losses.flatten(1).mean(1)


def mse(error: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return error.square()


def huber(error: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """2 c (sqrt(e^2 + c^2) - c): e^2 for small errors, 2 c |e| for large ones.

    The pseudo-Huber loss as diffusers' training scripts, kohya's sd-scripts and SimpleTuner scale it, in a form without
    cancellation.
    """
    squared = error.square()
    return 2 * c * squared / ((squared + c.square()).sqrt() + c)


def smooth_l1(error: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """2 (sqrt(e^2 + c^2) - c): e^2 / c for small errors, 2 |e| for large ones; the `huber` loss divided by c."""
    squared = error.square()
    return 2 * squared / ((squared + c.square()).sqrt() + c)


LOSS_TYPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": mse,
    "huber": huber,
    "smooth_l1": smooth_l1,
}


def scheduled_c(settings: Loss, sigma_B: torch.Tensor) -> torch.Tensor:
    """Returns c (B,) of huber and smooth_l1, by `huber_schedule`.

    exponential: c^sigma. snr: (1 - c) / (1 + r)^2 + c of sd-scripts, with r the ratio of noise to signal; for flow
    matching r = sigma / (1 - sigma), so c becomes (1 - c) (1 - sigma)^2 + c. Both are 1 at data and c at noise.
    """
    c = torch.full_like(sigma_B, settings.huber_c)
    if settings.huber_schedule == "exponential":
        return c**sigma_B
    return (1 - c) * (1 - sigma_B).square() + c if settings.huber_schedule == "snr" else c


def error_function(settings: Loss, sigma_B: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from errors (B, ...) of samples at these noise levels to losses of the same shape."""
    c_B, function = scheduled_c(settings, sigma_B), LOSS_TYPES[settings.type]
    return lambda error: function(error, c_B.view(-1, *[1] * (error.ndim - 1)))


def none(sigma_B: torch.Tensor, settings: Loss) -> torch.Tensor:
    return torch.ones_like(sigma_B)


def cosmap(sigma_B: torch.Tensor, settings: Loss) -> torch.Tensor:
    """2 / (pi (1 - 2 sigma + 2 sigma^2)): up to twice as much in the middle as at the ends (Esser et al. 2024)."""
    return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B.square()))


def sigma_sqrt(sigma_B: torch.Tensor, settings: Loss) -> torch.Tensor:
    """sigma^-2, as in diffusers under this name; at most SMALLEST_SIGMA^-2."""
    return sigma_B.clamp(min=SMALLEST_SIGMA) ** -2


def bell(sigma_B: torch.Tensor, settings: Loss) -> torch.Tensor:
    """exp(-2 (sigma - 1/2)^2) moved to 0 at both ends and scaled to the mean 1: 1.58 in the middle. The weights of
    DiffSynth-Studio, and "linear_timesteps" of ostris' ai-toolkit."""
    return ((-2 * (sigma_B - 0.5).square()).exp() - BELL_END) / BELL_MEAN


def half_bell(sigma_B: torch.Tensor, settings: Loss) -> torch.Tensor:
    """The bell above sigma 1/2, and its top below: ai-toolkit's second weights."""
    return bell(sigma_B.clamp(min=0.5), settings)


def min_snr(sigma_B: torch.Tensor, settings: Loss) -> torch.Tensor:
    """sigma^2 min(SNR, gamma) = min((1 - sigma)^2, gamma sigma^2), with SNR = ((1 - sigma) / sigma)^2.

    Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy", weigh the squared error of a
    predicted x0 by min(SNR, gamma). From x_sigma = (1 - sigma) x0 + sigma noise and v = noise - x0 follows x0 = x_sigma
    - sigma v, so with x_sigma given the error of x0 is -sigma times the error of v, and its square is sigma^2 times the
    square. The usual factor of v-prediction, min(SNR, gamma) / (SNR + 1), holds if a^2 + sigma^2 = 1, so that SNR + 1 =
    1 / sigma^2. Largest, gamma / (1 + sqrt(gamma))^2, at sigma = 1 / (1 + sqrt(gamma)): 0.31 for gamma 5.
    """
    return torch.minimum((1 - sigma_B).square(), settings.snr_gamma * sigma_B.square())


LOSS_WEIGHTING: dict[str, Callable[[torch.Tensor, Loss], torch.Tensor]] = {
    "none": none,
    "cosmap": cosmap,
    "sigma_sqrt": sigma_sqrt,
    "bell": bell,
    "half_bell": half_bell,
    "min_snr": min_snr,
}


def loss_weight(settings: Loss, sigma_B: torch.Tensor) -> torch.Tensor:
    """Returns the factors (B,) of each sample's loss."""
    return LOSS_WEIGHTING[settings.weighting](sigma_B, settings)


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


def sample_sigma(
    uniform_B: torch.Tensor, settings: Timesteps, shift: float, within: tuple[float, float] = ALL_SIGMAS
) -> torch.Tensor:
    """Uniform draws (B,) -> sigma (B,) in 0..1. A shift above 1 moves the distribution towards noise; a list is not
    shifted. within: range of sigma to which the distribution is restricted, including the first value and excluding the
    second unless it is 1; for a list, its values in the range."""
    if within != ALL_SIGMAS:
        lowest, highest = within
        if settings.sampling == "list":
            values = [value for value in settings.values if lowest <= value < highest or value == highest == 1]
            return listed(uniform_B, settings.changed(values=tuple(values)))
        first, last = draws_within(settings, shift, within)
        sigma_B = sample_sigma(first + uniform_B.double() * (last - first), settings, shift).float()
        end = highest if highest == 1 else float(np.nextafter(np.float32(highest), np.float32(0)))
        return sigma_B.clamp(lowest, end)
    sigma_B = TIMESTEP_SAMPLING[settings.sampling](uniform_B, settings).clamp(0, 1)
    return sigma_B if settings.sampling == "list" else shift_sigma(sigma_B, shift)


@lru_cache
def draws_within(settings: Timesteps, shift: float, within: tuple[float, float]) -> tuple[float, float]:
    """Returns the two draws between which the unrestricted `sample_sigma` gives noise levels within a range, found by
    bisection; 0 and 1 for a list."""
    if settings.sampling == "list":
        return 0.0, 1.0

    def sigma_of(draw: float) -> float:
        return float(sample_sigma(torch.tensor([draw], dtype=torch.float64), settings, shift))

    rising = sigma_of(0.0) < sigma_of(1.0)

    def draw_of(sigma: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if (sigma_of(middle) < sigma) == rising else (low, middle)
        return high

    ends = {0.0: 0.0 if rising else 1.0, 1.0: 1.0 if rising else 0.0}
    first, last = (ends[sigma] if sigma in ends else draw_of(sigma) for sigma in within)
    return first, last


def spread_uniform(seed: int, step: int, positions: NDArray[np.int64], global_batch: int) -> torch.Tensor:
    """(B,) float32 draws in 0..1 at `positions` of a step's global batch, spread evenly over the batch and over steps.

    One in each of `global_batch` equal parts of 0..1, at the same place in each (Kingma et al. 2021, "Variational
    Diffusion Models"); the place advances by the golden ratio from step to step, so that successive steps fill the
    gaps. Each step assigns parts to positions by its own permutation, because positions are ordered by bucket. The
    draws depend only on the arguments, so they are the same for any number of ranks. Each draw is uniform over seeds.
    """
    start = derive_seed(str(seed), "noise levels") / 2**63
    part = permute(positions, global_batch, derive_seed(f"{seed}/{step}", "noise levels"))
    return torch.from_numpy(((part + (start + step * GOLDEN_RATIO) % 1) / global_batch).astype(np.float32))
