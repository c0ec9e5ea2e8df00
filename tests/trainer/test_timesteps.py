"""Noise levels and weights of the loss, against the formulas as diffusers and SciPy have them."""

from typing import get_args

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from scipy import stats

from schemas.config.training import Train
from trainer.flow import shift_sigma
from trainer.timesteps import LOSS_WEIGHTING, TIMESTEP_SAMPLING, sample_sigma

UNIFORM = torch.rand(20000, generator=torch.Generator().manual_seed(0))


def test_the_configuration_names_what_there_is() -> None:
    for option, table in (("timestep_sampling", TIMESTEP_SAMPLING), ("loss_weighting", LOSS_WEIGHTING)):
        assert get_args(Train.model_fields[option].annotation) == tuple(table)


@pytest.mark.parametrize("name", TIMESTEP_SAMPLING)
def test_the_distribution_is_that_of_diffusers(name: str) -> None:
    scheme = {"uniform": "none"}.get(name, name)
    generator = torch.Generator().manual_seed(1)
    theirs = compute_density_for_timestep_sampling(scheme, 20000, 0.0, 1.0, 1.29, "cpu", generator)
    ours = sample_sigma(UNIFORM, name, 1.0)
    assert stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue > 1e-3


def test_the_shift_is_applied_to_the_draw() -> None:
    middle = torch.tensor([0.5])
    assert sample_sigma(middle, "logit_normal", 3.0).item() == pytest.approx(0.75)
    assert torch.equal(shift_sigma(UNIFORM, 3.0), sample_sigma(UNIFORM, "uniform", 3.0))
    ends = sample_sigma(torch.tensor([0.0, 1 - 2**-24]), "logit_normal", 3.0)
    assert ends.isfinite().all() and 0 <= ends[0] < ends[1] <= 1


@pytest.mark.parametrize("name", LOSS_WEIGHTING)
def test_weights_are_those_of_diffusers(name: str) -> None:
    sigma = torch.linspace(0, 1, 101)
    torch.testing.assert_close(LOSS_WEIGHTING[name](sigma), compute_loss_weighting_for_sd3(name, sigma))
