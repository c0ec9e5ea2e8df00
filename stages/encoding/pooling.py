"""Means of features and masks over coarser grids and latent frames."""

from functools import lru_cache

import torch

from schemas.devices import to_device


def overlap_weights(fine: int, coarse: int) -> torch.Tensor:
    """(coarse, fine) float32: the share of each fine cell in each coarse cell. Both grids divide the same length.

    Rows sum to one. Computed in integers until the last step, so that the shares are the nearest float32.
    """
    assert 0 < coarse <= fine, f"{fine} cells can't be pooled to {coarse}"
    # In units of 1 / (fine * coarse) of the length every boundary is an integer.
    starts_F, starts_C = torch.arange(fine) * coarse, torch.arange(coarse) * fine
    ends = torch.minimum(starts_F + coarse, (starts_C + fine)[:, None])
    return (ends - torch.maximum(starts_F, starts_C[:, None])).clamp(min=0).float() / fine


@lru_cache(maxsize=64)
def _weights_on(device: torch.device, fine: int, coarse: int) -> torch.Tensor:
    """`overlap_weights` on a device. They are computed on the host, because some devices divide by multiplying."""
    return to_device(overlap_weights(fine, coarse), device)


def pool_space(features_BHWC: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """float32 features_BHWC on a coarser (or the same) grid: the mean over each cell's area."""
    features_BHWC = features_BHWC.float()
    for axis, coarse in ((1, grid[0]), (2, grid[1])):
        fine = features_BHWC.shape[axis]
        if fine != coarse:
            shares = _weights_on(features_BHWC.device, fine, coarse)
            features_BHWC = torch.tensordot(features_BHWC, shares, dims=([axis], [1])).movedim(-1, axis)
    return features_BHWC


def pool_time(features_FHWC: torch.Tensor, stride: int) -> torch.Tensor:
    """features_THWC of the latent frames of a clip: frame 0, then the mean of every `stride` frames."""
    frames = features_FHWC.shape[0]
    assert (frames - 1) % stride == 0, f"{frames} frames are not 1 + a multiple of {stride}"
    later = features_FHWC[1:].unflatten(0, (-1, stride)).mean(1) if frames > 1 else features_FHWC[1:]
    return torch.cat([features_FHWC[:1], later])
