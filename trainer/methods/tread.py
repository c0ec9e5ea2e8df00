"""TREAD: in some blocks only a random part of the visual tokens is computed, which saves time.

A route drops `selection_ratio` of the tokens at its first block (in i2v, of those after the first frame); they come
back after its last one as they were there. What belongs to a token (its position, NABLA's neighborhoods) goes with it;
texts, masks of texts and the modulation by the noise level are the sample's, and stay. Which tokens a block of a family
takes, and how, `route_blocks` of the family says. Validation and eval run outside of `around`, and compute every token.

Source: Krause et al. 2025, "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training",
arXiv:2501.04765.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from schemas.config.methods import Route, Tread
from schemas.devices import to_device
from trainer.families.base import BlockTokens, KeptTokens, TokenGrid, change_arguments
from trainer.methods.base import Method, MethodStep


class TreadMethod(Method):
    def __init__(self, settings: Tread) -> None:
        self.settings = settings

    @contextmanager
    def around(self, step: MethodStep) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        try:
            for number, route in enumerate(self.settings.routes):
                handles += self._open(step, route, f"tread {number}")
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _open(self, step: MethodStep, route: Route, purpose: str) -> list[RemovableHandle]:
        """Hooks of one route; none where no token is dropped."""
        grid, handles = step.family.token_grid(step.model, step.batch), list[RemovableHandle]()
        positions_BK = self._draw(step, route, grid, purpose)
        if positions_BK.shape[1] == grid.tokens:
            return handles
        blocks, kept = step.family.visual_blocks(step.model), KeptTokens(positions_BK, grid.tokens, grid.square)
        layers = route.layers(len(blocks))
        routed = [blocks[layer] for layer in layers]
        first, last = (step.family.block_tokens(block) for block in (routed[0], routed[-1]))
        handles += [change_arguments(routed[0], partial(begin, kept, first))]
        handles += step.family.route_blocks(routed, kept)
        handles += [routed[-1].register_forward_hook(partial(end, kept, last))]
        step.kept_tokens |= dict.fromkeys(layers, positions_BK)
        return handles

    def _draw(self, step: MethodStep, route: Route, grid: TokenGrid, purpose: str) -> torch.Tensor:
        """(B, K) positions of the tokens that are kept, a function of each sample's identity. K is the same for all: a
        mask that leaves too few to drop lets the sample's batch mates keep more, too."""
        size, device = grid.square**2, step.batch.latents_BCTHW.device
        squares, given = grid.tokens // size, 0 if self.settings.drop_first_frame else given_squares(step, grid)
        dropped = count_dropped(route.selection_ratio, squares - given)
        scores_BS = to_device(step.uniform(purpose, squares), device)  # the lowest are dropped, never one of 1 or more
        scores_BS[:, :given] += 1
        mask_BTHW = step.batch.extras.get("mask")
        if mask_BTHW is not None and self.settings.keep_masked:
            scores_BS += covered_squares(mask_BTHW, grid)
            dropped = min(dropped, int((scores_BS < 1).sum(1).min()))
        kept_BS = scores_BS.argsort(dim=1, stable=True)[:, dropped:].sort(1).values  # stable: some draws are equal
        return (kept_BS[..., None] * size + torch.arange(size, device=device)).flatten(1)


def count_dropped(ratio: float, count: int) -> int:
    """The share of so many, rounded down; within 1e-9 of a whole number it is that one: in binary 0.29 * 100 is
    28.999..."""
    return math.floor(round(ratio * count, 9))


def given_squares(step: MethodStep, grid: TokenGrid) -> int:
    """How many squares the leading frames have that are given (i2v)."""
    latent_frames = step.batch.latents_BCTHW.shape[2] // grid.frames  # of one token
    frames = -(-step.family.clean_frames(step.task) // latent_frames)
    return frames * grid.rows * grid.columns // grid.square**2


def covered_squares(mask_BTHW: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
    """(B, S) whether a mask is above 0 anywhere in a square of tokens; nowhere for one that covers all of them, as that
    of a sample without a mask does."""
    frames, sides = min(grid.frames, mask_BTHW.shape[1]), (grid.rows // grid.square, grid.columns // grid.square)
    covered_BTHW = F.adaptive_max_pool3d(mask_BTHW[:, None].float(), (frames, *sides))[:, 0] > 0
    covered_BS = covered_BTHW.expand(-1, grid.frames, -1, -1).flatten(1)
    return covered_BS & ~covered_BS.all(1, keepdim=True)


def begin(kept: KeptTokens, where: BlockTokens, arguments: dict[str, Any]) -> dict[str, Any]:
    name, hidden = next(iter(arguments.items()))
    assert hidden.shape[1] >= kept.tokens, "routes do not overlap"
    kept.waiting_BND, _ = where.divide(hidden, kept.tokens)
    return {name: kept.take(hidden, where)}


def end(kept: KeptTokens, where: BlockTokens, block: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return where.replace_output(output, kept.restore(where.read_output(output), where))
