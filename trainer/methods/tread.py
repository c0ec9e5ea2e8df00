"""TREAD: in some blocks only a random part of the visual tokens is computed, which saves time.

A route drops `selection_ratio` of the tokens at its first block (in i2v, of the tokens after the first frame); they
return unchanged after its last block. Values of a token (its position, NABLA's neighborhoods) are selected with it;
texts, masks of texts and the modulation by the noise level belong to the sample and do not change. A family's
`route_blocks` makes its blocks compute only the kept tokens. Validation and eval run outside of `around`, and compute
every token.

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
        """Register the hooks of one route; an empty list if all tokens are kept."""
        grid, handles = step.family.token_grid(step.model, step.batch), list[RemovableHandle]()
        positions_BK = self._draw(step, route, grid, purpose)
        if positions_BK.shape[1] == grid.tokens:
            return handles
        blocks, kept_tokens = step.family.visual_blocks(step.model), KeptTokens(positions_BK, grid.tokens, grid.square)
        layers = route.layers(len(blocks))
        routed = [blocks[layer] for layer in layers]
        first, last = (step.family.block_tokens(block) for block in (routed[0], routed[-1]))
        handles += [change_arguments(routed[0], partial(begin, kept_tokens, first))]
        handles += step.family.route_blocks(routed, kept_tokens)
        handles += [routed[-1].register_forward_hook(partial(end, kept_tokens, last))]
        step.kept_tokens |= dict.fromkeys(layers, positions_BK)
        return handles

    def _draw(self, step: MethodStep, route: Route, grid: TokenGrid, purpose: str) -> torch.Tensor:
        """Returns the positions (B, K) of the kept tokens, a function of each sample's identity. K is equal for all
        samples: if one sample's mask leaves fewer tokens to drop, all samples of the batch keep more."""
        size, device = grid.square**2, step.batch.latents_BCTHW.device
        squares, clean_squares = grid.tokens // size, 0 if self.settings.drop_first_frame else given_squares(step, grid)
        dropped = count_dropped(route.selection_ratio, squares - clean_squares)
        scores_BS = to_device(step.uniform(purpose, squares), device)  # the lowest scores are dropped, if below 1
        scores_BS[:, :clean_squares] += 1
        mask_BTHW = step.batch.extras.get("mask")
        if mask_BTHW is not None and self.settings.keep_masked:
            scores_BS += covered_squares(mask_BTHW, grid)
            dropped = min(dropped, int((scores_BS < 1).sum(1).min()))
        kept_BS = scores_BS.argsort(dim=1, stable=True)[:, dropped:].sort(1).values  # stable: some draws are equal
        return (kept_BS[..., None] * size + torch.arange(size, device=device)).flatten(1)


def count_dropped(ratio: float, count: int) -> int:
    """Returns ratio * count, rounded down. A product within 1e-9 of an integer is that integer, because in binary 0.29
    * 100 is 28.999..."""
    return math.floor(round(ratio * count, 9))


def given_squares(step: MethodStep, grid: TokenGrid) -> int:
    """Returns the number of squares in the leading frames that are given (i2v)."""
    latent_frames = step.batch.latents_BCTHW.shape[2] // grid.frames  # latent frames per token
    frames = -(-step.family.clean_frames(step.task) // latent_frames)
    return frames * grid.rows * grid.columns // grid.square**2


def covered_squares(mask_BTHW: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
    """Returns bool (B, S): whether the mask is above 0 anywhere in a square of tokens. All False for a mask that covers
    all squares, such as the default mask of a sample without one."""
    frames, sides = min(grid.frames, mask_BTHW.shape[1]), (grid.rows // grid.square, grid.columns // grid.square)
    covered_BTHW = F.adaptive_max_pool3d(mask_BTHW[:, None].float(), (frames, *sides))[:, 0] > 0
    covered_BS = covered_BTHW.expand(-1, grid.frames, -1, -1).flatten(1)
    return covered_BS & ~covered_BS.all(1, keepdim=True)


def begin(tokens: KeptTokens, layout: BlockTokens, arguments: dict[str, Any]) -> dict[str, Any]:
    name, hidden = next(iter(arguments.items()))
    assert hidden.shape[1] >= tokens.tokens, "routes do not overlap"
    tokens.waiting_BND, _ = layout.divide(hidden, tokens.tokens)
    return {name: tokens.take(hidden, layout)}


def end(tokens: KeptTokens, layout: BlockTokens, block: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return layout.replace_output(output, tokens.restore(layout.read_output(output), layout))
