"""An exponential moving average of the trained weights, and the weights that are validated and saved."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from schemas.config.training import EMA
from trainer.run.sharded import local
from trainer.setup.optimizers import averages_weights

POWER = 2 / 3  # of the warm-up "power"
Parameters = Mapping[str, torch.nn.Parameter]


def ema_decay(settings: EMA, updates: int) -> float:
    """The decay of an update that follows `updates` others; the first copies the weights. The formulas of diffusers'
    EMAModel: "ratio" is its default, "power" its use_ema_warmup."""
    if updates == 0:
        return 0.0
    warm = {"ratio": (1 + updates) / (10 + updates), "power": 1 - (1 + updates) ** -POWER, "none": 1.0}
    return min(settings.decay, warm[settings.warmup])


class MovingAverage:
    """averages: name -> float32 average, on the parameter's device or on the CPU. updates: optimizer steps in it."""

    def __init__(self, trainable: Parameters, settings: EMA) -> None:
        self.settings, self.updates = settings, 0
        device = torch.device("cpu") if settings.device == "cpu" else None
        self.averages = {
            name: weight.detach().to(device, torch.float32, copy=True) for name, weight in trainable.items()
        }

    @torch.no_grad()
    def update(self, trainable: Parameters, finite: torch.Tensor | None = None) -> None:
        """average = decay * average + (1 - decay) * weight. finite: (), on the weights' device, 0 after a step that
        was left out there: the averages stay as they are, and `updates` is put right when the host knows it."""
        share: float | torch.Tensor = 1 - ema_decay(self.settings, self.updates)
        share = share if finite is None else share * finite
        self.updates += 1
        for name, weight in trainable.items():
            average = self.averages[name]
            value = local(weight.detach())
            local(average).lerp_(value.to(average.device, average.dtype), share)


def name_weights(optimizer: torch.optim.Optimizer, average: MovingAverage | None) -> str:
    """Name the weights that are validated and saved: the moving average where there is one, the average of a
    schedule-free optimizer, or the trained weights."""
    if average is not None:
        return "ema"
    return "schedule-free average" if averages_weights(optimizer) else "trained"


@contextmanager
def inference_weights(
    trainable: Parameters, optimizer: torch.optim.Optimizer, average: MovingAverage | None
) -> Iterator[str]:
    """Within, `trainable` holds the weights that `name_weights` names; yields that name.

    Afterwards the weights are bit for bit those of before. They wait on the CPU: the optimizer's own way back rounds.
    """
    switch: Any = optimizer
    name = name_weights(optimizer, average)
    if name == "trained":
        yield name
        return
    kept = {name: local(weight.detach()).to("cpu", copy=True) for name, weight in trainable.items()}
    try:
        if average is not None:
            _copy(average.averages, trainable)
        else:
            switch.eval()
        yield name
    finally:
        if average is None:
            switch.train()
        _copy(kept, trainable)


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], trainable: Parameters) -> None:
    for name, weight in trainable.items():
        local(weight).copy_(local(values[name]))
