"""The optimizers that train.optimizer.name may name, one row each. Any other is named by its class' dotted path."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerRow:
    """path: the class. arguments: its keyword arguments here; the others have the class' own defaults. lr: the default
    of train.optimizer.lr. full_rank_lr: the highest rate without a warning when every weight is trained; None for an
    optimizer that finds its rate itself, of which lr is a factor. scheduled: whether a schedule may lower the rate.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-4
    full_rank_lr: float | None = 5e-5
    scheduled: bool = True


ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
LION_FULL_RANK_LR = 1e-5  # Lion's steps are larger: a fifth of AdamW's rate

OPTIMIZERS = {
    "adamw": OptimizerRow("torch.optim.AdamW", ADAMW),
    "adamw-fused": OptimizerRow("torch.optim.AdamW", {**ADAMW, "fused": True}),
    "adamw-foreach": OptimizerRow("torch.optim.AdamW", {**ADAMW, "foreach": True}),
    "optimi-adamw": OptimizerRow("optimi.AdamW", ADAMW),
    "optimi-lion": OptimizerRow("optimi.Lion", full_rank_lr=LION_FULL_RANK_LR),
    "bnb-adamw8bit": OptimizerRow("bitsandbytes.optim.AdamW8bit", ADAMW),
    "bnb-adamw8bit-paged": OptimizerRow("bitsandbytes.optim.PagedAdamW8bit", ADAMW),
    "bnb-lion8bit": OptimizerRow("bitsandbytes.optim.Lion8bit", full_rank_lr=LION_FULL_RANK_LR),
    "bnb-lion8bit-paged": OptimizerRow("bitsandbytes.optim.PagedLion8bit", full_rank_lr=LION_FULL_RANK_LR),
    "prodigy": OptimizerRow("prodigyopt.Prodigy", lr=1.0, full_rank_lr=None),
    "adamw-schedulefree": OptimizerRow("schedulefree.AdamWScheduleFree", scheduled=False),
}

#: Package that a class is imported from -> what pip installs, where the names differ.
DISTRIBUTIONS = {"optimi": "torch-optimi", "pytorch_optimizer": "pytorch-optimizer"}


def find_optimizer(name: str) -> OptimizerRow:
    """The row of a name; for a dotted path one without arguments."""
    return OPTIMIZERS.get(name) or OptimizerRow(name)
