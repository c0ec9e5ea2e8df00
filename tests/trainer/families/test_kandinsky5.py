"""Compared with the installed pipelines, on tiny checkpoints in float32."""

from functools import partial

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from diffusers.models.transformers import transformer_kandinsky as stock

from schemas.catalog import FAMILIES
from schemas.config.training import Adapter
from tests.trainer.families.batches import check_batch_mates, sample_losses
from tests.trainer.pipelines import denoise, pad_text, random
from trainer.batch import Batch
from trainer.families import kandinsky5
from trainer.families.kandinsky5 import Kandinsky5
from trainer.setup import adapters
from trainer.setup.adapters import make_trainable
from trainer.validation import load_scheduler

KINDS = {
    "t2i": "kandinsky5-image-t2i",
    "i2i": "kandinsky5-image-i2i",
    "t2v": "kandinsky5-video-t2v",
    "i2v": "kandinsky5-video-i2v",
}
NABLA = "kandinsky5-video-t2v-nabla"
TASKS = list(KINDS)
VIDEO = ("t2v", "i2v")
PIXELS = (32, 48)  # height, width


run = partial(sample_losses, Kandinsky5(), task="t2v")
pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(lengths, latent_CTHW=(16, 1, 4, 6), condition=False, seed=0) -> Batch:
    """Captions of the given numbers of tokens, with random latents."""
    count, (channels, _, height, width) = len(lengths), latent_CTHW
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    first = random(count, channels, 1, height, width, seed=seed + 1) if condition else None
    latents = random(count, *latent_CTHW, seed=seed)
    pooled = random(count, 32, seed=seed + 2)
    return Batch(latents, first, text, mask, pooled, [str(i) for i in range(count)], "48x32@1")


def make_pipeline(folder, task, transformer=None):
    """The task's pipeline from its components, without text encoders."""
    vae_class = diffusers.AutoencoderKLHunyuanVideo if task in VIDEO else diffusers.AutoencoderKL
    pipe = getattr(diffusers, FAMILIES[f"kandinsky5-{'video' if task in VIDEO else 'image'}"].pipelines[task])(
        transformer=transformer or stock.Kandinsky5Transformer3DModel.from_pretrained(folder / "transformer"),
        vae=vae_class.from_pretrained(folder / "vae"),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    pipe.resolutions = [(PIXELS[1], PIXELS[0])]  # the image pipelines' list of sizes, each too large here
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture() -> PIL.Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (*PIXELS, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def drawn_by(pipe, task, frames, seed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(noise_BCTHW, condition_BCTHW) as the pipeline's prepare_latents draws them from this seed."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (side // 8 for side in PIXELS)
    noise = torch.randn(1, frames, height, width, 16, generator=generator).movedim(-1, 1)
    if task in ("t2i", "t2v"):
        return noise, None
    processor = pipe.video_processor if task == "i2v" else pipe.image_processor
    pixels = processor.preprocess(picture(), height=PIXELS[0], width=PIXELS[1])
    with torch.no_grad():
        posterior = pipe.vae.encode(pixels[:, :, None] if task == "i2v" else pixels).latent_dist
    condition = posterior.sample(generator=generator) * pipe.vae.config.scaling_factor
    return noise, condition if task == "i2v" else condition[:, :, None]


@pytest.mark.parametrize("task", TASKS)
def test_model_input_equals_prepare_latents(tiny, task):
    pipe = make_pipeline(tiny(KINDS[task]), task)
    sizes = {"batch_size": 1, "height": PIXELS[0], "width": PIXELS[1]}
    sizes |= {"num_frames": 9} if task in VIDEO else {}
    sizes |= {"image": picture()} if task in ("i2i", "i2v") else {}
    generator = torch.Generator().manual_seed(5)
    expected = pipe.prepare_latents(**sizes, dtype=torch.float32, device=torch.device("cpu"), generator=generator)
    noise, condition = drawn_by(pipe, task, 3 if task in VIDEO else 1, 5)
    model_input = kandinsky5.visual_input(noise, condition, task, pipe.transformer.visual_cond)
    assert model_input.shape[-1] == (16 if task == "t2i" else 33)
    assert torch.equal(model_input, expected)


def test_scale_factor_equals_the_pipelines(tiny):
    pipe, model = make_pipeline(tiny(KINDS["t2v"]), "t2v"), Kandinsky5().load(str(tiny(KINDS["t2v"])))
    for height, width in ((512, 768), (512, 512), (480, 848), (384, 688), (720, 1280), (256, 256)):
        batch = make_batch([3], (16, 1, height // 8, width // 8))
        arguments = Kandinsky5().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "t2v")
        assert tuple(arguments["scale_factor"]) == pipe._get_scale_factor(height, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("task", TASKS)
def test_denoised_latents_equal_the_pipelines(tiny, task, dtype, record_property):
    """In bfloat16 to the last bit: the timestep, the guidance and the steps are rounded as in the pipeline."""
    folder = tiny(KINDS[task])
    plain = stock.Kandinsky5Transformer3DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
    pipe, frames = make_pipeline(folder, task, plain), 5 if task in VIDEO else 1
    batch, negative = make_batch([7], seed=1).to("cpu", dtype), make_batch([4], seed=2).to("cpu", dtype)
    noise, condition = drawn_by(pipe, task, frames, 5)
    noise, condition = noise.to(dtype), None if condition is None else condition.to(dtype)
    if dtype != torch.float32:  # the encoder, which draws the condition, stays in float32 here
        start = kandinsky5.visual_input(noise, condition, task, plain.visual_cond)
        pipe.prepare_latents = lambda *_, **__: start
    texts = {}
    for prefix, part in (("", batch), ("negative_", negative)):
        texts[f"{prefix}prompt_embeds_qwen"] = part.text_BLD
        texts[f"{prefix}prompt_embeds_clip"] = part.pooled_BD
        texts[f"{prefix}prompt_cu_seqlens"] = torch.tensor([0, part.text_BLD.shape[1]], dtype=torch.int32)
    options = {"num_frames": 17} if task in VIDEO else {}
    options |= {"image": picture()} if task in ("i2i", "i2v") else {}
    expected = pipe(
        **texts,
        **options,
        height=PIXELS[0],
        width=PIXELS[1],
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
        return_dict=False,
    )[0].movedim(-1, 1)
    batch.condition_BCTHW = negative.condition_BCTHW = condition
    model, scheduler = Kandinsky5().load(str(folder), dtype=dtype), load_scheduler(str(folder))
    latents = denoise(model, Kandinsky5(), task, batch, negative, noise, scheduler, 4, 3.0)
    assert latents.shape == (1, 16, frames, 4, 6) and latents.dtype == dtype
    assert not latents.requires_grad, "it would keep every step of it in memory"
    assert expected.std() > 0.1
    difference = (latents - expected).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= (1e-4 if dtype == torch.float32 else 0)


def test_i2v_without_later_frames_to_compare_with_keeps_its_latents():
    latents = random(1, 16, 4, 4, 4)
    assert torch.equal(Kandinsky5().postprocess_latents(latents, "i2v"), latents)
    assert not torch.equal(Kandinsky5().postprocess_latents(random(1, 16, 5, 4, 4), "i2v"), random(1, 16, 5, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["kandinsky5-video-t2v", NABLA])
def test_without_padding_every_bit_equals_the_stock_model(tiny, dtype, kind):
    folder = str(tiny(kind))
    model = Kandinsky5().load(folder, dtype=dtype)
    plain = stock.Kandinsky5Transformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=dtype)
    model.register_to_config(attention_type="regular")  # the stock NABLA needs compiled flex attention
    batch = make_batch([5, 5], (16, 2, 4, 6))
    arguments = Kandinsky5().model_inputs(model, batch.latents_BCTHW, torch.tensor([0.3, 0.9]), batch, "t2v")
    assert arguments.pop("text_mask_BL") is None
    with torch.no_grad():
        ours, theirs = (m(**arguments, return_dict=False) for m in (model, plain))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, task, record_property):
    """With a float32 rotary: bfloat16 would make a last bit's difference 60,000 times larger."""
    model = Kandinsky5().load(str(tiny(KINDS[task])), float32_rotary=True)
    batch = make_batch([3, 17, 8], (16, 2 if task in VIDEO else 1, 4, 6), condition=task in ("i2i", "i2v"))
    check_batch_mates(Kandinsky5(), model, batch, record_property, task, least=1e-6)


def test_i2v_predicts_from_the_clean_first_frame_alone(tiny):
    model = Kandinsky5().load(str(tiny(KINDS["i2v"])))
    batch = make_batch([4], (16, 3, 4, 6), condition=True)
    noisy = random(1, 16, 3, 4, 6, seed=9)
    changed = noisy.clone()
    changed[:, :, 0] += 5
    with torch.no_grad():
        first, second = (Kandinsky5().predict(model, x, torch.tensor([0.5]), batch, "i2v") for x in (noisy, changed))
        assert torch.equal(first, second)
        batch.condition_BCTHW = batch.condition_BCTHW + 1
        assert not torch.equal(first, Kandinsky5().predict(model, noisy, torch.tensor([0.5]), batch, "i2v"))


def with_lora(model):
    torch.manual_seed(0)
    make_trainable(model, Kandinsky5(), Adapter(rank=4))
    for name, parameter in adapters.trainable_parameters(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def gradients_of(model, batch) -> dict[str, torch.Tensor]:
    run(model, batch).sum().backward()
    return {name: p.grad for name, p in adapters.trainable_parameters(model).items()}


@pytest.mark.slow
def test_checkpointing_gives_the_same_gradients_with_lora_and_padding(tiny):
    batch = make_batch([3, 17, 8], (16, 2, 4, 6))
    plain, saving = (with_lora(Kandinsky5().load(str(tiny("kandinsky5-video-t2v")))) for _ in range(2))
    saving.enable_gradient_checkpointing()
    expected = gradients_of(plain, batch)
    # A second forward pass with a different mask before the first one's backward must not affect its recomputation.
    losses = run(saving, batch)
    run(saving, make_batch([9, 2, 17], (16, 2, 4, 6)))
    losses.sum().backward()
    for name, parameter in adapters.trainable_parameters(saving).items():
        assert torch.equal(parameter.grad, expected[name]), name


def test_bfloat16_keeps_time_embeddings_and_modulations_in_float32(tiny):
    model = Kandinsky5().load(str(tiny("kandinsky5-video-t2v")), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_float32 = "time_embeddings" in name or "modulation" in name
        assert parameter.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
    assert Kandinsky5().compute_dtype(model) == torch.bfloat16
    assert torch.isfinite(run(with_lora(model), make_batch([3, 5], (16, 1, 4, 6)))).all()


@pytest.mark.parametrize(
    ("kind", "task", "message"),
    [
        ("kandinsky5-image-t2i", "i2i", "does not support i2i"),
        ("kandinsky5-image-i2i", "t2i", "does not support t2i"),
        ("kandinsky5-video-i2v", "i2v", "needs the condition's latent"),
    ],
)
def test_a_checkpoint_or_batch_for_another_task_is_refused(tiny, kind, task, message):
    model = Kandinsky5().load(str(tiny(kind)))
    batch = make_batch([3], condition=task == "i2i")
    with pytest.raises(ValueError, match=message):
        Kandinsky5().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, task)
