"""Learning rates, compared with the schedulers of torch, diffusers and transformers; steps that are not finite."""

import diffusers.optimization
import pytest
import torch
import transformers.optimization

from schemas.config.training import Optimizer
from trainer.setup.optimizers import BadStepCounter, DivergedError, learning_rate, set_learning_rate

STEPS, WARMUP = 47, 6


def rates(**settings) -> list[float]:
    config = Optimizer(lr=0.5, warmup=WARMUP, **settings)
    return [learning_rate(config, step, STEPS) for step in range(STEPS)]


def of_library(scheduler, *arguments, **options) -> list[float]:
    """The rates that a scheduler sets for each of STEPS steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    helpers, result = scheduler(optimizer, *arguments, **options), []
    for _ in range(STEPS):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        helpers.step()
    return result


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)


@pytest.mark.parametrize("library", [diffusers.optimization, transformers.optimization])
@pytest.mark.parametrize(
    ("settings", "name", "options"),
    [
        ({"schedule": "constant"}, "get_constant_schedule_with_warmup", {}),
        ({"schedule": "linear"}, "get_linear_schedule_with_warmup", {"num_training_steps": STEPS}),
        ({"schedule": "cosine"}, "get_cosine_schedule_with_warmup", {"num_training_steps": STEPS}),
        (
            {"schedule": "polynomial", "power": 1.7, "lr_end": 0.01},
            "get_polynomial_decay_schedule_with_warmup",
            {"num_training_steps": STEPS, "power": 1.7, "lr_end": 0.01},
        ),
        (
            {"schedule": "cosine", "cycles": 3},
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            {"num_training_steps": STEPS, "num_cycles": 3},
        ),
    ],
)
def test_schedules_are_those_of_diffusers_and_transformers(library, settings, name, options) -> None:
    """From the end of the warm-up; the libraries begin with a step at rate 0, so they are one step behind."""
    result, theirs = rates(**settings), of_library(getattr(library, name), WARMUP, **options)
    assert result[WARMUP:] == pytest.approx(theirs[WARMUP:], rel=1e-9)
    assert result[: WARMUP - 1] == pytest.approx(theirs[1:WARMUP], rel=1e-9)


def test_schedules_are_those_of_torch() -> None:
    schedulers = torch.optim.lr_scheduler
    assert rates()[:WARMUP] == pytest.approx(of_library(warm_up)[:WARMUP])
    remaining = STEPS - WARMUP
    cosine = of_library(schedulers.CosineAnnealingLR, remaining, eta_min=0.02)
    assert rates(schedule="cosine", lr_end=0.02)[WARMUP:] == pytest.approx(cosine[:remaining])
    linear = of_library(schedulers.LinearLR, 1.0, 0.2, remaining)
    assert rates(schedule="linear", lr_end=0.1)[WARMUP:] == pytest.approx(linear[:remaining])
    restarts = of_library(schedulers.CosineAnnealingWarmRestarts, 20, eta_min=0.02)
    config = Optimizer(lr=0.5, warmup=0, schedule="cosine", cycles=2, lr_end=0.02)
    assert [learning_rate(config, step, 40) for step in range(40)] == pytest.approx(restarts[:40])
    polynomial = of_library(schedulers.PolynomialLR, remaining, 3.0)
    assert rates(schedule="polynomial", power=3.0)[WARMUP:] == pytest.approx(polynomial[:remaining])


def test_groups_follow_the_schedule_from_their_own_rates() -> None:
    config = Optimizer(lr=0.5, warmup=2, schedule="linear")
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [
        {"params": [weight], "lr": lr, "initial_lr": lr} for weight, lr in zip(weights, (0.5, 2.0, 0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    for step in range(6):
        rate = set_learning_rate(optimizer, config, step, 6)
        assert rate == learning_rate(config, step, 6)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, 4 * rate, 0])


def test_bad_steps_are_counted_and_end_the_run() -> None:
    counter = BadStepCounter(2)
    assert counter.check(0, 1.0, 1.0)
    assert not counter.check(1, float("nan"), 1.0)
    assert not counter.check(2, 1.0, float("inf"))
    assert not counter.check(150, float("nan"), 1.0), "old steps do not count"
    assert counter.total == 3
    counter.check(151, float("nan"), 1.0)
    with pytest.raises(DivergedError, match="3 of the last 100"):
        counter.check(152, float("nan"), 1.0)
    with pytest.raises(DivergedError, match=r"learning rate|train\.optimizer\.lr"):
        BadStepCounter(0).check(0, float("nan"), 1.0)
