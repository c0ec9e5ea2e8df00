"""`train --dry-run --card`: predicts what fits before anything is discovered, without a network."""

import json
import re
import socket
from pathlib import Path

import pytest
import torch

from schemas.catalog import FAMILIES
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.errors import INCOMPLETE, OK, USAGE
from stages.encoding.text.qwen_vl_images import MAX_CACHED_FEATURES
from stages.rehearsing.tiny_models import make_untrained
from stages.rehearsing.tiny_shapes import SHAPES
from tests.forms import long
from trainer.memory import card_fit
from trainer.memory.card_fit import check_card, find_plan, list_buckets, longest_text, read_shapes
from trainer.memory.estimate import sum_bytes
from trainer.memory.meter import MemoryMeter
from trainer.setup.load import empty_transformer

ROOT = Path(__file__).resolve().parents[3]
#: Billions of parameters, as published.
SIZES = {
    "t2i-lite-sft": 6.0, "i2i-lite-sft": 6.0, "t2v-lite-sft-5s": 2.0, "t2v-lite-sft-10s": 2.0, "i2v-lite-5s": 2.0,
    "t2v-pro-sft-5s-hd": 19.3, "i2v-pro-sft-5s": 19.3, "sana-1.6b-1024px": 1.6, "sana1.5-4.8b-1024px": 4.7,
    "sana-600m-512px": 0.59, "klein-base-4b": 3.88, "klein-base-9b": 9.08,
}  # fmt: skip
#: One flavour of each family and size; the others take turns.
SHORT = ("t2i-lite-sft", "t2v-lite-sft-5s", "i2v-pro-sft-5s", "sana-1.6b-1024px", "klein-base-4b")
ENCODERS = {"kandinsky5-image": 7.07 + 0.123, "kandinsky5-video": 7.07 + 0.123, "sana": 2.61}


def configured(family: str, tmp_path: Path, flavour: str | None = None, **sections) -> Config:
    dataset = {"id": "a", "instance_data_dir": "a", **sections.pop("dataset", {})}
    if flavour and flavour.startswith("i2i"):
        dataset["conditioning_data"] = "b"
    if family == "kandinsky5-video":
        dataset |= {"dataset_type": "video", "video": {"num_frames": 9}}
    model = {"family": family, "flavour": flavour, **sections.pop("model", {})}
    return Config.model_validate({"root": str(tmp_path / "work"), "model": model, "datasets": [dataset], **sections})


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    connect = socket.socket.connect

    def refuse(self, *place):
        assert self.family == socket.AF_UNIX, "a connection"
        return connect(self, *place)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.long
@pytest.mark.parametrize("name", ["kandinsky-image-lora-16gb", "kandinsky-video-lite-lora-16gb", "sana-lora-12gb"])
def test_a_recipe_fits_its_card_and_a_small_one_is_told_what_helps(name: str) -> None:
    config = load_config(ROOT / "examples" / "recipes" / f"{name}.yaml")
    card = float(name.rsplit("-", 1)[1].removesuffix("gb"))
    report = check_card(config, card, 1)
    assert report.exit_code == OK and {row["fits"] for row in report.details["memory"]} == {"yes"}
    assert "assumed" not in report.details and "no plan" in report.details["buckets_of"]
    largest = max(report.details["memory"], key=lambda row: row["all_gib"])
    report = check_card(config, largest["all_gib"] / 0.95, 1)
    rows = {row["program"]: row["fits"] for row in report.details["memory"]}
    assert report.exit_code == OK and rows[largest["program"]] == "barely" and "no" not in rows.values()
    assert "GiB" in report.details["barely_fits"][0]
    report = check_card(config, 2.5, 1)
    failed = {row["item"]: row["message"] for row in report.failed}
    assert report.exit_code == INCOMPLETE and "train" in failed and "would need less with" in failed["train"]
    assert all("GiB" in message for message in failed.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["image-style", "character", "editing-model", "video-motion"])
def test_the_configuration_of_a_guide_fits_16_gb(name: str, tmp_path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / f"docs/guides/{name}.md").read_text(), re.DOTALL)
    (tmp_path / "guide.yaml").write_text(next(block for block in blocks if block.startswith("root:")))
    report = check_card(load_config(tmp_path / "guide.yaml"), 16.0, 1)
    assert report.exit_code == OK and {row["fits"] for row in report.details["memory"]} == {"yes"}


@pytest.mark.slow
@pytest.mark.parametrize(("flavour", "billions"), [row if row[0] in SHORT else long(*row) for row in SIZES.items()])
def test_published_shapes_have_the_published_numbers_of_parameters(flavour: str, billions: float, tmp_path) -> None:
    family = next(name for name, row in FAMILIES.items() if flavour in row.flavours)
    config = configured(family, tmp_path, flavour)
    shapes, assumed = read_shapes(config.model)
    folder = tmp_path / "model"
    for part, shape in shapes.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(shape))
    local = configured(family, tmp_path, flavour, model={"path": str(folder)})
    numbers = sum(weight.numel() for weight in empty_transformer(local.model, local.part).parameters()) / 1e9
    assert numbers == pytest.approx(billions, rel=0.03) and not assumed
    if flavour not in ("t2i-lite-sft", "i2i-lite-sft", "sana-1.6b-1024px"):  # all others have equal text encoders
        return
    half = config.model_copy(update={"text": config.text.model_copy(update={"precision": "bfloat16"})})
    with_image = 0.68 if config.model.template.with_image else 0  # the vision model
    expected = ENCODERS[family] + with_image
    assert card_fit.estimate_text(half.model, half.text, shapes, 512).weights / 2e9 == pytest.approx(expected, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "part"),
    [("kandinsky5-image", "flux_vae"), ("kandinsky5-video", "hunyuan_vae"), ("qwen-image", "qwen_image_vae")],
)
def test_an_autoencoder_takes_what_is_predicted(family: str, part: str, tmp_path) -> None:
    """The tensors of a tiny autoencoder that encodes on a CPU."""
    latents = {"precision": "float32", "batch_pixels": 2 * 9 * 64 * 96}
    config = configured(family, tmp_path, latents=latents)
    frames = 9 if config.model.family_spec.video else 1
    result = card_fit.estimate_latents(config.model, config.latents, {"vae": SHAPES["tiny"][part]}, f"96x64@{frames}")
    vae, meter = make_untrained(part).eval(), MemoryMeter()
    assert result.weights == sum_bytes(vae.parameters())
    count = 2 * 9 // frames
    shape = (count, 3, 64, 96) if part == "flux_vae" else (count, 3, frames, 64, 96)
    with torch.no_grad(), meter:
        vae.encode(torch.zeros(shape))
    assert meter.peak <= result.activations <= 1.5 * meter.peak
    smaller = card_fit.estimate_latents(
        config.model,
        config.latents.model_copy(update={"slicing": True}),
        {"vae": SHAPES["tiny"][part]},
        f"96x64@{frames}",
    )
    assert smaller.activations < result.activations


def test_a_text_encoder_takes_no_more_than_is_predicted(tmp_path) -> None:
    config = configured("sana", tmp_path, text={"batch_tokens": 4096, "precision": "float32"})
    shape = SHAPES["tiny"]["gemma"] | {"vocab_size": 300}
    result = card_fit.estimate_text(
        config.model, config.text, {"text_encoder": shape}, config.model.template.max_length
    )
    model, meter = make_untrained("gemma", vocab_size=300).eval(), MemoryMeter()
    assert result.weights == sum_bytes(model.parameters())
    longest = config.model.template.max_length
    ids = torch.ones(4096 // longest, longest, dtype=torch.long)
    with torch.no_grad(), meter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert meter.peak <= result.activations <= 6 * meter.peak


def test_references_in_prompts_are_counted_for_text_encoder_and_transformer(tmp_path) -> None:
    """Up to three of 384x384 pixels; two by the datasets."""
    text = {"batch_tokens": 256, "precision": "float32"}
    config = configured("qwen-image-edit-plus", tmp_path, text=text, dataset={"conditioning_data": ["b", "c"]})
    assert longest_text(config, None) == 512 + 2 * 237
    result = card_fit.estimate_text(
        config.model, config.text, {"text_encoder": SHAPES["tiny"]["qwen"] | {"vocab_size": 300}}, 1
    )
    visual, meter = make_untrained("qwen").eval().model.visual, MemoryMeter()
    grid = torch.tensor([[1, 26, 28]])
    with torch.no_grad(), meter:
        visual(torch.zeros(int(grid.prod()), 1176), grid)
    cache_bytes = card_fit.CACHED_IMAGES * 237 * 64 * 4
    assert card_fit.CACHED_IMAGES == MAX_CACHED_FEATURES
    assert meter.peak <= result.activations - cache_bytes <= 6 * meter.peak


def test_buckets_are_those_of_the_datasets_or_of_the_plan(project, tmp_path) -> None:
    config = configured("kandinsky5-image", tmp_path, dataset={"resolution": [256, 512], "max_aspect": 1})
    assert list_buckets(config.model, config.datasets, None)[0] == ["256x256@1", "512x512@1"]
    family = configured("kandinsky5-image", tmp_path, dataset={"buckets": "family"})
    assert (
        "1024x1024@1" in list_buckets(family.model, family.datasets, None)[0]
        and len(list_buckets(family.model, family.datasets, None)[0]) == 7
    )
    video = configured("kandinsky5-video", tmp_path, "t2v-pro-sft-5s-hd", dataset={"resolution": 512})
    assert all(name.endswith("@9") for name in list_buckets(video.model, video.datasets, None)[0])
    assert all(
        int(side) % 128 == 0
        for name in list_buckets(video.model, video.datasets, None)[0]
        for side in name[:-2].split("x")
    )
    from stages import bucket, discover

    home = project()
    home.image("one.png", (64, 64))
    for program in (discover.run, bucket.run):
        home.run(program, "model.path=null")
    config = home.config("model.path=null")
    plan = find_plan(config)
    assert list_buckets(config.model, config.datasets, plan) == (["64x64@1"], "the plan")
    assert (longest_text(config, None), longest_text(config, plan)) == (512, 64 + len("a picture"))


def test_of_another_checkpoint_the_shape_is_its_own_or_said_to_be_assumed(tmp_path) -> None:
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "SanaTransformer2DModel", "num_layers": 3}))
    shapes, assumed = read_shapes(configured("sana", tmp_path, model={"path": str(folder.parent)}).model)
    assert shapes["transformer"]["num_layers"] == 3
    assert [text.partition(" on this machine")[0].split()[-1] for text in assumed] == ["text_encoder", "vae"]
    assert all("the shape of terminusresearch" in text for text in assumed)
    _, assumed = read_shapes(configured("sana", tmp_path, model={"path": "someone/finetuned"}).model)
    assert len(assumed) == 3


def test_the_program(tmp_path, tiny, program) -> None:
    config = configured("sana", tmp_path, dataset={"resolution": 256}, model={"path": str(tiny("sana"))})
    code, report, _ = program(config, {"card": 0.5})
    assert code == USAGE and "--dry-run" in report["error"]["message"] + report["error"]["next_step"]
    code, report, _ = program(config, {"card": 0.5}, dry_run=True)
    assert code == report["exit_code"] == INCOMPLETE
    assert {row["item"] for row in report["failed"]} >= {"encode-text", "train"}
    assert not (tmp_path / "work").exists()
