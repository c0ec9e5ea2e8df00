"""Losses and samples of training, compared with the definition of the loss and the pipelines that use its result."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cache.order.schedule import BatchSchedule
from cache.sets.trainset import TrainSet
from schemas.geometry import Bucket
from tests.trainer.pipelines import absent_parts
from tests.trainer.runs import opened, plain_batch, plan_batches, train
from trainer.batch import Batch
from trainer.data import BatchLoader
from trainer.families import kandinsky5
from trainer.families.base import module_of
from trainer.families.kandinsky5 import Kandinsky5
from trainer.noise import seeded_noise
from trainer.run import metrics
from trainer.validation import SHIFT_KEYS

pytestmark = pytest.mark.slow

#: An adapter that a pipeline loads, given frames, full rank. tests/trainer/families/ compares each family's
#: predictions and denoising.
KINDS = ["t2i", "i2v", "sana"]
ADAPTERS = {"sana": {"type": "full"}}


def trained(config) -> tuple[TrainSet, BatchSchedule]:
    train(config)
    data = opened(config)
    return data, plan_batches(config, data)


def stock_transformer(config):
    folder = Path(config.model.path) / "transformer"
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    return getattr(diffusers, name).from_pretrained(folder).eval()


@pytest.mark.parametrize(("kind", "shift"), [("t2i", 6.0), ("i2v", None), ("sana", 6.0)])
def test_the_loss_is_the_definition(ready, kind, shift) -> None:
    """With the stock transformer: |v - (noise - x0)|^2 at x = (1 - sigma) x0 + sigma noise, without given frames.

    With another loss, weight and distribution if a shift is set; for images the number of tokens sets the shift: the
    tokens are few, so the shift is 1.65.
    """
    spread = {"sampling": "mode", "low_discrepancy": True}
    settings = {"loss": {"type": "huber", "huber_c": 0.5, "weighting": "min_snr"}}
    settings |= {"timesteps": spread | {"auto_shift": True}} if kind == "t2i" else {"timesteps": spread, "shift": shift}
    more = settings if shift else {}
    config = ready(kind, steps=1, caption_dropout=0.0, adapter=ADAPTERS.get(kind, {"rank": 2}), **more)
    data, plan = trained(config)
    (part,) = BatchLoader(data, plan, 0.0, low_discrepancy=bool(more)).step(0).micro_batches
    noise, draws = part.noise_BCTHW, part.uniform_B
    modes = 1 - draws - 1.29 * (torch.cos(torch.pi * draws / 2) ** 2 - 1 + draws)
    u = modes if more else torch.sigmoid(torch.special.ndtri(draws))
    s = 1.6487 if more and kind == "t2i" else shift or config.model.flavour_spec.shift
    sigma = s * u / (1 + (s - 1) * u)
    factor = min((1 - sigma.item()) ** 2, 5 * sigma.item() ** 2) if more else 1
    huber = lambda error: 2 * 0.5 * ((error.square() + 0.25).sqrt() - 0.5)  # noqa: E731
    expected = factor * defined_loss(config, part.batch, noise, sigma, huber if more else torch.square)
    (line,) = (line for line in metrics.read_metrics(config.run_folder / "metrics.jsonl") if "loss" in line)
    assert line["loss"] == pytest.approx(expected, rel=1e-4 if more else 1e-5)


def defined_loss(config, batch: Batch, noise: torch.Tensor, sigma: torch.Tensor, cost=torch.square) -> float:
    """The loss of one sample, by the stock transformer. cost: function of the velocity's errors."""
    clean_frames = 1 if config.model.task == "i2v" else 0
    x0, model = batch.latents_BCTHW, stock_transformer(config)
    family = module_of(config.model.family_spec)
    arguments = family.model_inputs(model, (1 - sigma) * x0 + sigma * noise, sigma, batch, config.model.task)
    assert arguments.pop("text_mask_BL", None) is None, "one caption has no padding"
    with torch.no_grad():
        velocity = model(**arguments).sample
    velocity = velocity.movedim(-1, 1) if isinstance(family, Kandinsky5) else velocity[:, :, None]
    return cost((velocity - (noise - x0))[:, :, clean_frames:]).mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_the_eval_loss_is_the_definition_at_its_sigmas(ready, kind) -> None:
    """Before the first step, when a LoRA has no effect; each sample's noise depends only on its identity."""
    look = {"eval_samples": 2, "eval_sigmas": [0.25, 0.75], "seed": 3}
    config = ready(kind, validation=look, steps=1, adapter=ADAPTERS.get(kind, {"rank": 2}))
    data, _ = trained(config)
    first = next(line for line in metrics.read_metrics(config.run_folder / "metrics.jsonl") if line["step"] == 0)
    by_bucket: dict[str, list[float]] = {}
    for sigma, result in zip((0.25, 0.75), first["eval_by_sigma"].values(), strict=True):
        losses = []
        for row in (len(data) // 4, 3 * len(data) // 4):
            batch = plain_batch([data.sample(row)])
            noise = seeded_noise([f"3/{batch.ids[0]}"], "eval", batch.latents_BCTHW.shape[1:])
            losses.append(defined_loss(config, batch, noise, torch.tensor([sigma])))
            by_bucket.setdefault(data.bucket(row), []).append(losses[-1])
        assert result == pytest.approx(sum(losses) / 2, rel=1e-5)
    means = {bucket: sum(losses) / len(losses) for bucket, losses in by_bucket.items()}
    assert len(means) == 2 and first["eval_by_bucket"] == pytest.approx(means, rel=1e-5)


def pipeline(config, transformer):
    """The flavour's pipeline around a transformer and the checkpoint's scheduler at validation.shift."""
    folder, expected = (
        Path(config.model.path),
        getattr(diffusers, config.model.family_spec.pipelines[config.model.task]),
    )
    name = json.loads((folder / "scheduler/scheduler_config.json").read_text())["_class_name"]
    scheduler_class = getattr(diffusers, name)
    settings = scheduler_class.load_config(folder / "scheduler")
    key = next(key for key in SHIFT_KEYS if key in scheduler_class.from_config(settings).config)
    scheduler = scheduler_class.from_config(settings, **{key: config.validation.shift})
    pipe = expected(**absent_parts(expected) | {"transformer": transformer, "scheduler": scheduler})
    pipe.resolutions = [(64, 64), (96, 64)]  # the image pipelines' list of sizes, each too large here
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sampled(config, pipe, batch: Batch, negative: Batch, noise: torch.Tensor, steps: int, size: Bucket) -> torch.Tensor:
    """latents_BCTHW of the pipeline's own denoising loop, from the same noise and condition."""
    texts, task = {}, config.model.task
    for prefix, part in (("", batch), ("negative_", negative)):
        rows = part.text_BLD.shape[1]
        if config.model.family == "sana":
            texts[f"{prefix}prompt_embeds"] = torch.nn.functional.pad(part.text_BLD, (0, 0, 0, 12 - rows))
            texts[f"{prefix}prompt_attention_mask"] = (torch.arange(12)[None] < rows).long()
            continue
        texts |= {f"{prefix}prompt_embeds_qwen": part.text_BLD, f"{prefix}prompt_embeds_clip": part.pooled_BD}
        texts |= {f"{prefix}prompt_cu_seqlens": torch.tensor([0, rows], dtype=torch.int32)}
    options = {"num_frames": 4 * noise.shape[2] - 3} if config.model.family_spec.video else {}
    if config.model.family == "sana":
        options |= {"latents": noise[:, :, 0], "negative_prompt": None, "use_resolution_binning": False}
    else:
        start = kandinsky5.visual_input(noise, batch.condition_BCTHW, task, pipe.transformer.visual_cond)
        pipe.prepare_latents = lambda *_, **__: start
        options |= {"image": Image.new("RGB", (size.width, size.height))} if task == "i2v" else {}
    result = pipe(
        **texts,
        **options,
        height=size.height,
        width=size.width,
        num_inference_steps=steps,
        output_type="latent",
        return_dict=False,
        **{config.model.family_spec.guidance_argument: config.validation.guidance},
    )[0]
    return result[:, :, None] if result.ndim == 4 else result.movedim(-1, 1)


LOOK = {"every": 2, "steps": [3, 2], "guidance": 2.5, "shift": 2.0, "seed": 7}


@pytest.mark.parametrize("kind", KINDS)
def test_validation_latents_are_the_pipelines_with_what_was_saved(
    make_config, make_set, helpers, kind, record_property
) -> None:
    """After training: the result loaded by the pipeline's own loader, its own denoising, cached prompts, same noise."""
    config = make_config(kind, validation=LOOK, steps=2, adapter=ADAPTERS.get(kind, {"rank": 4, "alpha": 6.0}))
    items, null, (prompt,) = helpers.mixed_items(config)
    # With fewer frames, the numbers of the i2v pipeline are not finite.
    frames = "@17" if config.model.family_spec.video else "@1"
    wide = items[2].latent[:, :1] if kind == "i2v" else None
    prompts = [replace(prompt, bucket=f"64x64{frames}"), replace(prompt, bucket=f"96x64{frames}", condition=wide)]
    make_set(config, items, null, prompts)
    data, _ = trained(config)
    run, largest = config.run_folder, 0.0
    pipe = pipeline(config, stock_transformer(config))
    if kind == "sana":
        pipe.transformer = type(pipe.transformer).from_pretrained(run / "model" / "transformer")
    else:
        pipe.load_lora_weights(run / "adapter")
    assert len(list((run / "validation" / "step-000002").iterdir())) == 4
    for prompt, steps in itertools.product(data.validation, (3, 2)):
        size = Bucket.parse(prompt.bucket)
        name = f"one_{prompt.bucket.removesuffix('@1').replace('@', 'x')}_{steps}steps.safetensors"
        latent = load_file(run / "validation" / "step-000002" / name)["latent"]
        noise = seeded_noise(["7/one"], "validation", latent.shape)
        sample = data.sample(0)
        tensors = sample.tensors | ({} if prompt.condition is None else {"condition": prompt.condition})
        batch, negative = (
            plain_batch([type(sample)("one", tensors, text)], prompt.bucket) for text in (prompt.text, prompt.negative)
        )
        expected = sampled(config, pipe, batch, negative, noise, steps, size)[0]
        assert (load_file(run / "validation" / "step-000000" / name)["latent"] - latent).abs().max() > 1e-3
        largest = max(largest, (latent - expected).abs().max().item())
    record_property("largest difference", largest)
    assert largest <= 2e-5
