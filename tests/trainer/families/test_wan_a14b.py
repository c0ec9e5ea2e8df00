"""Two experts, compared with the installed pipelines, on tiny checkpoints in float32."""

import json
from itertools import pairwise

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from examples.load_adapter import load_trained
from schemas.catalog import FAMILIES
from schemas.cli.console import Options, run_program
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from stages.encoding.vae.wan import Autoencoder
from stages.media.sample_reader import normalize_pixels
from tests.forms import long
from tests.trainer import runs
from tests.trainer.families.batches import check_batch_mates
from tests.trainer.pipelines import apply_as_comfyui, pad_text, random
from trainer.__main__ import run as train_program
from trainer.batch import Batch
from trainer.families import wan_a14b
from trainer.families.wan_a14b import WanA14B
from trainer.noise import seeded_noise
from trainer.validation import Denoising, load_scheduler

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
FAMILY = FAMILIES["wan2.2-a14b"]
TASKS = ["i2v", long("t2v")]
FRAMES, ROWS, COLUMNS = 3, 4, 6  # of latents
SIZES = {"height": ROWS * 8, "width": COLUMNS * 8, "num_frames": 9, "output_type": "latent"}


def make_batch(task, lengths, seed=0) -> Batch:
    text, mask = pad_text([random(length, 64, seed=seed + 100 + i) for i, length in enumerate(lengths)])
    latents = random(len(lengths), 16, FRAMES, ROWS, COLUMNS, seed=seed)
    condition = random(*latents.shape, seed=seed + 9) if task == "i2v" else None
    return Batch(latents, condition, text, mask, None, [str(i) for i in range(len(lengths))], "48x32@9")


def padded(text_BLD: torch.Tensor) -> torch.Tensor:
    """The text as the pipeline's `encode_prompt` returns it."""
    return torch.nn.functional.pad(text_BLD, (0, 0, 0, 512 - text_BLD.shape[1]))


def make_pipeline(task, folder):
    """The pipeline, as DiffusionPipeline.from_pretrained makes it from the folder, without text encoders."""
    none = dict.fromkeys(("text_encoder", "tokenizer", *(["image_encoder", "image_processor"] * (task == "i2v"))))
    pipe = getattr(diffusers, FAMILY.pipelines[task]).from_pretrained(folder, **none, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flavour_of(task):
    return next(flavour for flavour in FAMILY.flavours.values() if flavour.task == task)


@pytest.mark.parametrize("task", TASKS)
def test_condition_predictions_and_denoised_latents_equal_the_pipelines(tiny, record_property, task):
    """Guidance scales 4 and 3; the expert changes between two of six steps."""
    folder, experts = tiny(f"wan2.2-a14b-{task}"), flavour_of(task).experts
    pipe = make_pipeline(task, folder)
    assert pipe.config.boundary_ratio == experts["high"].lowest == experts["low"].highest
    calls = []
    for part in ("transformer", "transformer_2"):
        keep = lambda module, args, kwargs, output, part=part: calls.append((part, kwargs, output[0]))  # noqa: E731
        getattr(pipe, part).register_forward_hook(keep, with_kwargs=True)
    batch, negative, options = make_batch(task, [9], seed=1), make_batch(task, [4], seed=2), {}
    if task == "i2v":
        colors = np.random.default_rng(0).integers(0, 256, (ROWS * 8, COLUMNS * 8, 3), dtype=np.uint8)
        options["image"] = Image.fromarray(colors)
        ours = Autoencoder(str(folder), None, torch.float32, torch.device("cpu"), normalization=FAMILY.normalization)
        pixels = torch.from_numpy(normalize_pixels(colors[None]))[None]
        clip = torch.nn.functional.pad(pixels, (0, 0, 0, 0, 0, 8))
        batch.condition_BCTHW = negative.condition_BCTHW = ours.encode(clip, [0], FAMILY.conditions[task].posterior)
    expected = pipe(
        **options,
        **SIZES,
        prompt_embeds=padded(batch.text_BLD),
        negative_prompt_embeds=padded(negative.text_BLD),
        num_inference_steps=6,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        generator=torch.Generator().manual_seed(5),
        return_dict=False,
    )[0]
    models = {expert.part: WanA14B().load(str(folder), part=expert.part) for expert in experts.values()}
    first_calls = {part: call for part, *call in reversed(calls)}
    assert first_calls.keys() == models.keys()
    for part, (inputs, output) in first_calls.items():
        noisy, conditions = inputs["hidden_states"].split((16, inputs["hidden_states"].shape[1] - 16), 1)
        if task == "i2v":
            assert (conditions - wan_a14b.given_frames(batch)).abs().max() <= 1e-5
        with torch.no_grad():
            prediction = WanA14B().predict(models[part], noisy, inputs["timestep"].double() / 1000, batch, task)
        gap = (prediction - output).abs().max().item()
        record_property(f"prediction of {part}", gap)
        assert gap <= 1e-5
    noise = random(1, 16, FRAMES, ROWS, COLUMNS, seed=5)
    scheduler = load_scheduler(str(folder))
    denoising = Denoising(models["transformer"], WanA14B(), task, batch, negative, noise, scheduler, 6)
    for expert, scale in zip(experts.values(), (4.0, 3.0), strict=True):
        denoising.take_steps(models[expert.part], scale, expert.lowest)
    gap = (denoising.finish() - expected).abs().max().item()
    record_property("denoised", gap)
    print(f"{task}, denoised: largest difference {gap:.2e} of {expected.abs().max():.2f}")
    assert gap <= 2e-5 and expected.std() > 0.1


@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradients_do_not_depend_on_batch_mates(tiny, record_property, task):
    model = WanA14B().load(str(tiny(f"wan2.2-a14b-{task}")), part="transformer_2")
    check_batch_mates(WanA14B(), model, make_batch(task, [3, 17, 8]), record_property, task)


def ended(config: Config, folder, *overrides: str) -> int:
    return run_program("train", train_program, Options(runs.write(config, folder), overrides, json=True))


@pytest.mark.parametrize("task", TASKS)
def test_both_experts_are_trained_one_after_the_other(make_config, make_set, helpers, tmp_path, capsys, task):
    """Each expert has its own run. The samples of the second run have the first run's adapter, too: they equal the
    samples of the pipeline with both files, loaded by its own loader. An interrupted run continues as if it was not
    interrupted."""
    look = {"every": 2, "steps": 6, "guidance": 4.0, "guidance_low": 3.0, "seed": 7, "eval_samples": 2}
    kind = "wan-a14b" if task == "t2v" else "wan-a14b-i2v"
    settings = {"validation": look, "steps": 2, "experts": "both", "adapter": {"rank": 4}, "checkpoint_every": 1}
    settings["adapter"]["formats"] = ["diffusers", "comfyui"]
    config = make_config(kind, **settings)
    make_set(config, *helpers.mixed_items(config))
    assert ended(config, tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["done"] == 4 and {"high", "low"} <= report["details"].keys()
    experts, data = dict(zip(("high", "low"), config.expert_runs, strict=True)), runs.opened(config)
    assert [run.run_folder.name for run in experts.values()] == ["run-high", "run-low"]
    for name, run in experts.items():
        lowest, highest = run.expert.range
        curve = runs.lines(run, "eval_by_sigma")[2]
        assert len(curve) == 4 and all(lowest <= float(sigma) < highest for sigma in curve)
        saved_config = load_config(run.run_folder / "config.yaml")
        assert (saved_config.train.experts, saved_config.eval_sigmas) == (name, run.eval_sigmas)

    pipe = make_trained(task, config)
    folders = [run.run_folder / "validation" for run in experts.values()]
    first, second = (load_file(folder / "step-000000" / "one.safetensors")["latent"] for folder in folders)
    assert (first - second).abs().max() > 1e-4, "the second run's samples use the first run's adapter"
    [prompt], path = data.validation, experts["low"].run_folder / "validation" / "step-000002" / "one.safetensors"
    with safe_open(path, "pt") as file:
        about, latent = json.loads(file.metadata()["latentpress"]), file.get_tensor("latent")
    assert (about["guidance"], about["guidance_low"]) == (4.0, 3.0)
    texts = [torch.from_numpy(text["embeds"].numpy())[None].float() for text in (prompt.text, prompt.negative)]
    noise = seeded_noise(["7/one"], "validation", latent.shape)
    options = {}
    if task == "i2v":
        options["image"] = Image.new("RGB", (64, 64))
        condition = torch.from_numpy(prompt.condition.numpy())[None].float()
        condition_frames = wan_a14b.given_frames(Batch(noise, condition, texts[0], torch.ones(1, 1), None, ["one"], ""))
        pipe.prepare_latents = lambda *_, **__: (noise, condition_frames)
    expected = pipe(
        **options,
        prompt_embeds=padded(texts[0]),
        negative_prompt_embeds=padded(texts[1]),
        latents=noise,
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=6,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        output_type="latent",
        return_dict=False,
    )[0]
    gap = (latent - expected[0]).abs().max().item()
    print(f"{task}, samples of both trained experts: largest difference {gap:.2e} of {expected.abs().max():.2f}")
    assert gap <= 2e-5


def make_trained(task, config):
    """The pipeline with the trained adapters, loaded by its own loader, compared with ComfyUI's files by its rule."""
    none = dict.fromkeys(("text_encoder", "tokenizer", *(["image_encoder", "image_processor"] * (task == "i2v"))))
    folder, cls = config.model.path, getattr(diffusers, FAMILY.pipelines[task])
    parts = {
        name: diffusers.WanTransformer3DModel.from_pretrained(folder, subfolder=name) for name in FAMILY.components
    }
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(folder, subfolder="scheduler")
    vae = diffusers.AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    boundary = flavour_of(task).experts["high"].lowest
    pipe = cls(**none, **parts, scheduler=scheduler, vae=vae, boundary_ratio=boundary)
    pipe.set_progress_bar_config(disable=True)
    for run in config.expert_runs:
        second_part, part = FAMILY.components[run.part == "transformer"], getattr(pipe, run.part)
        before = {name: value.clone() for name, value in getattr(pipe, second_part).state_dict().items()}
        load_trained(pipe, run)
        after = getattr(pipe, second_part).state_dict()
        assert part.peft_config and all(torch.equal(value, before[name]) for name, value in after.items())
        plain = diffusers.WanTransformer3DModel.from_pretrained(folder, subfolder=run.part)
        apply_as_comfyui(plain, run.run_folder / "adapter" / "comfyui_lora.safetensors")
        inputs = {
            "hidden_states": random(1, part.config.in_channels, 2, 4, 4),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": random(1, 512, 64),
        }
        with torch.no_grad():
            ours, theirs = (model(**inputs, return_dict=False)[0] for model in (plain, part))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        [names] = [list(load_file(path)) for path in (run.run_folder / "adapter").glob("pytorch*")]
        assert all(name.startswith("transformer.") for name in names)
    return pipe


@pytest.mark.long
def test_an_interrupted_run_of_an_expert_goes_on_with_the_same_numbers(
    make_config, make_set, helpers, tmp_path, capsys
):
    """`both` then continues with the second expert; a finished run is not trained again."""
    full_run, parted = (
        make_config("wan-a14b", name=name, experts="both", steps=3, adapter={"rank": 2}) for name in ("a", "b")
    )
    for config in (full_run, parted):
        make_set(config, *helpers.mixed_items(config))
    assert ended(full_run, tmp_path) == 0
    assert ended(parted, tmp_path, "train.steps=2", "train.experts=high") == 0
    assert not parted.expert_runs[1].run_folder.exists()
    assert ended(parted, tmp_path) == 0
    capsys.readouterr()
    for one, second in zip(full_run.expert_runs, parted.expert_runs, strict=True):
        assert runs.lines(one) == runs.lines(second) and list(runs.lines(one)) == [1, 2, 3]
        result, expected = (
            load_file(run.run_folder / "adapter" / "pytorch_lora_weights.safetensors") for run in (second, one)
        )
        assert all(torch.equal(result[name], value) for name, value in expected.items())
    first = [path.stat().st_mtime_ns for path in sorted(full_run.run_folder.rglob("*.safetensors"))]
    assert ended(full_run, tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["done"] == 0 and report["skipped"] == 6
    assert [path.stat().st_mtime_ns for path in sorted(full_run.run_folder.rglob("*.safetensors"))] == first
    assert all(one < second for one, second in pairwise(sorted(runs.lines(full_run))))


def test_what_does_not_go_with_the_experts_is_refused(make_config):
    def problem(kind="wan-a14b", **train) -> str:
        with pytest.raises(ValueError) as caught:
            make_config(kind, **train)
        return str(caught.value)

    assert "and low (transformer_2); valid: high, low, both" in problem(experts=None)
    assert "is not valid for wan2.1" in problem("wan", experts="high")
    assert "set guidance instead" in problem("wan", validation={"guidance_low": 2.0})
    assert "0.875 to 1" in problem(validation={"eval_sigmas": [0.2, 0.8]})
    assert "0 to 0.875" in problem(experts="both", timesteps={"sampling": "list", "values": [0.9]})
    assert "set train.experts to high" in problem(experts="low", methods={"scheduled_sampling": {}})
    assert make_config("wan-a14b", methods={"scheduled_sampling": {}}).train.methods.scheduled_sampling
    config = make_config("wan-a14b", validation={"eval_sigmas": [0.2, 0.875, 1.0]})
    assert config.eval_sigmas == (0.875, 1.0) and config.expert_runs == [config]
