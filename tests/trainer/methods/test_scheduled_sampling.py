"""Scheduled sampling, compared with rollouts by diffusers' scheduler, sample by sample."""

from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from schemas.config.methods import ScheduledSampling
from schemas.identity import derive_seed
from tests.trainer.runs import move_adapter, prepared
from trainer import train as loop
from trainer.batch import Batch
from trainer.families.base import module_of
from trainer.methods.base import MethodStep
from trainer.methods.scheduled_sampling import ScheduledSamplingMethod


def draw(identity: str, purpose: str) -> float:
    return int(np.random.Philox(key=derive_seed(identity, purpose)).random_raw() >> 40) / 2**24


@torch.no_grad()
def roll_out(run, x0, noise, sigma, batch, steps: int, shift: float, of: int):
    """(x, sigma of its start) after this number of steps of diffusers' scheduler from noise towards data."""
    u = sigma / (shift - (shift - 1) * sigma)
    sigmas = [min(1.0, u + number / of) for number in range(steps, 0, -1)]
    sigmas = [shift * it / (1 + (shift - 1) * it) for it in sigmas]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=[*sigmas, sigma])
    x = (1 - sigmas[0]) * x0 + sigmas[0] * noise
    for t in scheduler.timesteps[:-1]:
        velocity = run.family.predict(run.model, x, (t / 1000).expand(1), batch, run.config.model.task)
        x = scheduler.step(velocity, t, x, return_dict=False)[0]
    return x, sigmas[0]


ADAPTERS = {"t2i": {"rank": 2, "dropout": 0.5, "init_weights": "olora"}, "i2v": {"rank": 2}, "sana": {"type": "full"}}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "correction"), [("t2i", 1.0), ("i2v", 0.5), ("sana", 0.0)])
def test_inputs_targets_and_loss_are_those_of_a_rollout_by_hand(
    make_config, make_set, helpers, kind, correction
) -> None:
    """Samples of several lengths in one batch, some of which are not rolled out; with masks for Sana."""
    settings = {"probability": 0.7, "max_step_offset": 3, "schedule_steps": 10, "correction": correction}
    config = make_config(
        kind,
        steps=1,
        batch_size=8,
        shift=3.0,
        timesteps={"sampling": "uniform"},
        caption_dropout=0.3,
        adapter=ADAPTERS[kind],
        methods={"scheduled_sampling": settings, **({"masked_loss": {}} if kind == "sana" else {})},
    )
    items, null, prompts = helpers.mixed_items(config)
    for number, item in enumerate(items if kind == "sana" else ()):
        item.mask = np.random.default_rng(number).random(item.latent.shape[1:], dtype=np.float32)
    make_set(config, items, null, prompts)
    run = prepared(config)
    if kind != "sana":
        move_adapter(run)
    [part] = run.loader.step(0).micro_batches
    step = loop.start_step(run, 0, part)
    line_BCTHW, straight_BCTHW = step.noisy_BCTHW, step.target_BCTHW
    before = torch.get_rng_state()
    run.methods["scheduled_sampling"].prepare(step)
    assert torch.equal(before, torch.get_rng_state()), "dropout was off"
    lengths, clean_frames = [], run.skip_frames
    run.model.eval()
    for row, identity in enumerate(part.identities):
        one = torch.tensor([row])
        batch, sigma = part.batch.select(one), step.sigma_B[row].item()
        x0, noise = part.batch.latents_BCTHW[one], part.noise_BCTHW[one]
        u = sigma / (3 - 2 * sigma)
        length = min(1 + int(3 * draw(identity, "scheduled_sampling/steps")), -int(-(1 - u) * 10 // 1))
        lengths.append(length if draw(identity, "scheduled_sampling") < 0.7 else 0)
        x, target = line_BCTHW[one], straight_BCTHW[one]
        if lengths[-1]:
            x, start = roll_out(run, x0, noise, sigma, batch, lengths[-1], 3.0, 10)
            x[:, :, :clean_frames] = line_BCTHW[one, :, :clean_frames]
            leading_to_x0 = (x - x0) / sigma - target
            target = target + correction * min(1.0, sigma / (start - sigma)) * leading_to_x0
            torch.testing.assert_close(step.noisy_BCTHW[one], x, atol=2e-3, rtol=0)
            assert (x - line_BCTHW[one])[:, :, clean_frames:].abs().max() > 0.02, "it is off the line"
        else:
            assert torch.equal(step.noisy_BCTHW[one], x)
        torch.testing.assert_close(step.target_BCTHW[one], target, atol=1e-2, rtol=1e-3)
    assert 0 in lengths and len({*lengths}) > 2
    if kind == "t2i":
        return  # its dropout makes the loss random
    with torch.no_grad():
        predicted = run.family.predict(run.model, step.noisy_BCTHW, step.sigma_B, step.batch, config.model.task)
    weight = part.batch.extras["mask"][:, None] if kind == "sana" else 1.0
    expected = (weight * (predicted - step.target_BCTHW)[:, :, clean_frames:].square()).mean().item()
    assert loop.finish_step(run, loop.train_step(run, run.loader.step(0)))["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_share_ramps_up_and_lengths_follow_the_strategy() -> None:
    linear, cosine, sudden = (
        ScheduledSamplingMethod(ScheduledSampling(probability=0.8, prob_start=0.2, start_step=10, **more))
        for more in ({"ramp_steps": 20}, {"ramp_steps": 20, "ramp_shape": "cosine"}, {})
    )
    assert [linear.probability(n) for n in (0, 10, 15, 20, 30, 99)] == pytest.approx([0.2, 0.2, 0.35, 0.5, 0.8, 0.8])
    assert [cosine.probability(n) for n in (10, 15, 20, 30)] == pytest.approx([0.2, 0.2 + 0.6 * 0.146447, 0.5, 0.8])
    assert [sudden.probability(n) for n in (9, 10, 11)] == [0.2, 0.8, 0.8]
    count = 2000
    ones = torch.ones(count, 1, 1, 1, 1)
    batch = Batch(ones, None, ones, ones.bool(), None, ["id"] * count, "8x8")
    u_B = torch.full((count,), 0.5)
    result = {}
    for strategy in ("uniform", "biased_early", "biased_late"):
        method = ScheduledSamplingMethod(ScheduledSampling(probability=0.5, max_step_offset=4, strategy=strategy))
        step = MethodStep(
            number=0, steps=1, model=None, family=module_of_sana(), task="t2i", predict=no_prediction, most_passes=int,
            batch=batch, noise_BCTHW=ones, sigma_B=u_B, host_sigma_B=u_B, shift=1.0,
            identities=[f"{number}" for number in range(count)],
        )  # fmt: skip
        lengths_B = method.draw_lengths(step)
        assert {*lengths_B.tolist()} == {0, 1, 2, 3, 4}
        assert (lengths_B > 0).double().mean() == pytest.approx(0.5, abs=0.05)
        result[strategy] = Counter(lengths_B.tolist())
        step.host_sigma_B = torch.linspace(0.95, 1.0, count)
        near = method.draw_lengths(step)
        assert near.max() == 3 and near[-1] == 0, "50 steps from noise to data: none before the noise itself"
    assert result["biased_early"][1] > result["uniform"][1] > result["biased_late"][1] > 0
    assert result["biased_early"][4] < result["uniform"][4] < result["biased_late"][4]


def module_of_sana():
    from schemas.catalog import FAMILIES

    return module_of(FAMILIES["sana"])


def no_prediction(*_, **__):
    raise AssertionError("drawing takes no forward pass")
