"""Means over areas and frames, compared with loops over exact fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.encoding.pooling import pool_space, pool_time

SEEDS = st.integers(0, 2**31)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def overlap(fine: int, i: int, coarse: int, k: int) -> Fraction:
    """The length of the overlap of cell i of `fine` and cell k of `coarse` on a line of length one."""
    low = max(Fraction(i, fine), Fraction(k, coarse))
    return max(Fraction(0), min(Fraction(i + 1, fine), Fraction(k + 1, coarse)) - low)


def slow_space(features_HWC: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    height, width, channels = features_HWC.shape
    out = torch.zeros(*grid, channels, dtype=torch.float64)
    for row in range(grid[0]):
        for column in range(grid[1]):
            for y in range(height):
                for x in range(width):
                    area = overlap(height, y, grid[0], row) * overlap(width, x, grid[1], column)
                    out[row, column] += float(area * grid[0] * grid[1]) * features_HWC[y, x].double()
    return out


@pytest.mark.slow
@given(st.integers(1, 7), st.integers(1, 7), st.data(), SEEDS)
def test_space_is_pooled_by_area(height: int, width: int, data, seed: int) -> None:
    grid = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    features_BHWC = draw(seed, 2, height, width, 3)
    pooled = pool_space(features_BHWC, grid)
    assert pooled.shape == (2, *grid, 3)
    for features, result in zip(features_BHWC, pooled, strict=True):
        assert (slow_space(features, grid) - result).abs().max() < 1e-5


@given(st.integers(1, 4), st.integers(1, 5), SEEDS)
def test_time_is_pooled_by_the_frames_of_each_latent_frame(stride: int, latent_frames: int, seed: int) -> None:
    frames = (latent_frames - 1) * stride + 1
    features_FHWC = draw(seed, frames, 2, 2, 3)
    pooled = pool_time(features_FHWC, stride)
    assert len(pooled) == latent_frames
    for index, result in enumerate(pooled):
        covered = [frame for frame in range(frames) if -(-frame // stride) == index]
        expected = sum(features_FHWC[frame].double() for frame in covered) / len(covered)
        assert (expected - result).abs().max() < 1e-6


def test_a_number_that_is_none_stays_in_its_frame_group_and_clip() -> None:
    """Pooling does not mix clips: only the clip with the number is rejected."""
    features = draw(3, 9, 4, 4, 2)
    features[6, 0, 0, 0] = torch.nan
    pooled = pool_time(pool_space(features, (2, 3)), 4)
    assert [bool(torch.isnan(frame).any()) for frame in pooled] == [False, False, True]
