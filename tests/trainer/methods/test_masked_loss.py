"""The masked loss, compared with its definition, computed by hand from the model's own prediction."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.forms import in_turn, long
from tests.trainer.runs import prepared
from trainer import flow
from trainer import train as loop
from trainer.flow import sample_sigma


def masked(helpers, config, every: int = 1):
    """Items of which every `every`-th has its own mask, of one frame or of all frames."""
    items, null, prompts = helpers.mixed_items(config)
    rng = np.random.default_rng(1)
    for number, item in enumerate(items):
        if number % every == 0:
            item.mask = rng.random(item.latent.shape[1:], dtype=np.float32)
    return items, null, prompts


def first_loss(run: loop.TrainState) -> float:
    return loop.finish_step(run, loop.train_step(run, run.loader.step(0)))["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), [*in_turn(["t2i", "i2v", "sana"], [1, 2]), long("wan-a14b-i2v", 2)])
def test_the_mask_multiplies_the_squared_error(make_config, make_set, helpers, kind, every) -> None:
    """A sample without a mask, in a batch with masks, is trained everywhere."""
    methods = {"masked_loss": {"unmasked_weight": 0.25}}
    config = make_config(kind, steps=1, batch_size=4, caption_dropout=0.0, methods=methods)
    make_set(config, *masked(helpers, config, every))
    run = prepared(config)
    [part] = run.loader.step(0).micro_batches
    mask = part.batch.extras["mask"]
    assert bool((mask == 1).flatten(1).all(1).any()) == (every == 2)
    shift, within = (
        config.train.shift or config.model.flavour_spec.shift,
        config.expert.range if config.expert else (0, 1),
    )
    sigma = sample_sigma(part.uniform_B, config.train.timesteps, shift, within)
    x0, noise = part.batch.latents_BCTHW, part.noise_BCTHW
    with torch.no_grad():
        predicted = run.denoiser(flow.interpolate(x0, noise, sigma), sigma, part.batch)
    weighted = (predicted - (noise - x0)).square() * (0.25 + 0.75 * mask)[:, None]
    assert first_loss(run) == pytest.approx(weighted[:, :, run.skip_frames :].mean().item(), rel=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_the_area_is_normalized_and_a_share_is_unmasked(make_config, make_set, helpers) -> None:
    """Each sample's loss is the weighted mean of its trained frames; for a sample without a mask, the plain mean. It is
    the same for any division of the global batch. With a Huber loss and weights of the noise levels."""
    losses = []
    for name, size, accumulate in (("whole", 4, 1), ("cut", 1, 4)):
        methods = {"masked_loss": {"unmasked_weight": 0.1, "unmasked_probability": 0.5, "normalize_area": True}}
        parts = {"batch_size": size, "accumulate": accumulate, "caption_dropout": 0.5, "seed": 1}
        parts |= {"loss": {"type": "huber", "huber_c": 0.5, "weighting": "cosmap"}}
        config = make_config("i2v", name=name, steps=1, methods=methods, **parts)
        items, null, prompts = masked(helpers, config)
        for item in items:
            item.bucket, item.latent, item.condition = items[0].bucket, items[0].latent, items[0].condition
            item.mask = items[0].mask ** 4
        make_set(config, items, null, prompts)
        run = prepared(config)
        result = []
        for part in run.loader.step(0).micro_batches:
            sigma = sample_sigma(part.uniform_B, config.train.timesteps, config.model.flavour_spec.shift)
            x0, noise, clean_frames = part.batch.latents_BCTHW, part.noise_BCTHW, run.skip_frames
            step = loop.start_step(run, 0, part)
            weight = (0.1 + 0.9 * part.batch.extras["mask"])[:, None]
            everywhere = step.uniform("unmasked") < 0.5
            weight[everywhere] = 1
            with torch.no_grad():
                predicted = run.denoiser(flow.interpolate(x0, noise, sigma), sigma, part.batch)
            error = 2 * 0.5 * (((predicted - (noise - x0)).square() + 0.25).sqrt() - 0.5)
            error = error * (2 / (torch.pi * (1 - 2 * sigma + 2 * sigma**2))).view(-1, 1, 1, 1, 1)
            weight_used = weight.expand_as(error)[:, :, clean_frames:]
            result += (
                (weight_used * error[:, :, clean_frames:]).flatten(1).sum(1) / weight_used.flatten(1).sum(1)
            ).tolist()
            losses.append(everywhere)
        assert first_loss(run) == pytest.approx(sum(result) / 4, rel=1e-5)
    assert torch.equal(losses[0], torch.cat(losses[1:])) and 0 < int(losses[0].sum()) < 4


@pytest.mark.slow
def test_the_prior_is_the_prediction_without_adapter_outside_of_the_mask(make_config, make_set, helpers) -> None:
    """Also for a sample that is trained everywhere in this step, and for a sample without a mask."""
    methods = {"masked_loss": {"prior_weight": 3.0, "unmasked_probability": 0.3}}
    config = make_config("i2v", steps=1, batch_size=6, methods=methods, seed=2, adapter={"rank": 2})
    make_set(config, *masked(helpers, config, every=2))
    run = prepared(config)
    for seed, parameter in enumerate(run.trainable.values()):
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    [part] = run.loader.step(0).micro_batches
    step = loop.start_step(run, 0, part)
    base, clean_frames = run.family.load(config.model.path).eval(), run.skip_frames
    inputs = step.noisy_BCTHW, step.sigma_B, part.batch, config.model.task
    with torch.no_grad():
        predicted, reference = (run.family.predict(model, *inputs) for model in (run.model, base))
    mask = part.batch.extras["mask"][:, None].clone()
    everywhere = step.uniform("unmasked") < 0.3
    is_everywhere = (mask == 1).flatten(1).all(1)
    assert 0 < int(everywhere.sum()) < 6 and 0 < int(is_everywhere.sum()) < 6
    mask[everywhere] = 1
    terms = mask * (predicted - step.target_BCTHW).square() + 3 * (1 - mask) * (predicted - reference).square()
    _, result, _ = loop.backward(run, 0, part, 1)
    torch.testing.assert_close(result, terms[:, :, clean_frames:].flatten(1).mean(1), rtol=1e-4, atol=0)
    assert float((predicted - reference).abs().max()) > 1e-3


def test_a_prior_needs_an_adapter_that_can_be_switched_off(make_config) -> None:
    methods = {"masked_loss": {"prior_weight": 1.0}}
    for adapter, word in (({"type": "full"}, "adapter.type: full"), ({"init_weights": "pissa"}, "pissa")):
        with pytest.raises(ValidationError, match=rf"{word}.*set it to 0"):
            make_config("t2i", methods=methods, adapter=adapter)
