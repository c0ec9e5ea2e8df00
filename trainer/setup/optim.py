"""The learning rate as a function of the step, and the handling of non-finite steps."""

import math
from dataclasses import dataclass, field

import torch

from schemas.config.training import Optimizer
from schemas.errors import LatentpressError
from trainer.schedules import scheduled_value

BAD_STEP_WINDOW = 100  # steps over which skipped ones are counted


class DivergedError(LatentpressError):
    """Too many steps had a non-finite loss or gradient."""


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: warm-up, then the schedule from lr to lr_end, `cycles` times."""
    first, last, options = config.lr, config.lr_end, config.model_dump(include={"warmup", "power", "cycles"})
    return scheduled_value(config.schedule, first, last, step, steps, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Optimizer, step: int, steps: int) -> float:
    """Give every parameter group its own rate times the schedule's factor; returns train.optimizer.lr's."""
    rate = learning_rate(config, step, steps)
    for group in optimizer.param_groups:
        own = group["initial_lr"]
        group["lr"] = rate if own == config.lr else own * (rate / config.lr)
    return rate


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
