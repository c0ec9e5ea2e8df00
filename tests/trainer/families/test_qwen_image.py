"""Compared with the installed pipeline, on a tiny checkpoint in float32."""

from functools import partial

import diffusers
import pytest
import torch

from schemas.family import REFERENCE_PARTS
from tests.forms import long
from tests.trainer.families.batches import alone, check_batch_mates
from tests.trainer.pipelines import denoise, pad_text, random
from trainer.batch import Batch
from trainer.families import qwen_image
from trainer.families.base import KeptTokens, change_arguments
from trainer.families.qwen_image import QwenImage
from trainer.methods.tread import begin, end
from trainer.validation import load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")


PLUS, EDIT = "qwen-image-edit-plus", "qwen-image-edit"
TWO = ((4, 6), (6, 2))  # rows and columns of latents


def make_batch(lengths, height=6, width=8, seed=0, references=()) -> Batch:
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), 16, 1, height, width, seed=seed)
    sizes = zip(REFERENCE_PARTS, references, strict=False)
    extras = {part: random(len(lengths), 16, 1, *size, seed=seed + size[1]) for part, size in sizes}
    return Batch(latents, None, text, mask, None, [str(i) for i in range(len(lengths))], "64x48@1", extras)


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
        (4.0, None, torch.bfloat16),
    ],
)
def test_denoised_latents_equal_the_pipelines(tiny, record_property, guidance, shift, dtype):
    """With the shift by tokens or a fixed shift, to the terminal noise level, and guidance for each token."""
    folder = tiny("qwen-image")
    pipe, batch, negative = make_pipeline(folder, dtype), make_batch([9], seed=1), make_batch([4], seed=2)
    if shift:
        fixed = {"shift": shift, "use_dynamic_shifting": False}
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, **fixed)
    noise = random(1, 16, 1, 6, 8, seed=5)
    made_for = {"true_cfg_scale": guidance, "num_inference_steps": 5, "height": 48, "width": 64}
    expected = pipe(
        prompt_embeds=batch.text_BLD.to(dtype),
        prompt_embeds_mask=batch.text_mask_BL,
        negative_prompt_embeds=negative.text_BLD.to(dtype),
        negative_prompt_embeds_mask=negative.text_mask_BL,
        latents=pipe._pack_latents(noise.transpose(1, 2), 1, 16, 6, 8),
        output_type="latent",
        return_dict=False,
        **made_for,
    )[0]
    expected = pipe._unpack_latents(expected, 48, 64, 8)
    model, scheduler = QwenImage().load(str(folder), dtype=dtype), load_scheduler(str(folder), shift=shift)
    latents = denoise(model, QwenImage(), "t2i", batch, negative, noise, scheduler, 5, guidance)
    assert latents.shape == (1, 16, 1, 6, 8) and latents.dtype == dtype and not latents.requires_grad
    assert expected.std() > 0.1 and (expected.float() - noise).std() > 0.1
    assert scheduler.sigmas[-2] == pytest.approx(0.02, abs=1e-6)
    difference = (latents - expected).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= (2e-5 if dtype == torch.float32 else 0)


def test_the_shift_by_tokens_is_the_pipelines():
    """At 1328x1328 pixels, at both ends of the line, and outside of them."""
    pipe = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192
    )
    for tokens in (64, 256, 6889, 8192, 10000):
        QwenImage().set_timesteps(pipe, 4, tokens, torch.device("cpu"))
        shift, sigma = qwen_image.FAMILY.shift_by_tokens(tokens), 0.5
        assert pipe.sigmas[2].item() == pytest.approx(shift * sigma / (1 + (shift - 1) * sigma), abs=1e-6)
    pipe.register_to_config(shift_terminal=0.02)  # the installed scheduler computes NaN for a single step
    QwenImage().set_timesteps(pipe, 1, 64, torch.device("cpu"))
    assert (pipe.sigmas.tolist(), pipe.timesteps.tolist()) == ([1, 0], [1000])


@pytest.mark.parametrize(("kind", "references"), [("qwen-image", ()), (PLUS, TWO), long(EDIT, TWO[:1])])
def test_prediction_equals_the_pipelines_call_of_the_transformer(tiny, record_property, kind, references):
    """At fractional timesteps, too, which training has and the scheduler has not; with texts of unequal lengths."""
    folder, task = tiny(kind), "i2i" if references else "t2i"
    pipe, model = make_pipeline(folder), QwenImage().load(str(folder))
    batch, sigma = make_batch([9, 5], references=references), torch.tensor([0.1234, 0.777])
    tokens = [
        pipe._pack_latents(latents.transpose(1, 2), 2, 16, *latents.shape[3:])
        for latents in (batch.latents_BCTHW, *batch.references)
    ]
    with torch.no_grad():
        expected = pipe.transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=1000 * sigma / 1000,
            encoder_hidden_states=batch.text_BLD,
            encoder_hidden_states_mask=batch.text_mask_BL.long(),
            img_shapes=[[(1, 3, 4), *((1, rows // 2, columns // 2) for rows, columns in references)]] * 2,
            return_dict=False,
        )[0][:, : tokens[0].shape[1]]
        prediction = QwenImage().predict(model, batch.latents_BCTHW, sigma, batch, task)
    expected = pipe._unpack_latents(expected, 48, 64, 8)
    record_property("largest difference", (prediction - expected).abs().max().item())
    torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-5)


def by_hand(model, single, noisy_BCTHW, sigma_B, kept_tokens) -> torch.Tensor:
    """(N, 4 C) of one sample by blocks with the stock attention. kept_tokens: tokens of the second and third block,
    among the N tokens of the noisy image; all tokens of the references, which have no noise, are computed."""
    latents = (noisy_BCTHW, *single.references)
    packed = [qwen_image.pack(each) for each in latents]
    count, x = packed[0].shape[1], model.img_in(torch.cat(packed, 1))
    text = model.txt_in(model.txt_norm(single.text_BLD))
    time = model.time_text_embed(torch.cat([sigma_B, 0 * sigma_B]), x)
    shapes = [(1, each.shape[3] // 2, each.shape[4] // 2) for each in latents]
    rope, text_rope = model.pos_embed([shapes], max_txt_seq_len=text.shape[1], device=x.device)
    index = (torch.arange(x.shape[1]) >= count).int()[None]
    for number, block in enumerate(model.transformer_blocks):
        tokens = [*(kept_tokens if number else range(count)), *range(count, x.shape[1])]
        rotary = rope[tokens], text_rope
        text, image = block(x[:, tokens], text, None, time, rotary, None, index[:, tokens])
        x = x.clone()
        x[:, tokens] = image
    return model.proj_out(model.norm_out(x, time[:1]))[0, :count]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_route_past_references_equals_its_blocks_by_hand(tiny, record_property, checkpointing):
    """Each sample drops its own tokens, but no tokens of references, which have the noise level 0."""
    model, sigma = QwenImage().load(str(tiny(PLUS))), torch.tensor([0.3, 0.7])
    batch, places = make_batch([7, 4], references=TWO), torch.tensor([[0, 3, 4, 9, 11], [1, 2, 7, 8, 10]])
    kept_tokens, (first, last) = KeptTokens(places, 12), QwenImage().blocks(model)[1:]
    change_arguments(first, partial(begin, kept_tokens, QwenImage().block_tokens(first)))
    last.register_forward_hook(partial(end, kept_tokens, QwenImage().block_tokens(last)))
    QwenImage().route_blocks([first, last], kept_tokens)
    if checkpointing:
        model.enable_gradient_checkpointing()
    prediction = qwen_image.pack(QwenImage().predict(model, batch.latents_BCTHW, sigma, batch, "i2i")).detach()
    stock = diffusers.QwenImageTransformer2DModel.from_pretrained(tiny(PLUS) / "transformer")
    with torch.no_grad():
        rows = [
            by_hand(stock, alone(batch, n), batch.latents_BCTHW[[n]], sigma[[n]], places[n].tolist()) for n in range(2)
        ]
    difference = (prediction - torch.stack(rows)).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, checkpointing):
    model = QwenImage().load(str(tiny("qwen-image")))
    if checkpointing:
        model.enable_gradient_checkpointing()
    # The bias of a key adds the same to all scores: its gradient is zero except for rounding, hence the floor.
    check_batch_mates(QwenImage(), model, make_batch([3, 17, 8]), record_property)
    for kind, references in ((PLUS, TWO), (EDIT, TWO[:1])) if not checkpointing else ():
        model = QwenImage().load(str(tiny(kind)))
        check_batch_mates(QwenImage(), model, make_batch([3, 8], references=references), record_property, task="i2i")


def test_what_it_can_not_compute_is_refused(tiny):
    model, batch = QwenImage().load(str(tiny("qwen-image"))), make_batch([3])
    with pytest.raises(ValueError, match="i2i with 0 references"):
        QwenImage().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "i2i")
    with pytest.raises(ValueError, match="no task 't2v'; valid: t2i"):
        QwenImage().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "t2v")
    odd = make_batch([3], height=5)
    with pytest.raises(ValueError, match="64x40 pixels: sides must be multiples of 16"):
        QwenImage().model_inputs(model, odd.latents_BCTHW, torch.ones(1), odd, "t2i")
    with pytest.raises(ValueError, match="padding needs a mask"):
        QwenImage().dense_attention(model)
