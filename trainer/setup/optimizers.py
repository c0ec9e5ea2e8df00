"""The optimizer: its class by name, its parameter groups, and whether it works, tried before a model is loaded."""

import importlib
import inspect
import io
import re
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from typing import Any

import torch

from schemas.config.pipeline import Config
from schemas.config.training import Optimizer
from schemas.optimizers import DISTRIBUTIONS, OPTIMIZERS, find_optimizer
from trainer.optimizer_state import collect
from trainer.run_state import RunError, train_precision

TRIAL_SHAPE = (64, 64)  # the smallest that bitsandbytes keeps in 8 bits


def check_optimizer(config: Config, device: torch.device) -> None:
    """Take a step on small parameters. RunError where the optimizer is not installed, can't be made as configured,
    does not run on the device, or does not go with other settings; OptimizerStateError where a checkpoint can't hold
    its state."""
    settings, pure = config.train.optimizer, config.train.weight_precision == "bfloat16"
    found = find_class(settings.name)
    parameters = inspect.signature(found.__init__).parameters
    if pure and ("kahan_sum" not in parameters or settings.arguments.get("kahan_sum", True) is False):
        raise RunError(
            f"train.weight_precision bfloat16 needs Kahan summation, and {settings.name} has none: steps of 1e-5 "
            "vanish in bfloat16 weights",
            "Set train.optimizer.name to optimi-adamw or optimi-lion, or train.weight_precision to float32.",
        )
    if pure and train_precision(config) != "bfloat16":
        raise RunError(
            "train.weight_precision is bfloat16 and the transformer computes in float32",
            "Set train.precision to bfloat16, or train.weight_precision to float32.",
        )
    weights = {
        f"{number}.weight": torch.nn.Parameter(
            torch.ones(TRIAL_SHAPE, dtype=torch.bfloat16 if pure else None, device=device)
        )
        for number in range(len(settings.groups) + 1)
    }
    groups = [
        {"params": [weight], **options}
        for weight, options in zip(weights.values(), [*_options(settings), {}], strict=True)
    ]
    try:
        optimizer = _make(found, groups, settings)
        for weight in weights.values():
            weight.grad = torch.full_like(weight, 1e-3)
        optimizer.step()
    except (TypeError, ValueError, RuntimeError, ImportError, AttributeError, AssertionError, KeyError) as error:
        raise RunError(
            f"train.optimizer: {settings.name} does not work on {device.type} with these settings: "
            f"{str(error) or type(error).__name__}",
            "Correct train.optimizer and its arguments, or choose another train.optimizer.name.",
        ) from error
    collect(weights, optimizer)
    if config.train.ema is not None and averages_weights(optimizer):
        raise RunError(
            f"{settings.name} averages the weights itself, and train.ema would average them twice",
            "Leave train.ema out.",
        )


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of a name or dotted path. RunError where it is not installed or no optimizer."""
    module, _, attribute = find_optimizer(name).path.rpartition(".")
    package = module.partition(".")[0]
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        where = "'latentpress[optimizers]', or " if name in OPTIMIZERS else ""
        raise RunError(
            f"train.optimizer.name {name} needs {module}, which can't be imported: {error}",
            f"pip install {where}{DISTRIBUTIONS.get(package, package)}, or choose another train.optimizer.name.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        classes = sorted(
            key
            for key, value in vars(importlib.import_module(module)).items()
            if isinstance(value, type)
            and issubclass(value, torch.optim.Optimizer)
            and value is not torch.optim.Optimizer
        )
        raise RunError(
            f"train.optimizer.name: {module} has no optimizer {attribute!r}; it has {', '.join(classes) or 'none'}",
            "Name a class of it, or one of " + ", ".join(OPTIMIZERS) + ".",
        )
    return found


def make_optimizer(trainable: Mapping[str, torch.nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer over `trainable` (name -> parameter), in training mode where it has one. RunError for a group that
    matches no parameter."""
    chosen: list[list[torch.nn.Parameter]] = [[] for _ in (*settings.groups, "the others")]
    for name, weight in trainable.items():
        matches = (number for number, group in enumerate(settings.groups) if re.fullmatch(group.match, name))
        chosen[next(matches, -1)].append(weight)
    for group, weights in zip(settings.groups, chosen, strict=False):
        if not weights:
            again = any(re.fullmatch(group.match, name) for name in trainable)
            why = "only parameters that an earlier group matches" if again else "no parameter that is trained"
            shown = f"{', '.join(list(trainable)[:4])}, ... ({len(trainable)} in all)"
            raise RunError(
                f"train.optimizer.groups: {group.match!r} matches {why}; trained are {shown}",
                "Correct the regular expression, which must match whole names, or remove the group.",
            )
    groups = [
        {"params": weights, **options}
        for weights, options in zip(chosen, [*_options(settings), {}], strict=True)
        if weights
    ]
    return _make(find_class(settings.name), groups, settings)


def averages_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has modes for training and inference, as schedule-free optimizers have."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _options(settings: Optimizer) -> list[dict[str, Any]]:
    """Of each group its own settings, as keys of a parameter group."""
    return [group.model_dump(include={"lr", "weight_decay"}, exclude_none=True) for group in settings.groups]


def _make(
    found: type[torch.optim.Optimizer], groups: Iterable[dict[str, Any]], settings: Optimizer
) -> torch.optim.Optimizer:
    given = settings.model_dump(include={"lr", "betas", "eps", "weight_decay"}, exclude_none=True)
    arguments = {**find_optimizer(settings.name).arguments, **given, **settings.arguments}
    with redirect_stdout(io.StringIO()):  # prodigyopt prints
        optimizer: Any = found(list(groups), **arguments)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    if averages_weights(optimizer):
        optimizer.train()
    return optimizer
