"""Some of a transformer's visual tokens, which its blocks compute while the others wait."""

from dataclasses import dataclass

import torch


@dataclass
class KeptTokens:
    """The tokens of a route, of the N that the transformer has.

    positions_BK: ascending, in the order of `FamilyModule.token_grid`. square: that of the TokenGrid, whose squares are
    kept whole. waiting_BND: the hidden states of all tokens where the route begins; set by its first block.
    """

    positions_BK: torch.Tensor
    tokens: int
    square: int = 1
    waiting_BND: torch.Tensor | None = None

    def __post_init__(self) -> None:
        starts_B1 = torch.arange(len(self.positions_BK), device=self.positions_BK.device)[:, None] * self.tokens
        self._rows = (self.positions_BK + starts_B1).flatten()  # of all samples' tokens, one after the other

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """(B or 1, N, ...) -> (B, K, ...)"""
        shape = self.positions_BK.shape
        rows = values.expand(shape[0], *values.shape[1:]).flatten(0, 1)
        return rows.index_select(0, self._rows).unflatten(0, shape)

    def restore(self, values_BKD: torch.Tensor) -> torch.Tensor:
        """(B, N, D): the tokens that waited, with these in their places."""
        assert self.waiting_BND is not None, "the route's first block has not run"
        rows = self.waiting_BND.to(values_BKD.dtype).flatten(0, 1)
        return rows.index_copy(0, self._rows, values_BKD.flatten(0, 1)).view_as(self.waiting_BND)
