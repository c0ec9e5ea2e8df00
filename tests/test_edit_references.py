"""Qwen-Image-Edit from the files to what validation makes, against the installed pipelines."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from cache.sets.plans import newest_plan
from cache.sets.set_lookup import find_configured_id, open_set
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.recipe import plan_key
from stages import bucket, discover, encode_latents, encode_text, index
from tests.forms import long
from tests.project import Project
from tests.qwen_processor import Processor
from tests.trainer.pipelines import denoise
from trainer.data import to_tensor
from trainer.families import qwen_image
from trainer.families.qwen_image import QwenImage
from trainer.validation import draw_inputs, list_samples, load_scheduler

STAGES = (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run)
SIZES = {"first": (97, 65), "second": (65, 211)}  # of the source images, which are stretched
CAPTION, NEGATIVE, STEPS, GUIDANCE = "a picture", " ", 2, 4.0


@pytest.fixture
def referenced(project):
    """kind -> a project: a and b share their references, in another order, and their caption; c has one of them."""

    def make(kind: str) -> Project:
        several = kind.endswith("plus")
        names = [f"pictures/{name}.png" for name in ("second", "first")]
        prompts = [{"name": "own", "prompt": CAPTION, "image": names if several else names[0]}, {"name": "data"}]
        prompts[1]["prompt"] = "another"
        home = project(kind, cache={"unit_mib": 1.0}, validation={"size": "64x64", "prompts": prompts})
        for seed, (name, size) in enumerate(SIZES.items()):
            home.image(f"../pictures/{name}.png", size, seed=10 + seed)
        for seed, (name, given) in enumerate({"a": "first second", "b": "second first", "c": "first"}.items()):
            home.image(f"{name}.png", (64, 64), seed=seed, caption=CAPTION)
            for folder, source in zip(("one", "two")[: 1 + several], given.split(), strict=False):
                (home.folder / folder).mkdir(exist_ok=True)
                picture = (home.folder / f"pictures/{source}.png").read_bytes()
                (home.folder / f"{folder}/{name}.png").write_bytes(picture)
        home.settings["datasets"][0]["conditioning_data"] = ["one", "two"] if several else "one"
        return home

    return make


def make_pipeline(home: Project, kind: str):
    folder = Path(home.settings["model"]["path"])
    pipe = getattr(diffusers, home.config().model.family_spec.pipelines["i2i"])(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage.from_pretrained(folder / "vae"),
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval(),
        tokenizer=None,
        processor=Processor(folder / "tokenizer", folder / "processor"),
        transformer=diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_2509(home: Project, folder: Path) -> None:
    """Where references have the noise level of the image, and not 0 as from 2511 on."""
    shutil.copytree(home.settings["model"]["path"], folder)
    path = folder / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"zero_cond_t": False}))
    home.settings["model"] |= {"path": str(folder), "flavour": "qwen-image-edit-2509"}


def make_small(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    family, condition, template = FAMILIES[kind], FAMILIES[kind].conditions["i2i"], FAMILIES[kind].templates["i2i"]
    edges = (128, 96 if kind.endswith("plus") else 128)
    sizes = [
        replace(each, area=edge**2) for each, edge in zip((condition.size, template.image_size), edges, strict=True)
    ]
    changed = replace(condition, size=sizes[0]), replace(template, image_size=sizes[1])
    small = replace(family, conditions={"i2i": changed[0]}, templates={"i2i": changed[1]})
    monkeypatch.setitem(FAMILIES, kind, small)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", sizes[0].area)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", sizes[1].area)
    whole = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: whole(sizes[0].area, ratio))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "version", "small"),
    [
        ("qwen-image-edit-plus", "2511", True),
        long("qwen-image-edit-plus", "2509", True),
        ("qwen-image-edit", "first", True),
        long("qwen-image-edit-plus", "2511", False),
        long("qwen-image-edit", "first", False),
    ],
)
def test_what_is_cached_and_sampled_is_the_pipelines(
    referenced, monkeypatch, tmp_path, kind, version, small, record_property
) -> None:
    """Each reference is encoded once, in another order it is another sample and another text. small: with pictures of
    smaller areas, here and in the pipeline, which has constants for them."""
    torch.set_num_threads(1)
    if small:
        make_small(monkeypatch, kind)
    home, several = referenced(kind), kind.endswith("plus")
    if version == "2509":
        make_2509(home, tmp_path / "2509")
    assert [home.run(program).exit_code for program in STAGES] == [0] * len(STAGES)
    config = home.config()
    store = Store(config.root)
    data = open_set(store, find_configured_id(store, config), config.model.family, config.model.task)
    assert len(data) == 3
    texts = {to_tensor(data.sample(row).text["embeds"]).numpy().tobytes() for row in range(3)}
    ids = {data.sample(row).id for row in range(3)}
    assert len(ids) == 3 and len(texts) == (3 if several else 2), "two have the same reference, and so the same text"
    assert {bucket.run: 0, encode_text.run: 0, encode_latents.run: 0} == {
        run: home.run(run).done for run in (bucket.run, encode_text.run, encode_latents.run)
    }
    (own,) = (prompt for prompt in data.validation if prompt.name == "own")
    pipe, seen = make_pipeline(home, kind), {}
    encode_prompt, prepare = pipe.encode_prompt, pipe.prepare_latents

    def encoded(**options):
        made = encode_prompt(**options)
        seen.setdefault("texts", []).append(made[0][0])
        return made

    def prepared(*arguments, **options):
        made = prepare(*arguments, **options)
        seen["references"] = made[1]
        return made

    def predicted(module, _, named, made):
        seen.setdefault("shapes", named["img_shapes"])
        seen.setdefault("prediction", made[0][:, :16])

    pipe.encode_prompt, pipe.prepare_latents = encoded, prepared
    pipe.transformer.register_forward_hook(predicted, with_kwargs=True)
    images = [Image.open(home.folder / f"pictures/{name}.png") for name in ("second", "first")]
    sample = next(each for each in list_samples(config, data) if data.validation[each.prompt_index].name == "own")
    batch, negative, noise = draw_inputs(config.model.family_spec, own, sample, torch.device("cpu"))
    with torch.no_grad():
        wanted = pipe(
            image=images if several else images[0],
            prompt=CAPTION,
            negative_prompt=NEGATIVE,
            true_cfg_scale=GUIDANCE,
            num_inference_steps=STEPS,
            height=64,
            width=64,
            latents=pipe._pack_latents(noise.transpose(1, 2), 1, 16, 8, 8),
            output_type="latent",
            return_dict=False,
        )[0]
    packed = torch.cat([*map(qwen_image.pack, batch.references)], 1)
    assert [(1, each.shape[3] // 2, each.shape[4] // 2) for each in batch.references] == seen["shapes"][0][1:]
    gaps = {
        "text": (batch.text_BLD[0] - seen["texts"][0]).abs().max().item(),
        "negative": (negative.text_BLD[0] - seen["texts"][1]).abs().max().item(),
        "references": (packed - seen["references"]).abs().max().item(),
    }
    model, scheduler = QwenImage().load(config.model.source), load_scheduler(config.model.source)
    with torch.no_grad():
        prediction = QwenImage().predict(model, noise, torch.ones(1), batch, "i2i")
    gaps["prediction"] = (qwen_image.pack(prediction) - seen["prediction"]).abs().max().item()
    made = denoise(model, QwenImage(), "i2i", batch, negative, noise, scheduler, STEPS, GUIDANCE)
    gaps["denoised"] = (qwen_image.pack(made) - wanted).abs().max().item()
    record_property("largest differences", gaps)
    assert (wanted - qwen_image.pack(noise)).std() > 0.1 and seen["texts"][0].std() > 0.1
    assert max(gaps.values()) <= 1e-5, gaps


@pytest.mark.slow
@pytest.mark.long
def test_units_are_divided_again_and_a_damaged_reference_rejects_its_samples(referenced, monkeypatch) -> None:
    """Of texts with references, in a root in which another family was planned before."""
    kind = "qwen-image-edit-plus"
    make_small(monkeypatch, kind)
    home = referenced(kind)
    home.settings["validation"]["prompts"] = []
    home.settings["stages"]["max_reject_fraction"] = 1.0
    home.run(discover.run)
    home.run(bucket.run, "model.family=flux2-klein", "model.flavour=klein-base-4b-i2i", "model.path=null")
    before = home.run(bucket.run, "cache.unit_mib=64").details["new_units"]["text"]
    divided = home.run(bucket.run, divide_again=True)
    assert divided.details["new_units"]["text"] > before == 2  # of one reference, and of two
    plan = newest_plan(Store(home.root), plan_key(home.config(), 16))
    texts = [text for unit in plan.units("text") for text in unit.members]
    assert sorted(texts) == sorted(plan.active_text_ids.to_pylist()) and len(texts) == 6
    for place in ("two/a.png", "one/b.png"):  # the same file
        (home.folder / place).write_bytes(b"no picture")
    assert len(home.run(encode_text.run).rejects) == 4  # a caption and a null text of each of the two
    home.run(encode_latents.run)
    assert sorted(home.rejects(home.run(index.run))) == ["a.png", "b.png"]
