"""Losses by bucket and noise level, and the gradient noise scale of a problem whose own is known."""

import math

import pytest
import torch
from accelerate import Accelerator

from trainer.step_metrics import GradientNoise, StepLosses, StepNumbers


def noise_of(
    batch_size: int, accumulate: int, steps: int, first: torch.Tensor, deviation: float, every: int = 1
) -> list[float]:
    """The metric after each step, of samples whose gradients are `first` plus normal noise of this deviation."""
    weight = torch.nn.Parameter(torch.zeros_like(first))
    measured = GradientNoise(torch.nn.ParameterList([weight]), batch_size, accumulate, ranks=1, every=every)
    generator, found = torch.Generator().manual_seed(0), []
    for step in range(steps):
        measured.begin(step)
        losses = StepLosses({"64x64": accumulate}, batch_size, torch.device("cpu"))
        for _ in range(accumulate):
            gradients = first + deviation * torch.randn(batch_size, len(first), generator=generator)
            loss_B = gradients @ weight
            (loss_B.sum() / (batch_size * accumulate)).backward()
            losses.add("64x64", torch.zeros(batch_size), loss_B.detach())
        sums = losses.reduce(Accelerator(cpu=True), measured.take_squares(torch.device("cpu")))
        numbers = StepNumbers(step, losses, sums, weight.grad.norm(), {})
        _, squares, norm = numbers.read()
        found.append(measured.update(norm, squares).get("gradient_noise_scale", math.nan))
        weight.grad = None
    return found


@pytest.mark.long
@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 2), (4, 3)])
def test_the_noise_scale_is_the_trace_of_the_covariance_over_the_squared_gradient(batch_size, accumulate) -> None:
    first = torch.full((200,), 0.1)  # |G|^2 is 2, tr(S) 200 x 0.09
    found = noise_of(batch_size, accumulate, 500, first, 0.3)
    assert torch.tensor(found[200:]).mean().item() == pytest.approx(9, rel=0.1)


def test_every_third_step_is_measured_and_none_of_one_micro_batch() -> None:
    assert all(map(math.isnan, noise_of(4, 1, 3, torch.ones(5), 0.1)))
    found = noise_of(4, 2, 7, torch.ones(5), 0.1, every=3)
    assert [math.isfinite(scale) for scale in found] == [True, False, False, True, False, False, True]


def test_losses_are_means_by_bucket_and_quarter() -> None:
    losses = StepLosses({"64x64": 2, "96x64@5": 1}, 2, torch.device("cpu"))
    losses.add("64x64", torch.tensor([0.0, 0.9]), torch.tensor([1.0, 2.0]))
    losses.add("96x64@5", torch.tensor([0.25, 0.1]), torch.tensor([5.0, 6.0]))
    losses.add("64x64", torch.tensor([1.0, 0.24]), torch.tensor([3.0, 5.0]))
    found, _ = losses.describe(losses.reduce(Accelerator(cpu=True), torch.zeros(1)).tolist())
    assert found["loss"] == pytest.approx(22 / 6)
    assert found["loss_by_bucket"] == pytest.approx({"64x64": 11 / 4, "96x64@5": 11 / 2})
    assert found["loss_by_sigma"] == pytest.approx({"0-0.25": 4.0, "0.25-0.5": 5.0, "0.75-1": 2.5})


def test_a_loss_that_is_not_finite_is_told_where_it_was() -> None:
    losses = StepLosses({"64x64": 1, "96x64": 1}, 2, torch.device("cpu"))
    losses.add("64x64", torch.tensor([0.1, 0.9]), torch.tensor([1.0, math.nan]))
    losses.add("96x64", torch.tensor([0.1, 0.1]), torch.tensor([2.0, 3.0]))
    sums = losses.reduce(Accelerator(cpu=True), torch.zeros(1))
    assert StepNumbers(0, losses, sums, torch.tensor(1.0), {}).finite == 0
    found, _ = losses.describe(sums.tolist())
    assert math.isnan(found["loss"]) and math.isnan(found["loss_by_bucket"]["64x64"])
    assert found["loss_by_bucket"]["96x64"] == 2.5 and found["loss_by_sigma"]["0-0.25"] == 2.0
