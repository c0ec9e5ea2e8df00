"""Moments in the shards: latents are drawn by position, for any rank, resumption and batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cache.order.schedule import BatchSchedule
from schemas.catalog import FAMILIES
from tests.trainer.runs import opened
from trainer.data import BatchLoader
from trainer.noise import sample_latents

FLUX = FAMILIES["kandinsky5-image"]


@pytest.fixture
def moments_set(make_set, helpers):
    """moments_set(config): a set of moments, and (mean, log-variance) of each sample. Log-variances are around -2, so
    that different noise is visible."""

    def make(config):
        items, null, prompts = helpers.mixed_items(config)
        rng, moments = np.random.default_rng(5), []
        for number, item in enumerate(items):
            logvar = rng.uniform(-3, -1, item.latent.shape).astype(np.float32)
            condition = item.condition
            if condition is not None:
                condition = np.concatenate([condition, np.full_like(condition, -1.0)])
            items[number] = replace(item, latent=np.concatenate([item.latent, logvar]), condition=condition)
            moments.append((item.bucket, item.latent, logvar))
        for prompt in prompts:
            if prompt.condition is not None:
                prompt.condition = np.concatenate([prompt.condition, np.full_like(prompt.condition, -1.0)])
        make_set(config, items, null, prompts)
        moments.sort(key=lambda row: row[0])
        return {f"set1-sample{number}": row[1:] for number, row in enumerate(moments)}

    return make


def drawn(config, steps: int, **options) -> list[dict]:
    """For each step: sample id -> (latent, condition)."""
    data = opened(config)
    feed = BatchLoader(data, BatchSchedule(data.spans, 3, 2, 4), 0.0, **options)
    result = []
    for step in range(steps):
        result.append({})
        for part in feed.step(step).micro_batches:
            conditions = part.batch.condition_BCTHW
            for i, name in enumerate(part.batch.ids):
                result[-1][name] = part.batch.latents_BCTHW[i], None if conditions is None else conditions[i]
    return result


def test_draws_have_the_mean_and_variance_of_the_moments() -> None:
    """Over 4,000 draws: each number within five standard errors of its mean and deviation."""
    rng = torch.Generator().manual_seed(1)
    mean = torch.randn(16, 1, 2, 3, generator=rng)
    logvar = torch.rand(16, 1, 2, 3, generator=rng) * 4 - 5
    moments, count = torch.cat([mean, logvar]), 4000
    draws = sample_latents(moments.expand(count, -1, -1, -1, -1), FLUX, [f"0/{step}/0/a" for step in range(count)])
    deviation = (logvar / 2).exp()
    assert ((draws.mean(0) - mean).abs() / deviation).max() < 5 / count**0.5
    assert (draws.std(0) / deviation - 1).abs().max() < 5 / (2 * count) ** 0.5
    noise = ((draws - mean) / deviation).flatten(1)
    assert noise[:-1].mul(noise[1:]).mean().abs() < 5 / noise.numel() ** 0.5, "each step has noise of its own"
    assert torch.equal(draws[[7]], sample_latents(moments[None], FLUX, ["0/7/0/a"]))


def test_moments_are_drawn_alike_while_reading_and_where_the_step_begins(make_config, moments_set) -> None:
    config = make_config("i2v")
    moments_set(config)
    data, family = opened(config), config.model.family_spec
    feeds = [
        BatchLoader(data, BatchSchedule(data.spans, 3, 2, 4), 0.5, draw_noise=draw_noise)
        for draw_noise in (True, False)
    ]
    for before, after in zip(*(feed.step(1).micro_batches for feed in feeds), strict=True):
        assert after.noise_BCTHW is None
        assert after.batch.latents_BCTHW.shape[1] == after.batch.condition_BCTHW.shape[1] == 2 * family.latent_channels
        before_on_cpu, after = before.draw("cpu", family), after.draw("cpu", family)
        assert torch.equal(before.uniform_B, after.uniform_B) and before.identities == after.identities
        for one in (before_on_cpu, after):
            assert torch.equal(before.noise_BCTHW, one.noise_BCTHW)
            for name, value in vars(before.batch).items():
                second_value = vars(one.batch)[name]
                assert torch.equal(value, second_value) if isinstance(value, torch.Tensor) else value == second_value, (
                    name
                )


@pytest.mark.parametrize("kind", ["t2i", "i2v"])
def test_every_step_draws_anew_and_ranks_draw_alike(make_config, moments_set, kind) -> None:
    config = make_config(kind)
    moments = moments_set(config)
    full, second = drawn(config, 6), drawn(config, 6)
    calls: dict[str, list[torch.Tensor]] = {}
    ranks = [drawn(config, 6, rank=rank, world=2) for rank in (0, 1)]
    for step, samples in enumerate(full):
        for name, (latent, condition) in samples.items():
            mean, logvar = map(torch.from_numpy, moments[name])
            noise = (latent - mean) / (logvar / 2).exp()
            assert latent.shape == mean.shape and abs(noise.std() - 1) < 0.1
            assert abs(noise.mean()) < 5 / noise.numel() ** 0.5
            pairs = second[step][name], (ranks[0][step] | ranks[1][step])[name]
            assert all(torch.equal(latent, second_value[0]) for second_value in pairs)
            if condition is not None:
                assert condition.shape[0] == config.model.family_spec.latent_channels
                assert all(torch.equal(condition, second_value[1]) for second_value in pairs)
                condition_noise = (condition - mean[:, :1]) / np.exp(-0.5)
                assert abs(condition_noise.std() - 1) < 0.1 and (condition_noise - noise[:, :1]).abs().max() > 1, (
                    "noise of its own"
                )
            calls.setdefault(name, []).append(latent)
    twice = [latents for latents in calls.values() if len(latents) > 1]
    assert twice and all((latents[0] - latents[1]).abs().max() > 0.1 for latents in twice)
