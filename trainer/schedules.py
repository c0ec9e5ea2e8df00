"""How a number changes over the steps of a run: linear warm-up, then a schedule."""

import math
from collections.abc import Callable

# Each maps the share of the way from warm-up to the end (0..1) and the power to the height above the last value (1..0).
SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda progress, power: 1.0,
    "linear": lambda progress, power: 1.0 - progress,
    "cosine": lambda progress, power: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, power: (1.0 - progress) ** power,
}


def scheduled_value(
    schedule: str,
    first: float,
    last: float,
    step: int,
    steps: int,
    *,
    warmup: int = 0,
    power: float = 1,
    cycles: int = 1,
) -> float:
    """Returns the value at step `step` (from 0) of `steps`: linear warm-up, in which step 0 already has `first` /
    `warmup`, then the schedule from `first` to `last`, `cycles` times."""
    if step < warmup:
        return first * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    progress = min(1.0, cycles * progress % 1.0 if progress < 1.0 else 1.0)
    return last + (first - last) * SCHEDULES[schedule](progress, power)
