"""AdamW, its learning rate as a function of the step, and what to do about steps that are not finite."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from schemas.config.training import Optimizer
from schemas.errors import LatentpressError

BAD_STEP_WINDOW = 100  # steps over which skipped ones are counted


class DivergedError(LatentpressError):
    """Too many steps had a loss or gradient that was not finite."""


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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

    A norm that is not finite is returned and leaves the gradients useless: do not step.
    """
    return float(torch.nn.utils.clip_grad_norm_(list(parameters), max_norm))


@dataclass
class BadStepCounter:
    """Counts the steps that were skipped because their loss or gradient was not finite.

    More than `limit` of them among WINDOW consecutive steps end the run. Skipped steps use up their samples.
    """

    limit: int
    steps: list[int] = field(default_factory=list)
    total: int = 0

    def check(self, step: int, loss: float, norm: float) -> bool:
        """Whether the step may be taken. Counts it otherwise, and raises DivergedError past the limit."""
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        self.total += 1
        self.steps = [*(past for past in self.steps if past > step - BAD_STEP_WINDOW), step]
        if len(self.steps) > self.limit:
            raise DivergedError(
                f"step {step}: loss {loss}, gradient norm {norm}; {len(self.steps)} of the last "
                f"{BAD_STEP_WINDOW} steps were "
                f"not finite (train.max_bad_steps is {self.limit})",
                "Lower train.optimizer.lr (1e-5 for full-rank training), lengthen train.optimizer.warmup, set "
                "train.precision to float32, or train a LoRA (train.adapter.type=lora). The last checkpoint is "
                "from before: training goes on from it with the new settings.",
            )
        return False
