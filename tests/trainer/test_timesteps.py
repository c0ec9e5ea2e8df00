"""Noise levels against the formulas as diffusers and SciPy have them."""

from typing import get_args

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from scipy import stats

from schemas.config.methods import Timesteps
from trainer.flow import shift_sigma
from trainer.run.run_state import shift_by_tokens
from trainer.timesteps import TIMESTEP_SAMPLING, sample_sigma, spread_uniform

UNIFORM = torch.rand(20000, generator=torch.Generator().manual_seed(0))
SIGMAS = np.linspace(0.01, 0.99, 99)


def cumulative(settings: Timesteps, sigma: np.ndarray) -> np.ndarray:
    """The share of sigma below each, of evenly spread draws."""
    drawn = sample_sigma((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000, settings, 1.0)
    return np.searchsorted(np.sort(drawn.double().numpy()), sigma) / len(drawn)


def test_the_configuration_names_what_there_is() -> None:
    assert get_args(Timesteps.model_fields["sampling"].annotation) == tuple(TIMESTEP_SAMPLING)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mean": -0.5, "std": 0.6},
        {"sampling": "uniform"},
        {"sampling": "mode"},
        {"sampling": "mode", "mode_scale": -0.7},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_diffusers(given: dict) -> None:
    settings = Timesteps(**given)
    scheme = {"uniform": "none"}.get(settings.sampling, settings.sampling)
    arguments = (settings.mean, settings.std, settings.mode_scale, "cpu", torch.Generator().manual_seed(1))
    theirs = compute_density_for_timestep_sampling(scheme, 20000, *arguments)
    assert stats.ks_2samp(sample_sigma(UNIFORM, settings, 1.0).numpy(), theirs.numpy()).pvalue > 1e-3


def test_the_distribution_is_that_of_scipy() -> None:
    for alpha, beta in ((2.0, 2.0), (0.5, 3.0), (6.0, 1.0)):
        found = cumulative(Timesteps(sampling="beta", alpha=alpha, beta=beta), SIGMAS)
        np.testing.assert_allclose(found, stats.beta(alpha, beta).cdf(SIGMAS), atol=2e-5)
    logit = np.log(SIGMAS / (1 - SIGMAS))
    found = cumulative(Timesteps(mean=0.4, std=0.7), SIGMAS)
    np.testing.assert_allclose(found, stats.norm(0.4, 0.7).cdf(logit), atol=2e-5)


def test_a_list_is_drawn_equally_often_and_is_not_shifted() -> None:
    settings = Timesteps(sampling="list", values=[0.25, 1.0, 0.25, 0.5])
    drawn = sample_sigma(torch.tensor([0.0, 0.24, 0.25, 0.5, 0.75, 1.0]), settings, 3.0)
    assert drawn.tolist() == [0.25, 0.25, 1.0, 0.25, 0.5, 0.5]
    assert np.bincount((4 * sample_sigma(UNIFORM, settings, 3.0)).long()) / 20000 == pytest.approx(
        [0, 0.5, 0.25, 0, 0.25], abs=0.02
    )


def test_the_shift_is_applied_to_the_draw() -> None:
    middle, plain = torch.tensor([0.5]), Timesteps()
    assert sample_sigma(middle, plain, 3.0).item() == pytest.approx(0.75)
    assert torch.equal(shift_sigma(UNIFORM, 3.0), sample_sigma(UNIFORM, Timesteps(sampling="uniform"), 3.0))
    for name in TIMESTEP_SAMPLING:
        settings = Timesteps(sampling=name, values=[0.0, 1.0] if name == "list" else [])
        ends = sample_sigma(torch.tensor([0.0, 1 - 2**-24, 1.0]), settings, 3.0)
        assert ends.isfinite().all() and 0 <= ends.min() < ends.max() <= 1, name


def test_the_shift_by_tokens_is_that_of_the_flux_pipeline_and_its_scheduler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigma = torch.linspace(0.05, 1, 20, dtype=torch.float64)
    for tokens in (256, 1024, 1536, 4096):
        mu = calculate_shift(tokens)
        assert shift_by_tokens(tokens) == pytest.approx(np.exp(mu), rel=1e-12)
        scheduler.set_timesteps(sigmas=sigma.numpy(), mu=mu)
        ours = shift_sigma(sigma, shift_by_tokens(tokens))
        torch.testing.assert_close(
            ours.float().sort(descending=True)[0], scheduler.sigmas[:-1].sort(descending=True)[0]
        )
    assert shift_by_tokens(64) == shift_by_tokens(256) and shift_by_tokens(24_576) == shift_by_tokens(4096)
    assert shift_by_tokens(24_576) == pytest.approx(3.158, abs=1e-3) and np.exp(calculate_shift(24_576)) > 99


def spread(step: int, count: int, seed: int = 0) -> np.ndarray:
    return spread_uniform(seed, step, np.arange(count), count).double().numpy()


def test_spread_draws_have_low_discrepancy_in_a_batch_and_over_steps() -> None:
    for count in (1, 2, 7, 64):
        for step in (0, 3, 10**9 - 1):
            parts = np.floor(spread(step, count) * count).astype(int)
            assert sorted(parts) == list(range(count)), "one draw in each part"
    for steps, count in ((1024, 1), (128, 8)):
        drawn = np.concatenate([spread(step, count) for step in range(steps)])
        random = np.random.default_rng(0).random((20, steps * count))
        discrepancy = [stats.kstest(draws, "uniform", method="asymp").statistic for draws in (drawn, *random)]
        assert discrepancy[0] < 0.006 and min(discrepancy[1:]) > 0.012, "the star discrepancy, of 1024 draws"


def test_spread_draws_are_uniform_at_every_position_and_depend_on_nothing_else() -> None:
    drawn = np.array([spread(5, 4, seed) for seed in range(300)])
    for position in range(4):
        assert stats.kstest(drawn[:, position], "uniform", method="asymp").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 3])[0, 1] + 1 / 3) < 0.15, "parts are a random permutation"
    whole = spread_uniform(1, 2, np.arange(12), 12)
    assert torch.equal(whole[4:7], spread_uniform(1, 2, np.arange(4, 7), 12))
    orders = {tuple(np.argsort(spread(step, 6))) for step in range(30)}
    assert len(orders) > 20
