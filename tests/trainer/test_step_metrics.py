"""Losses by bucket and noise level."""

import math

import pytest
import torch
from accelerate import Accelerator

from trainer.train import StepLosses, StepNumbers


def test_losses_are_means_by_bucket_and_quarter() -> None:
    losses = StepLosses({"64x64": 2, "96x64@5": 1}, 2, torch.device("cpu"))
    losses.add("64x64", torch.tensor([0.0, 0.9]), torch.tensor([1.0, 2.0]))
    losses.add("96x64@5", torch.tensor([0.25, 0.1]), torch.tensor([5.0, 6.0]))
    losses.add("64x64", torch.tensor([1.0, 0.24]), torch.tensor([3.0, 5.0]))
    result = losses.describe(losses.reduce(Accelerator(cpu=True)).tolist())
    assert result["loss"] == pytest.approx(22 / 6)
    assert result["loss_by_bucket"] == pytest.approx({"64x64": 11 / 4, "96x64@5": 11 / 2})
    assert result["loss_by_sigma"] == pytest.approx({"0-0.25": 4.0, "0.25-0.5": 5.0, "0.75-1": 2.5})


def test_a_loss_that_is_not_finite_is_told_where_it_was() -> None:
    losses = StepLosses({"64x64": 1, "96x64": 1}, 2, torch.device("cpu"))
    losses.add("64x64", torch.tensor([0.1, 0.9]), torch.tensor([1.0, math.nan]))
    losses.add("96x64", torch.tensor([0.1, 0.1]), torch.tensor([2.0, 3.0]))
    sums = losses.reduce(Accelerator(cpu=True))
    assert StepNumbers(0, losses, sums, torch.tensor(1.0), {}).is_finite == 0
    result = losses.describe(sums.tolist())
    assert math.isnan(result["loss"]) and math.isnan(result["loss_by_bucket"]["64x64"])
    assert result["loss_by_bucket"]["96x64"] == 2.5 and result["loss_by_sigma"]["0-0.25"] == 2.0
