"""Several transformers of one checkpoint that are trained as one model, each for its own part of the noise levels."""

from collections.abc import Mapping
from typing import Any

import torch


class Experts(torch.nn.Module):
    """Transformers by the names of their sub-folders. A family's `load` returns one, and its `predict` chooses."""

    def __init__(self, experts: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleDict(experts)

    @property
    def config(self) -> Any:
        """The first one's; they differ in their weights alone."""
        return next(iter(self.experts.values())).config

    def enable_gradient_checkpointing(self) -> None:
        for expert in self.experts.values():
            expert.enable_gradient_checkpointing()  # type: ignore[operator]


def components(model: Any) -> dict[str, Any]:
    """The transformers of what a family's `load` returned, by their sub-folders of a checkpoint."""
    return dict(model.experts.items()) if isinstance(model, Experts) else {"transformer": model}
