"""The memory of an optimizer, measured with small matrices: any class will do, and none has to be in a table."""

from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from schemas.config.training import Optimizer
from schemas.optimizers import find_optimizer
from trainer.memory.meter import MemoryMeter
from trainer.run.optimizer_state import collect
from trainer.setup.optimizers import averages_weights, find_class, make_optimizer

TRIAL_SHAPE = (256, 256)
#: Matrices of two trials. A loop over parameters may keep what the one before needed, so no trial has only one.
FEW, MORE = 2, 6


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes for each trained number: `state`, and what a step needs besides, `working`, of which as much as is needed
    for one parameter at a time is `working_one`. averages: whether it keeps the weights that are saved apart from those
    that are trained."""

    state: float
    working: float
    working_one: float
    averages: bool


#: Of an optimizer that runs on no CPU.
LIKE_ADAMW = OptimizerMemory(8, 4, 0, False)


def measure_optimizer(settings: Optimizer, dtype: torch.dtype, cpu: bool) -> OptimizerMemory:
    """From steps on a CPU with few matrices and with more, once in a process for equal settings. cpu: whether training
    runs on one, too; elsewhere torch's own optimizers take all parameters at once. RunError where the optimizer is not
    installed."""
    return _measure(settings.model_dump_json(), dtype, cpu)


@cache
def _measure(settings_json: str, dtype: torch.dtype, cpu: bool) -> OptimizerMemory:
    settings = Optimizer.model_validate_json(settings_json)
    kind, arguments = find_class(settings.name), dict(settings.arguments)
    chosen = {*arguments, *find_optimizer(settings.name).arguments}
    if not cpu and kind.__module__.startswith("torch.optim") and not {"foreach", "fused"} & chosen:
        arguments["foreach"] = True
    settings = settings.model_copy(update={"groups": (), "arguments": arguments})
    try:
        (state, few, averages), (_, more, _) = (trial(settings, dtype, count) for count in (FEW, MORE))
    except (RuntimeError, AssertionError, NotImplementedError):
        return LIKE_ADAMW
    numbers, each = prod(TRIAL_SHAPE), (more - few) / (MORE - FEW)
    return OptimizerMemory(state / numbers, each / numbers, (few - FEW * each) / numbers, averages)


def trial(settings: Optimizer, dtype: torch.dtype, count: int) -> tuple[int, int, bool]:
    """(bytes of one matrix' state, those that a step of `count` matrices needs besides, whether it averages)."""
    weights = {str(number): torch.nn.Parameter(torch.ones(TRIAL_SHAPE, dtype=dtype)) for number in range(count)}
    optimizer = make_optimizer(weights, settings)
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()  # makes the state
    tensors, _ = collect(weights, optimizer)
    meter = MemoryMeter()
    for tensor in (*weights.values(), *(weight.grad for weight in weights.values()), *tensors.values()):
        if tensor is not None:
            meter.add(tensor)
    start = meter.live
    with meter:
        optimizer.step()
    kept = sum(value.nbytes for name, value in tensors.items() if name.startswith("0/"))
    return kept, meter.peak - start, averages_weights(optimizer)
