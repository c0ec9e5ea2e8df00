"""The optimizer: its class by name, a trial of it before a model is loaded, its parameter groups, its learning rate at
each step, skipped steps; and an exponential moving average of the trained weights."""

import importlib
import inspect
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cache.runs.training_run import RunError
from schemas.config.training import DISTRIBUTIONS, EMA, OPTIMIZERS, Optimizer, Train, find_optimizer
from schemas.errors import LatentpressError
from trainer.run.optimizer_state import collect
from trainer.run.sharded import gather, local
from trainer.schedules import scheduled_value

TRIAL_SHAPE = (64, 64)  # the smallest parameter for which bitsandbytes keeps 8-bit states
TRIAL_STEPS = 3
BAD_STEP_WINDOW = 100  # number of last steps over which skipped steps are counted


def check_optimizer(train: Train, device: torch.device, sharded: bool = False) -> None:
    """Take trial steps on small parameters. RunError if the optimizer is not installed, can't be created as configured,
    does not run on the device, or does not fit other settings; OptimizerStateError if a checkpoint can't hold its
    state. sharded: whether to take the steps on sharded parameters (FSDP2), too."""
    settings, pure = train.optimizer, train.weight_precision == "bfloat16"
    kind = find_class(settings.name)
    parameters = inspect.signature(kind.__init__).parameters
    if pure and ("kahan_sum" not in parameters or settings.arguments.get("kahan_sum", True) is False):
        raise RunError(
            f"train.weight_precision bfloat16 needs Kahan summation, which {settings.name} lacks: steps of 1e-5 "
            "vanish in bfloat16 weights",
            "Set train.optimizer.name to optimi-adamw or optimi-lion, or train.weight_precision to float32.",
        )
    try:
        weights, optimizer = _try_steps(kind, settings, torch.bfloat16 if pure else torch.float32, device)
    except (TypeError, ValueError, RuntimeError, ImportError, AttributeError, AssertionError, KeyError) as error:
        raise RunError(
            f"train.optimizer: {settings.name} does not work on {device.type} with these settings: "
            f"{str(error) or type(error).__name__}",
            "Correct train.optimizer and its arguments, or choose another train.optimizer.name.",
        ) from error
    collect(weights, optimizer)
    if sharded:
        check_sharded_steps(kind, settings, weights, device)
    if train.ema is not None and averages_weights(optimizer):
        raise RunError(
            f"{settings.name} averages the weights itself, and train.ema would average them twice",
            "Remove train.ema.",
        )


def _try_steps(
    kind: type[torch.optim.Optimizer],
    settings: Optimizer,
    dtype: torch.dtype,
    device: torch.device,
    distribute: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """One parameter per group, and one outside of the groups, after a few steps with different gradients; and the
    optimizer.

    distribute: function applied to each parameter and gradient, to shard it.
    """
    values = torch.linspace(-1, 1, math.prod(TRIAL_SHAPE), device=device).reshape(TRIAL_SHAPE)
    weights = {
        f"{number}.weight": torch.nn.Parameter(distribute(values.to(dtype, copy=True)))
        for number in range(len(settings.groups) + 1)
    }
    groups = [
        {"params": [weight], **options}
        for weight, options in zip(weights.values(), [*_options(settings), {}], strict=True)
    ]
    optimizer = _make(kind, groups, settings)
    for step in range(TRIAL_STEPS):
        for weight in weights.values():
            weight.grad = distribute((torch.cos(7 * values + step) * 1e-3).to(dtype))
        optimizer.step()
    return weights, optimizer


def check_sharded_steps(
    kind: type[torch.optim.Optimizer],
    settings: Optimizer,
    expected: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """RunError if trial steps on sharded parameters differ from `expected`, the result on plain parameters."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    dtype, problem = next(iter(expected.values())).dtype, "its steps differ between sharded and plain parameters"
    try:
        weights, _ = _try_steps(
            kind, settings, dtype, device, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
        )
        is_equal = all(torch.allclose(gather(weights[name]), value, rtol=1e-5) for name, value in expected.items())
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, NotImplementedError) as error:
        is_equal, problem = False, str(error).partition("\n")[0] or type(error).__name__
    if not is_equal:
        raise RunError(
            f"train.optimizer: {settings.name} can't train sharded weights (train.parallel.strategy fsdp2): {problem}",
            "Set train.optimizer.name to adamw or adamw-fused, or train.parallel.strategy to ddp.",
        )


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer class for a name or dotted path. RunError if it is not installed or not an optimizer."""
    module, _, attribute = find_optimizer(name).path.rpartition(".")
    package = module.partition(".")[0]
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        extra = "'latentpress[optimizers]', or " if name in OPTIMIZERS else ""
        raise RunError(
            f"train.optimizer.name {name} needs {module}, which can't be imported: {error}",
            f"pip install {extra}{DISTRIBUTIONS.get(package, package)}, or choose another train.optimizer.name.",
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise RunError(
            f"train.optimizer.name: {module} has no optimizer {attribute!r}",
            "Choose a class of that module, or one of " + ", ".join(OPTIMIZERS) + ".",
        )
    return kind


def divide_weights(trainable: Mapping[str, torch.nn.Parameter], settings: Optimizer) -> list[list[torch.nn.Parameter]]:
    """The parameters of each of train.optimizer.groups, and last the parameters in none of them. RunError if a group
    matches no parameter."""
    weights_by_group: list[list[torch.nn.Parameter]] = [[] for _ in (*settings.groups, None)]
    for name, weight in trainable.items():
        matches = (number for number, group in enumerate(settings.groups) if re.fullmatch(group.match, name))
        weights_by_group[next(matches, -1)].append(weight)
    for group, weights in zip(settings.groups, weights_by_group, strict=False):
        if not weights:
            is_taken = any(re.fullmatch(group.match, name) for name in trainable)
            reason = "only parameters of an earlier group" if is_taken else "no trained parameter"
            examples = f"{', '.join(list(trainable)[:4])}, ... ({len(trainable)} in all)"
            raise RunError(
                f"train.optimizer.groups: {group.match!r} matches {reason}; the trained parameters are {examples}",
                "Correct the regular expression, which must match whole names, or remove the group.",
            )
    return weights_by_group


def make_optimizer(trainable: Mapping[str, torch.nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer over `trainable` (name -> parameter), in training mode if it has modes. Raises the errors of
    `divide_weights`."""
    groups = [
        {"params": weights, **options}
        for weights, options in zip(divide_weights(trainable, settings), [*_options(settings), {}], strict=True)
        if weights
    ]
    return _make(find_class(settings.name), groups, settings)


def averages_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer averages the weights itself: it has `train` and `eval` modes like schedule-free
    optimizers."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _options(settings: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group, as keys of a torch parameter group."""
    return [group.model_dump(include={"lr", "weight_decay"}, exclude_none=True) for group in settings.groups]


def _make(
    kind: type[torch.optim.Optimizer], groups: Iterable[dict[str, Any]], settings: Optimizer
) -> torch.optim.Optimizer:
    options = settings.model_dump(include={"lr", "betas", "eps", "weight_decay"}, exclude_none=True)
    arguments = {**find_optimizer(settings.name).arguments, **options, **settings.arguments}
    groups = list(groups)
    device = groups[0]["params"][0].device
    # The accelerators for which torch has a fused kernel for a whole step of AdamW, the fastest implementation.
    fused = {*torch.utils._foreach_utils._get_fused_kernels_supported_devices()} - {"cpu", "mps"}
    if kind is torch.optim.AdamW and device.type in fused and not {"fused", "foreach"} & arguments.keys():
        arguments["fused"] = True
    # Some of optimi's optimizers use Triton's kernels if Triton is installed, and torch for CUDA installs it.
    takes_triton = "triton" in inspect.signature(kind.__init__).parameters
    if takes_triton and device.type == "cpu" and arguments.setdefault("triton", False):
        raise ValueError("Triton has no kernels for a CPU: remove the argument triton")
    with redirect_stdout(io.StringIO()):  # prodigyopt prints
        optimizer: Any = kind(groups, **arguments)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    if averages_weights(optimizer):
        optimizer.train()
    return optimizer


class DivergedError(LatentpressError):
    """Raised if too many steps had a non-finite loss or gradient."""


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: warm-up, then the schedule from lr to lr_end, `cycles`
    times."""
    first, last, options = config.lr, config.lr_end, config.model_dump(include={"warmup", "power", "cycles"})
    return scheduled_value(config.schedule, first, last, step, steps, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Optimizer, step: int, steps: int) -> float:
    """Set the learning rate of every parameter group to its initial rate times the schedule's factor. Returns the rate
    that train.optimizer.lr has at this step."""
    rate = learning_rate(config, step, steps)
    for group in optimizer.param_groups:
        initial = group["initial_lr"]
        group["lr"] = rate if initial == config.lr else initial * (rate / config.lr)
    return rate


@dataclass
class BadStepCounter:
    """Counts steps that are skipped because of a non-finite loss or gradient. More than `limit` such steps among
    BAD_STEP_WINDOW end the run.

    The samples of a skipped step are not drawn again.
    """

    limit: int
    steps: list[int] = field(default_factory=list)
    total: int = 0

    def check(self, step: int, loss: float, norm: float) -> bool:
        """Whether to take the step. If not, the step is counted. DivergedError if the count exceeds the limit."""
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        self.total += 1
        self.steps = [*(past for past in self.steps if past > step - BAD_STEP_WINDOW), step]
        if len(self.steps) > self.limit:
            raise DivergedError(
                f"step {step}: loss {loss}, gradient norm {norm}; {len(self.steps)} of the last {BAD_STEP_WINDOW} "
                f"steps were not finite (train.max_non_finite_steps is {self.limit})",
                "Lower train.optimizer.lr (1e-5 for full-rank training), lengthen train.optimizer.warmup, set "
                "train.precision to float32, or train a LoRA (train.adapter.type=lora). The last checkpoint is "
                "older: training resumes from it with the new settings.",
            )
        return False


POWER = 2 / 3  # exponent of the warm-up "power"
Parameters = Mapping[str, torch.nn.Parameter]


def ema_decay(settings: EMA, updates: int) -> float:
    """The decay of an update that follows `updates` earlier updates; the first update copies the weights. The formulas
    are from diffusers' EMAModel: "ratio" is its default, "power" its use_ema_warmup."""
    if updates == 0:
        return 0.0
    warm = {"ratio": (1 + updates) / (10 + updates), "power": 1 - (1 + updates) ** -POWER, "none": 1.0}
    return min(settings.decay, warm[settings.warmup])


class MovingAverage:
    """Exponential moving average of the trained weights.

    averages: name -> float32 average, on the parameter's device or on the CPU. updates: number of updates done.
    """

    def __init__(self, trainable: Parameters, settings: EMA) -> None:
        self.settings, self.updates = settings, 0
        device = torch.device("cpu") if settings.device == "cpu" else None
        self.averages = {
            name: weight.detach().to(device, torch.float32, copy=True) for name, weight in trainable.items()
        }

    @torch.no_grad()
    def update(self, trainable: Parameters, finite: torch.Tensor | None = None) -> None:
        """average = decay * average + (1 - decay) * weight.

        finite: () on the weights' device; 0 after a step that the device skipped: the averages do not change, and
            the caller corrects `updates` once the host has read `finite`.
        """
        share: float | torch.Tensor = 1 - ema_decay(self.settings, self.updates)
        share = share if finite is None else share * finite
        self.updates += 1
        for name, weight in trainable.items():
            average = self.averages[name]
            value = local(weight.detach())
            local(average).lerp_(value.to(average.device, average.dtype), share)


def name_weights(optimizer: torch.optim.Optimizer, average: MovingAverage | None) -> str:
    """The name of the weights that are validated and saved: the moving average if there is one, the average of a
    schedule-free optimizer, or the trained weights."""
    if average is not None:
        return "ema"
    return "schedule-free average" if averages_weights(optimizer) else "trained"


@contextmanager
def inference_weights(
    trainable: Parameters, optimizer: torch.optim.Optimizer, average: MovingAverage | None
) -> Iterator[str]:
    """Context in which `trainable` holds the weights that `name_weights` names; yields that name.

    Afterwards `trainable` holds its previous weights again, bit for bit. A copy of them is kept on the CPU, because a
    schedule-free optimizer rounds when it switches back to train mode.
    """
    switch: Any = optimizer
    name = name_weights(optimizer, average)
    if name == "trained":
        yield name
        return
    originals = {name: local(weight.detach()).to("cpu", copy=True) for name, weight in trainable.items()}
    try:
        if average is not None:
            _copy(average.averages, trainable)
        else:
            switch.eval()
        yield name
    finally:
        if average is None:
            switch.train()
        _copy(originals, trainable)


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], trainable: Parameters) -> None:
    for name, weight in trainable.items():
        local(weight).copy_(local(values[name]))
