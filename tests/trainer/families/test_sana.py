"""Compared with the installed pipeline, on a tiny checkpoint in float32."""

import json

import diffusers
import pytest
import torch

from tests.trainer.families.batches import check_batch_mates
from tests.trainer.pipelines import denoise, pad_text, random
from trainer.batch import Batch
from trainer.families.sana import Sana
from trainer.validation import load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(lengths, height=3, width=4, seed=0) -> Batch:
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), 32, 1, height, width, seed=seed)
    return Batch(latents, None, text, mask, None, [str(i) for i in range(len(lengths))], "128x96@1")


def make_pipeline(folder, dtype=torch.float32):
    pipe = diffusers.SanaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderDC.from_pretrained(folder / "vae"),
        transformer=diffusers.SanaTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype),
        scheduler=diffusers.DPMSolverMultistepScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def as_the_pipeline_has_it(batch: Batch, prefix: str = "") -> dict[str, torch.Tensor]:
    """The same text padded to the pipeline's 300 rows, with padding that is not zero."""
    rows = batch.text_BLD.shape[1]
    embeds = torch.cat([batch.text_BLD, random(len(batch), 300 - rows, 64, seed=77)], 1)
    mask = torch.arange(300)[None] < batch.text_mask_BL.sum(1)[:, None]
    return {f"{prefix}prompt_embeds": embeds, f"{prefix}prompt_attention_mask": mask.long()}


def row_by_row(transformer) -> None:
    """Guidance makes a batch of two, which bfloat16 rounds differently from two batches of one."""
    batch_forward = transformer.forward

    def forward(hidden_states, encoder_hidden_states, encoder_attention_mask, timestep, **options):
        rows = zip(hidden_states, encoder_hidden_states, encoder_attention_mask.bool(), timestep, strict=True)
        parts = [
            batch_forward(x[None], text[mask][None], t[None], encoder_attention_mask=mask[mask][None], **options)
            for x, text, mask, t in rows
        ]
        return (torch.cat([part[0] for part in parts]),)

    transformer.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "dtype"), [(None, torch.float32), (5.0, torch.float32), (None, torch.bfloat16)])
def test_denoised_latents_equal_the_pipelines(tiny, record_property, shift, dtype):
    """In bfloat16 to the last bit, if its transformer is called like ours: row by row, without padding."""
    folder = tiny("sana")
    pipe = make_pipeline(folder, dtype)
    if dtype != torch.float32:
        row_by_row(pipe.transformer)
    if shift:
        pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=shift)
    batch, negative = make_batch([9], seed=1), make_batch([4], seed=2)
    expected = pipe(
        **as_the_pipeline_has_it(batch),
        **as_the_pipeline_has_it(negative, "negative_"),
        negative_prompt=None,
        height=96,
        width=128,
        num_inference_steps=5,
        guidance_scale=4.5,
        generator=torch.Generator().manual_seed(5),
        use_resolution_binning=False,
        output_type="latent",
        return_dict=False,
    )[0]
    noise = random(1, 32, 3, 4, seed=5)[:, :, None]
    scheduler = load_scheduler(str(folder), shift=shift)
    latents = denoise(Sana().load(str(folder), dtype=dtype), Sana(), "t2i", batch, negative, noise, scheduler, 5, 4.5)
    assert latents.shape == (1, 32, 1, 3, 4) and not latents.requires_grad
    assert expected.std() > 0.1
    difference = (latents[:, :, 0] - expected).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= (1e-4 if dtype == torch.float32 else 0)


def test_prediction_equals_the_pipelines_call_of_the_transformer(tiny):
    """At fractional timesteps, too, which training has and the scheduler has not."""
    folder = tiny("sana")
    pipe, model = make_pipeline(folder), Sana().load(str(folder))
    batch, sigma = make_batch([9, 9]), torch.tensor([0.1234, 0.777])
    text = as_the_pipeline_has_it(batch)
    with torch.no_grad():
        expected = pipe.transformer(
            batch.latents_BCTHW[:, :, 0],
            encoder_hidden_states=text["prompt_embeds"],
            encoder_attention_mask=text["prompt_attention_mask"],
            timestep=1000 * sigma * pipe.transformer.config.timestep_scale,
            return_dict=False,
        )[0]
        prediction = Sana().predict(model, batch.latents_BCTHW, sigma, batch, "t2i")
    torch.testing.assert_close(prediction[:, :, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, checkpointing):
    model = Sana().load(str(tiny("sana")))
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch = make_batch([3, 17, 8])
    # The bias of a cross-attention key has a gradient of zero except for rounding, hence the floor.
    check_batch_mates(Sana(), model, batch, record_property)


@pytest.mark.parametrize(("name", "message"), [("FutureScheduler", "does not have"), ("DDIMScheduler", "no shift")])
def test_a_scheduler_that_cannot_be_used_is_named(tmp_path, name, message):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        load_scheduler(str(tmp_path), shift=2.0)
