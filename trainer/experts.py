"""Several transformers of one checkpoint, trained as one model, each for a range of noise levels."""

from collections.abc import Mapping
from typing import Any

import torch


class Experts(torch.nn.Module):
    """Transformers by sub-folder, returned by a family's `load`; its `predict` chooses one."""

    def __init__(self, experts: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleDict(experts)

    @property
    def config(self) -> Any:
        """That of the first; only their weights differ."""
        return next(iter(self.experts.values())).config

    def enable_gradient_checkpointing(self) -> None:
        for expert in self.experts.values():
            expert.enable_gradient_checkpointing()  # type: ignore[operator]


def components(model: Any) -> dict[str, Any]:
    """Sub-folder -> transformer of what a family's `load` returned."""
    return dict(model.experts.items()) if isinstance(model, Experts) else {"transformer": model}
