"""What only Kandinsky 5 has: padding masked in its own attention, parts in float32, and checks of the task."""

from functools import partial

import pytest
import torch
from diffusers.models.transformers import transformer_kandinsky as stock

from schemas.config.training import Adapter
from tests.trainer.families.batches import sample_losses
from tests.trainer.pipelines import pad_text, pipeline, random
from trainer.batch import Batch
from trainer.families.kandinsky5 import Kandinsky5
from trainer.setup import adapters
from trainer.setup.adapters import make_trainable

KIND, NABLA = "kandinsky5-video-t2v", "kandinsky5-video-t2v-nabla"


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


def test_scale_factor_equals_the_pipelines(tiny):
    pipe, model = pipeline(KIND, tiny(KIND)), Kandinsky5().load(str(tiny(KIND)))
    for height, width in ((512, 768), (512, 512), (480, 848), (384, 688), (720, 1280), (256, 256)):
        batch = make_batch([3], (16, 1, height // 8, width // 8))
        arguments = Kandinsky5().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "t2v")
        assert tuple(arguments["scale_factor"]) == pipe._get_scale_factor(height, width)


def test_i2v_without_later_frames_to_compare_with_keeps_its_latents():
    latents = random(1, 16, 4, 4, 4)
    assert torch.equal(Kandinsky5().postprocess_latents(latents, "i2v"), latents)
    assert not torch.equal(Kandinsky5().postprocess_latents(random(1, 16, 5, 4, 4), "i2v"), random(1, 16, 5, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [KIND, NABLA])
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


def test_i2v_predicts_from_the_clean_first_frame_alone(tiny):
    model = Kandinsky5().load(str(tiny("kandinsky5-video-i2v")))
    batch = make_batch([4], (16, 3, 4, 6), condition=True)
    noisy = random(1, 16, 3, 4, 6, seed=9)
    other = noisy.clone()
    other[:, :, 0] += 5
    with torch.no_grad():
        first, second = (Kandinsky5().predict(model, x, torch.tensor([0.5]), batch, "i2v") for x in (noisy, other))
        assert torch.equal(first, second)
        batch.condition_BCTHW = batch.condition_BCTHW + 1
        assert not torch.equal(first, Kandinsky5().predict(model, noisy, torch.tensor([0.5]), batch, "i2v"))


def with_lora(model):
    torch.manual_seed(0)
    make_trainable(model, Kandinsky5(), "t2v", Adapter(rank=4))
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
    plain, saving = (with_lora(Kandinsky5().load(str(tiny(KIND)))) for _ in range(2))
    saving.enable_gradient_checkpointing()
    wanted = gradients_of(plain, batch)
    # Another forward pass with another mask before this one's backward must not reach its recomputation.
    losses = run(saving, batch)
    run(saving, make_batch([9, 2, 17], (16, 2, 4, 6)))
    losses.sum().backward()
    for name, parameter in adapters.trainable_parameters(saving).items():
        assert torch.equal(parameter.grad, wanted[name]), name


def test_bfloat16_keeps_time_embeddings_and_modulations_in_float32(tiny):
    model = Kandinsky5().load(str(tiny(KIND)), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        kept = "time_embeddings" in name or "modulation" in name
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert Kandinsky5().compute_dtype(model) == torch.bfloat16
    assert torch.isfinite(run(with_lora(model), make_batch([3, 5], (16, 1, 4, 6)))).all()


@pytest.mark.parametrize(
    ("kind", "task", "message"),
    [
        ("kandinsky5-image-t2i", "i2i", "i2i"),
        ("kandinsky5-image-i2i", "t2i", "t2i"),
        ("kandinsky5-video-i2v", "i2v", "needs the condition's latent"),
    ],
)
def test_a_checkpoint_or_batch_for_another_task_is_refused(tiny, kind, task, message):
    model = Kandinsky5().load(str(tiny(kind)))
    batch = make_batch([3], condition=task == "i2i")
    with pytest.raises(ValueError, match=message):
        Kandinsky5().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, task)
