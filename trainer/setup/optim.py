"""AdamW, its learning rate as a function of the step, and the handling of non-finite steps."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from schemas.config.training import Optimizer
from schemas.errors import LatentpressError

BAD_STEP_WINDOW = 100  # steps over which skipped ones are counted


class DivergedError(LatentpressError):
    """Too many steps had a non-finite loss or gradient."""


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then constant or half a cosine down to 0."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule == "constant" or step < config.warmup:
        return config.lr * warm
    left = max(1, steps - config.warmup)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - config.warmup) / left)))


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay over `parameters`, in their order."""
    return torch.optim.AdamW(
        list(parameters), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


@dataclass
class BadStepCounter:
    """Counts steps skipped for a non-finite loss or gradient: more than `limit` of BAD_STEP_WINDOW steps end the run.

    Skipped steps use up their samples.
    """

    limit: int
    steps: list[int] = field(default_factory=list)
    total: int = 0

    def check(self, step: int, loss: float, norm: float) -> bool:
        """Whether to take the step. Otherwise it is counted; DivergedError past the limit."""
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        self.total += 1
        self.steps = [*(past for past in self.steps if past > step - BAD_STEP_WINDOW), step]
        if len(self.steps) > self.limit:
            raise DivergedError(
                f"step {step}: loss {loss}, gradient norm {norm}; {len(self.steps)} of the last {BAD_STEP_WINDOW} "
                f"steps were not finite (train.max_bad_steps is {self.limit})",
                "Lower train.optimizer.lr (1e-5 for full-rank training), lengthen train.optimizer.warmup, set "
                "train.precision to float32, or train a LoRA (train.adapter.type=lora). The last checkpoint is "
                "from before: training goes on from it with the new settings.",
            )
        return False
