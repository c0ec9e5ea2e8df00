"""CREPA's formula, token by token."""

import math
from typing import Any

import numpy as np
import torch

from schemas.config.methods import CREPA
from trainer.batch import Batch
from trainer.families.base import TokenGrid


def enlarge(grid_RCD: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bilinear between the centers of cells, along each axis separately; outside of the outer centers, the outer
    value."""
    for axis, fine in ((0, rows), (1, columns)):
        coarse = grid_RCD.shape[axis]
        lines = grid_RCD.movedim(axis, 0)
        places = [min(max((n + 0.5) * coarse / fine - 0.5, 0), coarse - 1) for n in range(fine)]
        low = [math.floor(place) for place in places]
        mixed = [
            (1 - place + at) * lines[at] + (place - at) * lines[min(at + 1, coarse - 1)]
            for place, at in zip(places, low, strict=True)
        ]
        grid_RCD = torch.stack(mixed).movedim(0, axis)
    return grid_RCD


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b) / (a @ a).sqrt() / (b @ b).sqrt()


def loss_by_hand(
    hidden_BND: torch.Tensor, places_BN: torch.Tensor, grid: TokenGrid, batch: Batch, projector: Any, options: CREPA
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and the similarity of each sample, which masks do not weight. places_BN: positions of
    the tokens, row by row."""
    (norm, linear), mask = projector, batch.extras.get("mask")
    losses, similarities = [], []
    for sample, (hidden_ND, features) in enumerate(zip(hidden_BND, batch.extras["vision"], strict=True)):
        expected = [enlarge(frame, grid.rows, grid.columns) for frame in features]
        neighbors = {
            f: [(f, 1.0)]
            + [
                (f + sign * d, math.exp(-d / options.adjacent_tau))
                for d in range(1, options.adjacent_distance + 1)
                if options.cumulative_neighbors or d == options.adjacent_distance
                for sign in (-1, 1)
                if 0 <= f + sign * d < grid.frames
            ]
            for f in range(grid.frames)
        }
        result, factors = [], []
        for h, place in zip(hidden_ND, places_BN[sample].tolist(), strict=True):
            f, r, c = (int(n) for n in np.unravel_index(place, (grid.frames, grid.rows, grid.columns)))
            h = (h - h.mean()) / (h.var(correction=0) + 1e-5).sqrt() * norm.weight + norm.bias
            h = linear.weight @ h + linear.bias
            result.append(sum(share * cosine(h, expected[k][r, c]) for k, share in neighbors[f]))
            if mask is not None:
                high, wide = mask.shape[-2] // grid.rows, mask.shape[-1] // grid.columns
                factors.append(mask[sample, f, r * high : (r + 1) * high, c * wide : (c + 1) * wide].mean())
        similarity = torch.stack(result)
        weighed = similarity if mask is None else similarity * torch.stack(factors)
        losses.append(-options.weight * weighed.mean() * (1 if options.normalize_by_frames else grid.frames))
        similarities.append(similarity.mean())
    return torch.stack(losses), torch.stack(similarities)
