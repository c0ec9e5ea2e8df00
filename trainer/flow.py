"""Flow matching as pure functions of tensors.

x_sigma = (1 - sigma) x0 + sigma noise; the model predicts the velocity noise - x0. sigma is 1 for noise, 0 for data. A
shift above 1 moves the distribution of sigma towards noise, one below 1 towards data.
"""

from collections.abc import Callable

import torch


def shift_sigma(u_B: torch.Tensor, shift: float) -> torch.Tensor:
    """s u / (1 + (s - 1) u): monotonic from 0 to 1; the shift 1 / s is its inverse."""
    if shift <= 0:
        raise ValueError(f"shift {shift}: must be more than 0; 1 changes nothing")
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

    weight_BTHW: multiplies the losses before the mean; T is 1 where all frames share it. loss_of_error: errors
    (B, C, T, h, w) -> losses of the same shape.
    """
    assert prediction_BCTHW.shape == target_BCTHW.shape, (prediction_BCTHW.shape, target_BCTHW.shape)
    frames = target_BCTHW.shape[2]
    if frames <= skip_frames:
        raise ValueError(f"{frames} latent frame(s), of which {skip_frames} given: nothing to learn; use longer clips")
    losses = loss_of_error(prediction_BCTHW[:, :, skip_frames:].float() - target_BCTHW[:, :, skip_frames:].float())
    if weight_BTHW is not None:
        weight_BCTHW = weight_BTHW.float()[:, None]
        losses = losses * (weight_BCTHW if weight_BCTHW.shape[2] == 1 else weight_BCTHW[:, :, skip_frames:])
    return losses.flatten(1).mean(1)
