"""Compared with the installed pipeline, on a tiny checkpoint in float32."""

import diffusers
import pytest
import torch

from tests.trainer.families.batches import check_batch_mates
from tests.trainer.pipelines import denoise, pad_text, random
from trainer.batch import Batch
from trainer.families.z_image import ZImage
from trainer.validation import load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(lengths, height=6, width=10, seed=0) -> Batch:
    """15 visual tokens, which the transformer pads to 32."""
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), 16, 1, height, width, seed=seed)
    return Batch(latents, None, text, mask, None, [str(i) for i in range(len(lengths))], "80x48@1")


def make_pipeline(folder, dtype=torch.float32):
    pipe = diffusers.ZImagePipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKL.from_pretrained(folder / "vae"),
        transformer=diffusers.ZImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "guidance"), [(None, 5.0), (6.0, 0.5), (None, 0.0)])
def test_denoised_latents_equal_the_pipelines(tiny, record_property, shift, guidance):
    folder = tiny("z-image")
    pipe = make_pipeline(folder)
    if shift:
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=shift)
    batch, negative = make_batch([9], seed=1), make_batch([4], seed=2)
    expected = pipe(
        prompt_embeds=[batch.text_BLD[0]],
        negative_prompt_embeds=[negative.text_BLD[0]],
        height=48,
        width=80,
        num_inference_steps=5,
        guidance_scale=guidance,
        latents=random(1, 16, 6, 10, seed=5),
        output_type="latent",
        return_dict=False,
    )[0]
    noise = random(1, 16, 6, 10, seed=5)[:, :, None]
    scheduler = load_scheduler(str(folder), shift=shift)
    latents = denoise(ZImage().load(str(folder)), ZImage(), "t2i", batch, negative, noise, scheduler, 5, guidance)
    assert latents.shape == (1, 16, 1, 6, 10) and not latents.requires_grad
    assert expected.std() > 0.1
    difference = (latents[:, :, 0] - expected).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 2e-5


def test_prediction_equals_the_pipelines_call_of_the_transformer(tiny, record_property):
    """At fractional timesteps, too, which training has and the scheduler has not."""
    folder = tiny("z-image")
    pipe, model = make_pipeline(folder), ZImage().load(str(folder))
    batch, sigma = make_batch([9, 40]), torch.tensor([0.1234, 0.777])
    timestep = (1000 - 1000 * sigma) / 1000  # as in the pipeline
    with torch.no_grad():
        expected = [
            -pipe.transformer([latent], timestep[row : row + 1], [text[:length]], return_dict=False)[0][0]
            for row, (latent, text, length) in enumerate(
                zip(batch.latents_BCTHW, batch.text_BLD, batch.lengths, strict=True)
            )
        ]
        prediction = ZImage().predict(model, batch.latents_BCTHW, sigma, batch, "t2i")
    difference = (prediction - torch.stack(expected)).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, checkpointing):
    model = ZImage().load(str(tiny("z-image")))
    if checkpointing:
        model.enable_gradient_checkpointing()
    check_batch_mates(ZImage(), model, make_batch([3, 40, 8]), record_property)


def test_what_pads_a_text_changes_nothing(tiny):
    model, batch = ZImage().load(str(tiny("z-image"))), make_batch([3, 40])
    sigma = torch.tensor([0.3, 0.6])
    with torch.no_grad():
        plain = ZImage().predict(model, batch.latents_BCTHW, sigma, batch, "t2i")
        batch.text_BLD[0, 3:] = 7.0
        assert torch.equal(plain, ZImage().predict(model, batch.latents_BCTHW, sigma, batch, "t2i"))
