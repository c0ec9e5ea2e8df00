"""Compared with the installed pipeline, on a tiny checkpoint in float32."""

from functools import partial

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image

from tests.forms import long
from tests.trainer.families.batches import check_batch_mates
from tests.trainer.pipelines import denoise, pad_text, random
from trainer.batch import Batch
from trainer.families import flux2
from trainer.families.base import KeptTokens, change_arguments
from trainer.families.flux2 import Flux2
from trainer.methods.tread import begin, end
from trainer.validation import load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")

KIND = "flux2-klein"


def make_batch(lengths, height=3, width=5, seed=0, references=()) -> Batch:
    """references: (height, width) of each, as latents."""
    text, mask = pad_text([random(length, 96, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), 128, 1, height, width, seed=seed)
    options = {
        f"reference{number}": random(len(lengths), 128, 1, *sides, seed=seed + 200 + number)
        for number, sides in enumerate(references, 1)
    }
    return Batch(latents, None, text, mask, None, [str(i) for i in range(len(lengths))], "80x48@1", options)


TWO = ((4, 4), (6, 4))  # references; the pipeline requires at least 64 pixels


def make_pipeline(folder, dtype=torch.float32):
    pipe = diffusers.Flux2KleinPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLFlux2.from_pretrained(folder / "vae"),
        transformer=diffusers.Flux2Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def last_latents(pipe, **arguments) -> torch.Tensor:
    """(B, C, h, w) in the model's space, which the pipeline then converts to the autoencoder's."""
    calls = []
    pipe(
        **arguments,
        output_type="latent",
        callback_on_step_end=lambda _, step, time, result: calls.append(result["latents"]) or {},
    )
    return calls[-1].transpose(1, 2).reshape(arguments["latents"].shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guidance", "shift", "dtype", "references"),
    [
        (4.0, None, torch.float32, ()),
        (1.0, None, torch.float32, ()),
        (4.0, None, torch.float32, TWO),
        long(4.0, 3.0, torch.float32, ()),
        long(4.0, None, torch.bfloat16, ()),
    ],
)
def test_denoised_latents_equal_the_pipelines(tiny, record_property, guidance, shift, dtype, references):
    """Texts of full length, including padding, from the noise to the last step; with images, which the pipeline encodes
    itself."""
    folder = tiny(KIND)
    pipe, batch, negative = make_pipeline(folder, dtype), make_batch([512], seed=1), make_batch([512], seed=2)
    images = []
    for number, (rows, columns) in enumerate(references):
        noise = 255 * random(rows * 16, columns * 16, 3, seed=300 + number).sigmoid()
        images.append(Image.fromarray(noise.to(torch.uint8).numpy()))
        with torch.no_grad():
            encoded = pipe._encode_vae_image(pipe.image_processor.preprocess(images[-1]), None)[:, :, None]
        batch.extras[f"reference{number + 1}"] = negative.extras[f"reference{number + 1}"] = encoded
    if shift:
        fixed = {"shift": shift, "use_dynamic_shifting": False}
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, **fixed)
    noise = random(1, 128, 1, 3, 5, seed=5)
    expected = last_latents(
        pipe,
        prompt_embeds=batch.text_BLD.to(dtype),
        negative_prompt_embeds=negative.text_BLD.to(dtype),
        latents=noise[:, :, 0],
        guidance_scale=guidance,
        num_inference_steps=5,
        height=48,
        width=80,
        **({"image": images} if images else {}),
    )
    model, scheduler = Flux2().load(str(folder), dtype=dtype), load_scheduler(str(folder), shift=shift)
    task = "i2i" if references else "t2i"
    latents = denoise(model, Flux2(), task, batch, negative, noise, scheduler, 5, guidance)
    assert latents.shape == noise.shape and latents.dtype == dtype and not latents.requires_grad
    assert expected.std() > 0.1 and (expected.float() - noise[:, :, 0]).std() > 0.1
    difference = (latents[:, :, 0] - expected).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= (2e-5 if dtype == torch.float32 else 0)


def test_the_shift_by_tokens_and_steps_is_the_pipelines():
    """On both sides of the number of tokens above which the steps do not count; training uses the shift of 50 steps."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for tokens in (64, 1024, 4300, 4301, 9216):
        for steps in (4, 50, 200):
            assert flux2.compute_mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)
        Flux2().set_timesteps(scheduler, 50, tokens, torch.device("cpu"))
        shift, sigma = flux2.FAMILY.shift_by_tokens(tokens), 0.5
        assert scheduler.sigmas[25].item() == pytest.approx(shift * sigma / (1 + (shift - 1) * sigma), abs=1e-6)


def test_a_scheduler_with_noise_levels_of_its_own_keeps_them():
    """As in the pipeline, which then only passes the number of steps."""
    schedulers = [
        diffusers.UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", use_dynamic_shifting=True
        )
        for _ in range(2)
    ]
    Flux2().set_timesteps(schedulers[0], 4, 256, torch.device("cpu"))
    schedulers[1].set_timesteps(4, mu=compute_empirical_mu(256, 4))
    assert torch.equal(schedulers[0].sigmas, schedulers[1].sigmas)


@pytest.mark.parametrize("references", [(), TWO])
def test_prediction_equals_the_pipelines_call_of_the_transformer(tiny, record_property, references):
    """At fractional timesteps, too, which training has and the scheduler has not; texts of unequal lengths are compared
    one by one, because the pipeline has no mask."""
    folder, task = tiny(KIND), "i2i" if references else "t2i"
    pipe, model = make_pipeline(folder), Flux2().load(str(folder))
    batch, sigma = make_batch([9, 5], references=references), torch.tensor([0.1234, 0.777])
    expected = []
    with torch.no_grad():
        for row, length in enumerate(batch.lengths):
            latents, text = batch.latents_BCTHW[[row], :, 0], batch.text_BLD[[row], :length]
            images = [latents, *(reference[[row], :, 0] for reference in batch.references)]
            places = [pipe._prepare_latent_ids(latents)]
            places += [pipe._prepare_image_ids(images[1:])] if references else []
            tokens = pipe.transformer(
                hidden_states=torch.cat([*map(pipe._pack_latents, images)], 1),
                timestep=1000 * sigma[[row]] / 1000,
                encoder_hidden_states=text,
                img_ids=torch.cat(places, 1),
                txt_ids=pipe._prepare_text_ids(text),
                return_dict=False,
            )[0][:, : latents[0, 0].numel()]
            expected.append(pipe._unpack_latents_with_ids(tokens, pipe._prepare_latent_ids(latents), 3, 5))
        prediction = Flux2().predict(model, batch.latents_BCTHW, sigma, batch, task)[:, :, 0]
    difference = (prediction - torch.cat(expected)).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, checkpointing):
    """With texts of one length, as they are stored, and of several lengths."""
    model = Flux2().load(str(tiny(KIND)))
    if checkpointing:
        model.enable_gradient_checkpointing()
    for lengths in ([16, 16, 16], [3, 17, 8]):
        check_batch_mates(Flux2(), model, make_batch(lengths), record_property)
    check_batch_mates(Flux2(), model, make_batch([3, 8], references=TWO), record_property, task="i2i")


def by_hand(model, latents_C1HW, sigma, text_LD, kept_tokens) -> torch.Tensor:
    """(N, C) of one sample by blocks with the stock attention. kept_tokens: image tokens of the second and third
    block."""
    text, x = model.context_embedder(text_LD[None]), model.x_embedder(latents_C1HW.flatten(1).T[None])
    time = model.time_guidance_embed(1000 * sigma[None], None)
    image_mod, text_mod = model.double_stream_modulation_img(time), model.double_stream_modulation_txt(time)
    grid = (torch.arange(side) for side in (1, *latents_C1HW.shape[2:], 1))
    places = (torch.arange(side) for side in (1, 1, 1, len(text_LD)))
    image, words = (model.pos_embed(torch.cartesian_prod(*each)) for each in (grid, places))
    for number, block in enumerate([*model.transformer_blocks, *model.single_transformer_blocks]):
        tokens = kept_tokens if number in (1, 2) else [*range(x.shape[1])]
        rotary = tuple(torch.cat([word, places[tokens]]) for word, places in zip(words, image, strict=True))
        if number < len(model.transformer_blocks):
            text, new = block(x[:, tokens], text, image_mod, text_mod, rotary)
        else:
            joint = block(torch.cat([text, x[:, tokens]], 1), None, model.single_stream_modulation(time), rotary)
            text, new = joint.tensor_split([len(text_LD)], 1)
        x = x.clone()
        x[:, tokens] = new
    return model.proj_out(model.norm_out(x, time))[0]


def test_a_route_over_both_kinds_of_blocks_equals_its_blocks_by_hand(tiny, record_property):
    """Each sample drops its own tokens; one of the two texts is padded."""
    model, batch, sigma = Flux2().load(str(tiny(KIND))), make_batch([7, 4]), torch.tensor([0.3, 0.7])
    places = torch.tensor([[0, 3, 4, 9, 14], [1, 2, 7, 8, 13]])
    kept_tokens, (first, last) = KeptTokens(places, 15), Flux2().blocks(model)[1:3]
    hooks = [
        change_arguments(first, partial(begin, kept_tokens, Flux2().block_tokens(first))),
        last.register_forward_hook(partial(end, kept_tokens, Flux2().block_tokens(last))),
        *Flux2().route_blocks([first, last], kept_tokens),
    ]
    with torch.no_grad():
        prediction = flux2.pack(Flux2().predict(model, batch.latents_BCTHW, sigma, batch, "t2i"))
        for hook in hooks:
            hook.remove()
        for block in model.transformer_blocks:
            block.attn.set_processor(Flux2AttnProcessor())
        for block in model.single_transformer_blocks:
            block.attn.set_processor(Flux2ParallelSelfAttnProcessor())
        texts = [text[:length] for text, length in zip(batch.text_BLD, batch.lengths, strict=True)]
        rows = zip(batch.latents_BCTHW, sigma, texts, places.tolist(), strict=True)
        expected = torch.stack([by_hand(model, *row) for row in rows])
    difference = (prediction - expected).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5
