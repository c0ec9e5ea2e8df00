"""Compared with the installed pipelines, on tiny checkpoints in float32."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from schemas.catalog import FAMILIES
from stages.encoding.vae.wan import Autoencoder
from stages.media.sample_reader import normalize_pixels
from tests.forms import long
from tests.trainer.families.batches import check_batch_mates
from tests.trainer.pipelines import denoise, pad_text, random
from trainer.batch import Batch
from trainer.families.base import KeptTokens
from trainer.families.wan import Wan
from trainer.validation import load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = {
    "wan2.1-t2v": (FAMILIES["wan2.1"], "t2v"),
    "wan2.2-5b-t2v": (FAMILIES["wan2.2-5b"], "t2v"),
    "wan2.2-5b-i2v": (FAMILIES["wan2.2-5b"], "i2v"),
}
FORMS = ["wan2.2-5b-i2v", long("wan2.1-t2v"), long("wan2.2-5b-t2v")]
FRAMES, ROWS, COLUMNS = 3, 4, 6  # of latents


def make_batch(kind, lengths, seed=0) -> Batch:
    family, task = KINDS[kind]
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), family.latent_channels, FRAMES, ROWS, COLUMNS, seed=seed)
    condition = random(*latents[:, :, :1].shape, seed=seed + 9) if task == "i2v" else None
    return Batch(latents, condition, text, mask, None, [str(i) for i in range(len(lengths))], "96x64@9")


def make_pipeline(kind, folder, dtype=torch.float32):
    """The pipeline, as DiffusionPipeline.from_pretrained makes it from the folder, without text encoders."""
    family, task = KINDS[kind]
    none = dict.fromkeys(("text_encoder", "tokenizer"))
    if task == "i2v":
        none |= dict.fromkeys(("image_encoder", "image_processor"))
    pipe = getattr(diffusers, family.pipelines[task]).from_pretrained(folder, **none, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config.expand_timesteps == (family.name == "wan2.2-5b")
    return pipe


def padded(batch: Batch) -> torch.Tensor:
    """The text as the pipeline's `encode_prompt` returns it."""
    return torch.cat([batch.text_BLD, torch.zeros(len(batch), 512 - batch.text_BLD.shape[1], 64)], 1)


def picture(family) -> Image.Image:
    size = COLUMNS * family.spatial_stride, ROWS * family.spatial_stride
    colors = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize(size)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [None, long(7.0)])
@pytest.mark.parametrize("kind", FORMS)
def test_denoised_latents_equal_the_pipelines(tiny, record_property, kind, shift):
    """For i2v, our autoencoder encodes the first frame."""
    (family, task), folder = KINDS[kind], tiny(kind)
    pipe = make_pipeline(kind, folder)
    if shift:
        pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=shift)
    batch, negative = make_batch(kind, [9], seed=1), make_batch(kind, [4], seed=2)
    options = {}
    if task == "i2v":
        options["image"] = image = picture(family)
        ours = Autoencoder(str(folder), None, torch.float32, torch.device("cpu"), normalization=family.normalization)
        pixels = torch.from_numpy(normalize_pixels(np.asarray(image)[None]))[None]
        batch.condition_BCTHW = negative.condition_BCTHW = ours.encode(pixels, [0], family.conditions[task].posterior)
    expected = pipe(
        **options,
        prompt_embeds=padded(batch),
        negative_prompt_embeds=padded(negative),
        height=ROWS * family.spatial_stride,
        width=COLUMNS * family.spatial_stride,
        num_frames=9,
        num_inference_steps=5,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
        return_dict=False,
    )[0]
    noise = random(1, family.latent_channels, FRAMES, ROWS, COLUMNS, seed=5)
    scheduler = load_scheduler(str(folder), shift=shift)
    latents = denoise(Wan().load(str(folder)), Wan(), task, batch, negative, noise, scheduler, 5, 5.0)
    assert latents.shape == expected.shape and not latents.requires_grad and expected.std() > 0.1
    difference = (latents - expected).abs().max().item()
    record_property("largest difference", difference)
    print(f"{kind}, denoised: largest difference {difference:.2e} of {expected.abs().max():.2f}")
    assert difference <= 2e-5


@pytest.mark.parametrize("kind", FORMS)
def test_prediction_equals_the_pipelines_call_of_the_transformer(tiny, record_property, kind):
    """The inputs that the pipeline makes at its own timesteps; for the 5B model a timestep for each token."""
    (family, task), folder = KINDS[kind], tiny(kind)
    pipe, batch = make_pipeline(kind, folder), make_batch(kind, [9])
    calls = {}

    def keep(module, args, kwargs, output):
        calls.setdefault("inputs", kwargs)
        calls.setdefault("output", output[0])

    pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    options = {"image": picture(family)} if task == "i2v" else {}
    pipe(
        **options,
        prompt_embeds=padded(batch),
        negative_prompt_embeds=padded(batch),
        height=ROWS * family.spatial_stride,
        width=COLUMNS * family.spatial_stride,
        num_frames=9,
        num_inference_steps=3,
        output_type="latent",
    )
    inputs = calls["inputs"]
    sigma_B = inputs["timestep"].reshape(1, -1)[:, -1].double() / 1000
    batch.condition_BCTHW = inputs["hidden_states"][:, :, :1] if task == "i2v" else None
    with torch.no_grad():
        prediction = Wan().predict(Wan().load(str(folder)), inputs["hidden_states"], sigma_B, batch, task)
    difference = (prediction - calls["output"]).abs().max().item()
    record_property("largest difference", difference)
    print(f"{kind}, prediction: largest difference {difference:.2e}")
    assert difference <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [long(False), True])
@pytest.mark.parametrize("kind", FORMS)
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, kind, checkpointing):
    model = Wan().load(str(tiny(kind)))
    if checkpointing:
        model.enable_gradient_checkpointing()
    # The bias of a key has a gradient of zero except for rounding, hence the floor.
    check_batch_mates(Wan(), model, make_batch(kind, [3, 17, 8]), record_property, KINDS[kind][1])


def test_what_cannot_be_predicted_is_refused(tiny):
    kind = "wan2.2-5b-i2v"
    model, batch = Wan().load(str(tiny(kind))), make_batch(kind, [3])
    sigma = torch.ones(1)
    with pytest.raises(ValueError, match="513 tokens, and this model reads 512"):
        Wan().model_inputs(model, batch.latents_BCTHW, sigma, make_batch(kind, [513]), "t2v")
    batch.condition_BCTHW = None
    with pytest.raises(ValueError, match="needs the condition"):
        Wan().model_inputs(model, batch.latents_BCTHW, sigma, batch, "i2v")


def test_what_stays_in_float32(tiny):
    """As diffusers loads it; both loaded and made from the config alone."""
    folder = tiny("wan2.1-t2v")
    theirs = diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    expected = {name: weight.dtype for name, weight in theirs.named_parameters()}
    loaded, untrained = Wan().load(str(folder), dtype=torch.bfloat16), Wan().untrained(theirs.config, torch.bfloat16)
    assert {name: weight.dtype for name, weight in loaded.named_parameters()} == expected
    assert {name: weight.dtype for name, weight in untrained.named_parameters()} == expected
    assert expected["blocks.0.scale_shift_table"] == torch.float32 != expected["blocks.0.attn1.to_q.weight"]
    assert Wan().compute_dtype(loaded) == theirs.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", FORMS)
def test_a_route_of_all_tokens_changes_nothing_and_one_of_some_equals_a_smaller_clip(tiny, kind):
    """Kept tokens keep their rotary embeddings and timesteps."""
    model, batch, task = Wan().load(str(tiny(kind))), make_batch(kind, [3]), KINDS[kind][1]
    grid = Wan().token_grid(model, batch)
    assert grid.tokens == FRAMES * ROWS * COLUMNS // 4

    def output(positions, blocks):
        kept_tokens = KeptTokens(torch.tensor([positions]), grid.tokens)
        handles = [blocks[0].register_forward_pre_hook(lambda _, inputs: (kept_tokens.take(inputs[0]), *inputs[1:]))]
        handles += Wan().route_blocks(blocks, kept_tokens)
        last = {}
        handles.append(blocks[-1].register_forward_hook(lambda *call: last.setdefault("out", call[-1])))
        handles.append(blocks[-1].register_forward_hook(lambda *call: torch.zeros(1, grid.tokens, call[-1].shape[-1])))
        Wan().predict(model, batch.latents_BCTHW, torch.tensor([0.4]), batch, task)
        for handle in handles:
            handle.remove()
        return last["out"]

    with torch.no_grad():
        arguments = {}
        handle = model.blocks[0].register_forward_hook(lambda *call: arguments.setdefault("out", call[-1]))
        Wan().predict(model, batch.latents_BCTHW, torch.tensor([0.4]), batch, task)
        handle.remove()
        everything = [*range(grid.tokens)]
        torch.testing.assert_close(output(everything, Wan().blocks(model)[:1]), arguments["out"], rtol=0, atol=1e-5)
        # Rotary embeddings are relative: with the same distances, attention is the same at other positions.
        some = [token for token in everything if token % 3]
        assert output(some, Wan().blocks(model)[:2]).shape == (1, len(some), Wan().hidden_size(model))
