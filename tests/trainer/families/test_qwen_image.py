"""Against the installed pipeline, on a tiny checkpoint in float32."""

import diffusers
import pytest
import torch

from tests.forms import long
from tests.trainer.families.batches import check_batch_mates, sample_losses
from tests.trainer.pipelines import apply_as_comfyui, output, pipeline, random, trained
from trainer.batch import Batch, pad_text
from trainer.families import qwen_image
from trainer.setup import export
from trainer.validation import denoise, load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(lengths, height=6, width=8, seed=0) -> Batch:
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), 16, 1, height, width, seed=seed)
    return Batch(latents, None, text, mask, None, [str(i) for i in range(len(lengths))], "64x48@1")


def make_pipeline(folder, dtype=torch.float32):
    pipe = diffusers.QwenImagePipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLQwenImage.from_pretrained(folder / "vae"),
        transformer=diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guidance", "shift", "dtype"),
    [
        (4.0, None, torch.float32),
        (1.0, None, torch.float32),
        long(4.0, 3.0, torch.float32),
        long(4.0, None, torch.bfloat16),
    ],
)
def test_denoised_latents_equal_the_pipelines(tiny, record_property, guidance, shift, dtype):
    """With the shift by tokens or a fixed one, to the terminal noise level, and the guidance by token."""
    folder = tiny("qwen-image")
    pipe, batch, negative = make_pipeline(folder, dtype), make_batch([9], seed=1), make_batch([4], seed=2)
    if shift:
        fixed = {"shift": shift, "use_dynamic_shifting": False}
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, **fixed)
    noise = random(1, 16, 1, 6, 8, seed=5)
    made_for = {"true_cfg_scale": guidance, "num_inference_steps": 5, "height": 48, "width": 64}
    wanted = pipe(
        prompt_embeds=batch.text_BLD.to(dtype),
        prompt_embeds_mask=batch.text_mask_BL,
        negative_prompt_embeds=negative.text_BLD.to(dtype),
        negative_prompt_embeds_mask=negative.text_mask_BL,
        latents=pipe._pack_latents(noise.transpose(1, 2), 1, 16, 6, 8),
        output_type="latent",
        return_dict=False,
        **made_for,
    )[0]
    wanted = pipe._unpack_latents(wanted, 48, 64, 8)
    model, scheduler = qwen_image.load(str(folder), dtype=dtype), load_scheduler(str(folder), shift=shift)
    made = denoise(model, qwen_image, "t2i", batch, negative, noise, scheduler, 5, guidance)
    assert made.shape == (1, 16, 1, 6, 8) and made.dtype == dtype and not made.requires_grad
    assert wanted.std() > 0.1 and (wanted.float() - noise).std() > 0.1
    assert scheduler.sigmas[-2] == pytest.approx(0.02, abs=1e-6)
    difference = (made - wanted).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= (2e-5 if dtype == torch.float32 else 0)


def test_the_shift_by_tokens_is_the_pipelines():
    """At 1328x1328 pixels and at both ends of the line, and beyond them."""
    pipe = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192
    )
    for tokens in (64, 256, 6889, 8192, 10000):
        qwen_image.set_timesteps(pipe, 4, tokens, torch.device("cpu"))
        shift, sigma = qwen_image.FAMILY.shift_by_tokens(tokens), 0.5
        assert pipe.sigmas[2].item() == pytest.approx(shift * sigma / (1 + (shift - 1) * sigma), abs=1e-6)


def test_prediction_equals_the_pipelines_call_of_the_transformer(tiny, record_property):
    """At fractional timesteps too, which training has and the scheduler has not; of texts of unequal lengths."""
    folder = tiny("qwen-image")
    pipe, model = make_pipeline(folder), qwen_image.load(str(folder))
    batch, sigma = make_batch([9, 5]), torch.tensor([0.1234, 0.777])
    with torch.no_grad():
        wanted = pipe.transformer(
            hidden_states=pipe._pack_latents(batch.latents_BCTHW.transpose(1, 2), 2, 16, 6, 8),
            timestep=1000 * sigma / 1000,
            encoder_hidden_states=batch.text_BLD,
            encoder_hidden_states_mask=batch.text_mask_BL.long(),
            img_shapes=[[(1, 3, 4)]] * 2,
            return_dict=False,
        )[0]
        made = qwen_image.predict(model, batch.latents_BCTHW, sigma, batch, "t2i")
    wanted = pipe._unpack_latents(wanted, 48, 64, 8)
    record_property("largest difference", (made - wanted).abs().max().item())
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, checkpointing):
    model = qwen_image.load(str(tiny("qwen-image")))
    if checkpointing:
        model.enable_gradient_checkpointing()
    # A key's bias that adds the same to all scores has a gradient of zero but for rounding: hence the floor.
    check_batch_mates(qwen_image, model, make_batch([3, 17, 8]), record_property)


def test_without_a_mask_losses_do_depend_on_batch_mates(tiny):
    model, batch, unmasked = qwen_image.load(str(tiny("qwen-image"))), make_batch([3, 17]), make_batch([3, 17])
    unmasked.text_mask_BL[:] = True
    with torch.no_grad():
        losses = [sample_losses(qwen_image, model, each) for each in (batch, unmasked)]
    assert (losses[0] - losses[1])[0].abs() > 1e-4


def test_an_adapter_is_the_trained_model_in_the_pipeline_and_in_comfyui(tiny, tmp_path, record_property):
    """Whose names are diffusers' here; each of them is one of the transformer."""
    kind, folder = "qwen-image", tiny("qwen-image")
    model, pipe = trained(kind, folder, alpha=2.5), pipeline(kind, folder)
    wanted, before = output(kind, model), output(kind, pipe.transformer)
    assert (wanted - before).abs().max() > 1e-2
    comfyui = export.save_lora(model, tmp_path / "comfyui", kind, formats=["comfyui"])
    apply_as_comfyui(pipe.transformer, comfyui)
    gaps = {"ComfyUI": (output(kind, pipe.transformer) - wanted).abs().max().item()}
    pipe = pipeline(kind, folder)
    export.save_lora(model, tmp_path / "diffusers", kind)
    pipe.load_lora_weights(tmp_path / "diffusers")
    gaps["load_lora_weights"] = (output(kind, pipe.transformer) - wanted).abs().max().item()
    record_property("largest differences", gaps)
    assert max(gaps.values()) <= 1e-6


def test_packed_latents_come_back():
    latents = random(2, 16, 1, 6, 8)
    assert torch.equal(qwen_image.unpack(qwen_image.pack(latents), latents.shape), latents)


def test_what_it_can_not_compute_is_refused(tiny, tmp_path):
    model, batch = qwen_image.load(str(tiny("qwen-image"))), make_batch([3])
    with pytest.raises(ValueError, match="no task 't2v'; valid: t2i"):
        qwen_image.model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "t2v")
    odd = make_batch([3], height=5)
    with pytest.raises(ValueError, match="64x40 pixels: sides must be multiples of 16"):
        qwen_image.model_inputs(model, odd.latents_BCTHW, torch.ones(1), odd, "t2i")
    with pytest.raises(ValueError, match="padding needs a mask"):
        qwen_image.dense_attention(model)
    model.register_to_config(guidance_embeds=True)
    model.save_pretrained(tmp_path / "transformer")
    with pytest.raises(ValueError, match="guidance-distilled"):
        qwen_image.load(str(tmp_path))
