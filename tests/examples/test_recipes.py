"""examples/recipes/: each recipe is complete, fits its card by prediction, and trains a tiny model with its
settings."""

import io
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cache.models.compatibility import bucket_side_multiple
from schemas.catalog import FAMILIES
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from stages import run
from stages.planning.crop_selection import bucket_sizes
from stages.rehearsing.tiny_shapes import SHAPES
from tests.forms import long
from tests.project import Project

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def published(family: str, flavour: str) -> dict[str, Any]:
    return FAMILIES[family].published_shape("transformer", FAMILIES[family].flavours[flavour])


#: recipe -> the card's GB, its published transformer, and the kind of its tiny checkpoint
RECIPES: dict[str, tuple[int, dict[str, Any], str]] = {
    "sana-lora-12gb": (12, SHAPES["true"]["sana"], "sana"),
    "z-image-lora-12gb": (12, SHAPES["true"]["z_image"], "z-image"),
    "z-image-lora-16gb": (16, SHAPES["true"]["z_image"], "z-image"),
    "kandinsky-image-lora-16gb": (16, SHAPES["true"]["image"] | {"visual_cond": False}, "kandinsky5-image-t2i"),
    "kandinsky-video-lite-lora-16gb": (16, SHAPES["true"]["video"], "kandinsky5-video-t2v"),
    "kandinsky-video-lite-lora-24gb": (24, SHAPES["true"]["video"], "kandinsky5-video-t2v"),
    "kandinsky-video-pro-lora-24gb": (24, SHAPES["pro"]["video"], "kandinsky5-video-t2v"),
    "sana-full-24gb": (24, SHAPES["true"]["sana"], "sana"),
    "wan-1.3b-lora-12gb": (12, published("wan2.1", "t2v-1.3b"), "wan2.1-t2v"),
    "wan-14b-lora-16gb": (16, published("wan2.1", "t2v-14b"), "wan2.1-t2v"),
    "wan-14b-lora-24gb": (24, published("wan2.1", "t2v-14b"), "wan2.1-t2v"),
    "wan-5b-lora-16gb": (16, published("wan2.2-5b", "t2v-5b"), "wan2.2-5b-t2v"),
    "qwen-image-lora-12gb": (12, published("qwen-image", "qwen-image"), "qwen-image"),
    "qwen-image-lora-24gb": (24, published("qwen-image", "qwen-image"), "qwen-image"),
    "qwen-image-edit-lora-12gb": (
        12,
        published("qwen-image-edit-plus", "qwen-image-edit-2511"),
        "qwen-image-edit-plus",
    ),
    "qwen-image-edit-lora-16gb": (
        16,
        published("qwen-image-edit-plus", "qwen-image-edit-2511"),
        "qwen-image-edit-plus",
    ),
    "qwen-image-edit-lora-24gb": (
        24,
        published("qwen-image-edit-plus", "qwen-image-edit-2511"),
        "qwen-image-edit-plus",
    ),
    "klein-4b-lora-12gb": (12, published("flux2-klein", "klein-base-4b"), "flux2-klein"),
    "klein-4b-edit-lora-16gb": (16, published("flux2-klein", "klein-base-4b-i2i"), "flux2-klein"),
    "wan-a14b-lora-24gb": (24, published("wan2.2-a14b", "t2v-a14b"), "wan2.2-a14b-t2v"),
    "wan-a14b-i2v-lora-24gb": (24, published("wan2.2-a14b", "i2v-a14b"), "wan2.2-a14b-i2v"),
    "krea-2-lora-12gb": (12, published("krea2", "krea-2-raw"), "krea2"),
    "krea-2-lora-16gb": (16, published("krea2", "krea-2-raw"), "krea2"),
    "krea-2-lora-24gb": (24, published("krea2", "krea-2-raw"), "krea2"),
    "flux-3-lora-12gb": (12, published("flux3", "klein-base"), "flux3"),
    "flux-3-lora-16gb": (16, published("flux3", "klein-base"), "flux3"),
    "flux-3-edit-lora-16gb": (16, published("flux3", "klein-base-i2i"), "flux3"),
    "flux-3-edit-lora-24gb": (24, published("flux3", "klein-base-i2i"), "flux3"),
    **{
        f"qwen-image-21-lora-{size}gb": (size, published("qwen-image-2.1", "qwen-image-2.1"), "qwen-image-2.1")
        for size in (12, 16, 24)
    },
    "klein-9b-lora-16gb": (16, published("flux2-klein", "klein-base-9b"), "flux2-klein"),
}
LAYERS = {
    "sana": 20,
    "z-image": 30,
    "qwen-image": 60,
    "qwen-image-edit-plus": 60,
    "krea2": 28,
    "qwen-image-2.1": 32,
}  # the defaults of the transformers' classes
RESERVED_GIB = 1.0  # memory of a card for the CUDA context, kernels and fragmentation


def recipe(name: str) -> Config:
    return load_config(FOLDER / f"{name}.yaml")


def test_a_copied_recipe_finds_its_schema(tmp_path: Path) -> None:
    """The first line of a recipe names a schema in the same folder, because a path into the checkout would not
    exist."""
    copied = shutil.copytree(FOLDER, tmp_path / "copied", symlinks=True)  # like cp -r: a link would not lead to a file
    for name in NAMES:
        first = (copied / f"{name}.yaml").read_text().partition("\n")[0]
        schema = copied / first.removeprefix("# yaml-language-server: $schema=")
        is_same = schema.read_bytes() == (ROOT / "schemas" / "pipeline.schema.json").read_bytes()
        assert is_same, "run: make generated"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_whole(name: str) -> None:
    """docs/memory.md has the recipe, its text names the card, and its paths start from its folder."""
    config, text = recipe(name), (FOLDER / f"{name}.yaml").read_text()
    assert name in RECIPES and f"examples/recipes/{name}.yaml" in (ROOT / "docs" / "memory.md").read_text()
    assert f"{RECIPES[name][0]} GB" in text and text.count(f"--config {name}.yaml") == 2
    assert config.datasets and config.validation.prompts
    assert Path(config.root).parent == Path(config.output).parent == FOLDER
    assert all(Path(dataset.instance_data_dir).parent == FOLDER for dataset in config.datasets)
    values = YAML(typ="safe", pure=True).load(text)
    assert {"model", "datasets", "train", "validation"} <= values.keys()


# --- memory ---


def largest_bucket(config: Config) -> str:
    (dataset,) = config.datasets
    sizes = bucket_sizes(config.model, dataset, bucket_side_multiple(config.model))
    frames = dataset.video.num_frames or 1 if dataset.dataset_type == "video" else 1
    width, height = max(sizes, key=math.prod)
    return str(Bucket(width, height, frames, ((1024, 1024),) * len(dataset.source_roles)))


def predict(config: Config, shape: dict[str, Any]) -> int:
    from trainer.memory.card_fit import longest_text
    from trainer.memory.estimate import estimate_memory

    return estimate_memory(config, shape, [largest_bucket(config)], longest_text(config, None)).device


def predict_by_depth(config: Config, shape: dict[str, Any]) -> float:
    """Predict from two transformers with fewer blocks, because every block takes the same memory. They have at least 4
    blocks: with 3 blocks, the peak of Sana's LoRA is at another place."""
    if len(config.model.family_spec.layers) > 1:  # two kinds of blocks
        return predict(config, shape)
    (key,) = config.model.family_spec.layers
    depth = shape.get(key) or LAYERS[config.model.family]
    few, more = (predict(config, shape | {key: blocks}) for blocks in (4, 8))
    return few + (more - few) / 4 * (depth - 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "sana-full-24gb" else long(name) for name in NAMES])
def test_a_recipe_fits_its_card_and_says_how_much_it_takes(name: str, is_long: bool) -> None:
    config, (card_gb, shape, _) = recipe(name), RECIPES[name]
    prediction = predict_by_depth(config, shape)
    if is_long:
        assert prediction == pytest.approx(predict(config, shape), rel=0.01)
    assert prediction / 2**30 <= card_gb * 1e9 / 2**30 - RESERVED_GIB
    text = re.sub(r"\n# ", " ", (FOLDER / f"{name}.yaml").read_text())
    (stated_gib,) = re.findall(r"Predicted for training: (\d+\.\d) GiB", text)
    assert math.isclose(prediction / 2**30, float(stated_gib), abs_tol=0.15)


# --- training ---


@pytest.fixture(scope="module")
def wide_sana(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """wide_sana(tiny checkpoint) -> a copy of it with sides in multiples of 64, which nf4-bnb requires."""

    def make(tiny: Path) -> Path:
        from stages.rehearsing.tiny_models import make_model

        folder = tmp_path_factory.mktemp("wide") / "sana"
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("transformer"), symlinks=True)
        sides = {"num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_dim": 128}
        make_model("sana", overrides=sides).save_pretrained(folder / "transformer")
        return folder

    return make


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_a_tiny_model_with_its_own_settings(
    name: str,
    tmp_path: Path,
    tiny: Callable[[str], Path],
    wide_sana: Any,
    forked_programs: None,
    capfd: Any,
) -> None:
    """The file is copied next to the media. Only sizes are smaller, latents are float32, which is faster on a CPU, and
    copies by streams are off, because a CPU does not have streams. Programs are forks of this process."""
    path, kind = tmp_path / f"{name}.yaml", RECIPES[name][2]
    shutil.copy(FOLDER / path.name, path)
    (dataset,) = recipe(name).datasets
    home, size, video = Project(tmp_path, {}), 128 if "pro" in name else 64, dataset.dataset_type == "video"
    for number in range(2):
        file = f"../{Path(dataset.instance_data_dir).name}/{number}"
        home.video(f"{file}.mp4", 24, (size, size), 24) if video else home.image(f"{file}.png", (size, size))
        if dataset.source_roles:
            home.image(f"../before/{number}.png", (size, size), caption=None)
    for prompt in recipe(name).validation.prompts:
        if prompt.image:
            home.image(f"../before/{Path(prompt.image).name}", (size, size), caption=None)
    model = wide_sana(tiny(kind)) if kind == "sana" else tiny(kind)
    changed = {"model.path": str(model), "validation.steps": 1, "train.steps": 2, "latents.precision": "float32"}
    changed |= {f"datasets.{dataset.id}.resolution": size, "validation.size": f"{size}x{size}" + "@5" * video}
    changed["stages.decode.while_training"] = "false"  # so that the stage decode always has samples to decode
    changed |= {f"datasets.{dataset.id}.buckets": "computed"} if dataset.buckets == "family" else {}
    if video:
        changed |= {f"datasets.{dataset.id}.video.{key}": 5 for key in ("num_frames", "min_frames")}
    overrides = tuple(f"{key}={value}" for key, value in changed.items())
    report = run.run(load_config(path, overrides), Options(path, overrides), Console(stderr=io.StringIO()))
    messages = capfd.readouterr().err
    runs = recipe(name).expert_runs  # the second run only trains and decodes
    assert (report.done, report.remaining, report.rejects) == (5 + 2 * len(runs), 0, []), messages
    for run_config in runs:
        train_config, output = run_config.train, tmp_path / "output" / run_config.run_name
        train = YAML(typ="safe", pure=True).load(output / "config.yaml")["train"]
        assert train == train_config.model_dump(mode="json", by_alias=True) | {"set": train["set"], "steps": 2}
        if train_config.quantized:
            assert f"matrices of the base quantized ({train_config.base_precision})" in messages
        assert (output / "samples" / "contact-sheet.png").exists()
