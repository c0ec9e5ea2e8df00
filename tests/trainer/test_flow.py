"""Flow matching, its losses, the choice and the weights of noise levels, compared with diffusers, SciPy and the
formulas in float64."""

import math

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from schemas.config.methods import Loss, Timesteps
from schemas.family import ShiftByTokens
from trainer.flow import (
    TIMESTEP_SAMPLING,
    error_function,
    interpolate,
    loss_per_sample,
    loss_weight,
    sample_sigma,
    shift_sigma,
    spread_uniform,
    velocity,
)

unit = st.floats(0, 1)
shifts = st.floats(0.1, 20)
UNIFORM = torch.rand(20000, generator=torch.Generator().manual_seed(0))
SIGMAS = np.linspace(0.01, 0.99, 99)


def double(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@given(unit, shifts)
def test_shift_keeps_the_interval_and_is_undone_by_its_inverse(u, shift):
    shifted = shift_sigma(double(u), shift)
    assert 0 <= shifted.item() <= 1 + 1e-12
    assert shift_sigma(shifted, 1 / shift).item() == pytest.approx(u, abs=1e-9)


def test_interpolation_ends_at_data_and_noise_and_its_slope_is_the_velocity():
    x0, noise = torch.randn(2, 3, 4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.0, 1.0, 0.25])
    mixed = interpolate(x0, noise, sigma)
    assert torch.equal(mixed[0], x0[0])
    assert torch.equal(mixed[1], noise[1])
    torch.testing.assert_close(mixed[2], x0[2] + 0.25 * velocity(x0, noise)[2])


def test_loss_is_each_samples_own_mean_without_given_frames():
    target = torch.zeros(2, 1, 3, 2, 2)
    prediction = target.clone()
    prediction[0, :, 0] = 100.0
    prediction[1, :, 1:] = 2.0
    assert loss_per_sample(prediction, target, skip_frames=1).tolist() == [0.0, 4.0]
    assert loss_per_sample(prediction, target)[0].item() == pytest.approx(10000 / 3)
    with pytest.raises(ValueError, match="longer clips"):
        loss_per_sample(torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 2, 2), skip_frames=1)


SIGMA = torch.linspace(0, 1, 1001)


def weights(**arguments) -> torch.Tensor:
    return loss_weight(Loss(**arguments), SIGMA)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("name", ["mse", "huber", "smooth_l1"])
def test_losses_are_their_formulas(name: str, schedule: str) -> None:
    """2 c (sqrt(e^2 + c^2) - c), for smooth_l1 divided by c; errors from 1e-4 to 1e3 at five noise levels."""
    options = {} if name == "mse" else {"huber_c": 0.3, "huber_schedule": schedule}
    sigma = np.array([0.0, 0.2, 0.5, 0.9, 1.0], np.float32)
    errors = np.float32(10.0) ** np.linspace(-4, 3, 60, dtype=np.float32) * np.float32([[1], [-1], [1], [-1], [1]])
    result = error_function(Loss(type=name, **options), torch.from_numpy(sigma))(torch.from_numpy(errors)[:, None])[
        :, 0
    ]
    sigma, e = sigma.astype(np.longdouble), errors.astype(np.longdouble)
    with np.errstate(divide="ignore"):
        ratio = sigma / (1 - sigma)  # ratio of noise to signal; infinite at noise
    c = {"constant": 0.3 + 0 * sigma, "exponential": 0.3**sigma, "snr": 0.7 / (1 + ratio) ** 2 + 0.3}[schedule][:, None]
    c = np.float32(c).astype(np.longdouble)
    expected = {"mse": e**2, "huber": 2 * c * (np.sqrt(e**2 + c**2) - c), "smooth_l1": 2 * (np.sqrt(e**2 + c**2) - c)}
    np.testing.assert_allclose(result.numpy(), expected[name].astype(np.float64), rtol=3e-6)


@pytest.mark.parametrize("name", ["none", "cosmap", "sigma_sqrt"])
def test_weights_are_those_of_diffusers(name: str) -> None:
    sigma = SIGMA[1:] if name == "sigma_sqrt" else SIGMA  # infinite at 0
    torch.testing.assert_close(loss_weight(Loss(weighting=name), sigma), compute_loss_weighting_for_sd3(name, sigma))
    assert weights(weighting=name).isfinite().all()


def test_the_bell_is_that_of_a_table_of_1000_timesteps() -> None:
    """As DiffSynth-Studio and ai-toolkit compute it: smallest 0, mean 1; the half bell is flat below its top."""
    x = torch.arange(1000, dtype=torch.float64)
    y = torch.exp(-2 * ((x - 500) / 1000) ** 2)
    table = (y - y.min()) * 1000 / (y - y.min()).sum()
    result = weights(weighting="bell")[:1000].double()
    torch.testing.assert_close(result, table, atol=2e-3, rtol=0)
    half = weights(weighting="half_bell").double()
    assert torch.equal(half[500:], weights(weighting="bell").double()[500:]) and bool((half[:500] == half.max()).all())
    assert half.max().item() == pytest.approx(table.max().item(), abs=2e-3) and half[-1].item() == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize("gamma", [0.5, 5.0])
def test_min_snr_is_that_of_the_predicted_x0(gamma: float) -> None:
    """min(SNR, gamma) times the squared error of x0, where x0 is computed from the predicted velocity."""
    generator = torch.Generator().manual_seed(0)
    x0, noise, errors = torch.randn(3, 9, 2, 1, 3, 3, dtype=torch.float64, generator=generator)
    sigma = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)
    noisy, predicted = interpolate(x0, noise, sigma), velocity(x0, noise) + errors
    predicted_x0 = noisy - sigma.view(-1, 1, 1, 1, 1) * predicted
    snr = ((1 - sigma) / sigma).square()
    expected = snr.clamp(max=gamma) * (predicted_x0 - x0).square().flatten(1).mean(1)
    settings = Loss(weighting="min_snr", snr_gamma=gamma)
    result = loss_weight(settings, sigma) * loss_per_sample(predicted, velocity(x0, noise))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)
    at = 1 / (1 + math.sqrt(gamma))
    assert loss_weight(settings, SIGMA).max().item() == pytest.approx((1 - at) ** 2, rel=2e-3)


def cumulative(settings: Timesteps, sigma: np.ndarray) -> np.ndarray:
    """The share of evenly spread draws whose sigma is below each value."""
    draws = sample_sigma((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000, settings, 1.0)
    return np.searchsorted(np.sort(draws.double().numpy()), sigma) / len(draws)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mean": -0.5, "std": 0.6},
        {"sampling": "uniform"},
        {"sampling": "mode"},
        {"sampling": "mode", "mode_scale": -0.7},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_diffusers(options: dict) -> None:
    settings = Timesteps(**options)
    scheme = {"uniform": "none"}.get(settings.sampling, settings.sampling)
    arguments = (settings.mean, settings.std, settings.mode_scale, "cpu", torch.Generator().manual_seed(1))
    theirs = compute_density_for_timestep_sampling(scheme, 20000, *arguments)
    assert stats.ks_2samp(sample_sigma(UNIFORM, settings, 1.0).numpy(), theirs.numpy()).pvalue > 1e-3


def test_the_distribution_is_that_of_scipy() -> None:
    for alpha, beta in ((2.0, 2.0), (0.5, 3.0), (6.0, 1.0)):
        result = cumulative(Timesteps(sampling="beta", alpha=alpha, beta=beta), SIGMAS)
        np.testing.assert_allclose(result, stats.beta(alpha, beta).cdf(SIGMAS), atol=2e-5)
    logit = np.log(SIGMAS / (1 - SIGMAS))
    result = cumulative(Timesteps(mean=0.4, std=0.7), SIGMAS)
    np.testing.assert_allclose(result, stats.norm(0.4, 0.7).cdf(logit), atol=2e-5)


def test_a_list_is_drawn_equally_often_and_is_not_shifted() -> None:
    settings = Timesteps(sampling="list", values=[0.25, 1.0, 0.25, 0.5])
    draws = sample_sigma(torch.tensor([0.0, 0.24, 0.25, 0.5, 0.75, 1.0]), settings, 3.0)
    assert draws.tolist() == [0.25, 0.25, 1.0, 0.25, 0.5, 0.5]
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
    scheduler, shift_by_tokens = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), ShiftByTokens()
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
    unclamped = ShiftByTokens(clamped=False)
    for tokens in (64, 4096, 6889):  # 1328x1328 pixels
        assert unclamped(tokens) == pytest.approx(np.exp(calculate_shift(tokens)), rel=1e-12)


def spread(step: int, count: int, seed: int = 0) -> np.ndarray:
    return spread_uniform(seed, step, np.arange(count), count).double().numpy()


def test_spread_draws_have_low_discrepancy_in_a_batch_and_over_steps() -> None:
    for count in (1, 2, 7, 64):
        for step in (0, 3, 10**9 - 1):
            parts = np.floor(spread(step, count) * count).astype(int)
            assert sorted(parts) == list(range(count)), "one draw in each part"
    batch = spread_uniform(1, 2, np.arange(12), 12)
    assert torch.equal(batch[4:7], spread_uniform(1, 2, np.arange(4, 7), 12)), "whichever part of a batch is drawn"
    for steps, count in ((1024, 1), (128, 8)):
        spread_draws = np.concatenate([spread(step, count) for step in range(steps)])
        random = np.random.default_rng(0).random((20, steps * count))
        discrepancy = [stats.kstest(draws, "uniform", method="asymp").statistic for draws in (spread_draws, *random)]
        assert discrepancy[0] < 0.006 and min(discrepancy[1:]) > 0.012, "the star discrepancy, of 1024 draws"


@pytest.mark.parametrize("within", [(0.875, 1.0), (0.0, 0.875), (0.3, 0.6)])
@pytest.mark.parametrize("sampling", ["logit_normal", "uniform", "mode", "beta"])
def test_a_restricted_distribution_is_the_whole_one_under_that_condition(sampling, within) -> None:
    """Its quantiles equal the quantiles of the unrestricted draws that are in the range."""
    settings, lowest, highest = Timesteps(sampling=sampling), *within
    every = (torch.arange(200_000) + 0.5) / 200_000
    draws = sample_sigma(every, settings, 3.0)
    in_range = draws[(draws >= lowest) & (draws < highest)].sort().values
    places = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])
    sigma = sample_sigma(places, settings, 3.0, within).sort().values
    assert sigma.min() >= lowest and (sigma.max() < highest or highest == 1)
    expected = in_range[
        (torch.sort(places if draws[0] < draws[-1] else 1 - places).values * (len(in_range) - 1)).long()
    ]
    torch.testing.assert_close(sigma, expected, rtol=0, atol=2e-4)
    assert torch.equal(sample_sigma(every[::1000], settings, 3.0, (0.0, 1.0)), draws[::1000])


def test_of_a_list_the_values_in_the_range_are_drawn() -> None:
    settings = Timesteps(sampling="list", values=(0.1, 0.875, 0.95, 1.0))
    sigma = sample_sigma(torch.linspace(0, 1, 9), settings, 3.0, (0.875, 1.0))
    assert sorted({*sigma.tolist()}) == pytest.approx([0.875, 0.95, 1.0])
    assert (sample_sigma(torch.linspace(0, 1, 9), settings, 3.0, (0.0, 0.875)) == torch.tensor(0.1)).all()
