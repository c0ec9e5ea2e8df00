"""rehearse: the whole pipeline with tiny weights, for each recipe, and with settings that it can't show."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.cli.console import Console, Options, Report
from schemas.config.loading import load_config
from schemas.errors import LatentpressError, UsageError
from stages import rehearse
from stages.configuring.choice import FOLDER, list_recipes
from stages.rehearse import FULL
from stages.rehearsing.settings import EDGE, FRAMES, STAND_IN, options_off, rehearsal_values, small_values
from stages.rehearsing.tiny_shapes import KIND_OF, KINDS
from tests.forms import long
from tests.project import Project

#: The first recipe of each family and task; the others differ in the memory of the card.
FIRST = {name.partition("-lora")[0]: name for name in reversed(list_recipes())}.values()


@pytest.fixture
def start(forked_programs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Report]:
    """start(file, **options): the report; nothing is left where temporary files are."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def run(file: Path, *overrides: str, **options: object) -> Report:
        given = Options(file, overrides)
        report = rehearse.run(load_config(file, overrides), given, Console(stderr=io.StringIO()), steps=1, **options)
        assert list(temporary.glob("latentpress-*")) == []
        return report

    return run


def test_every_flavour_has_a_tiny_checkpoint_for_its_pipeline() -> None:
    for family in FAMILIES.values():
        for flavour in family.flavours.values():
            assert KINDS[KIND_OF[family.name, flavour.name]].pipeline in family.pipelines.values()


@pytest.mark.parametrize("name", [name if name in FIRST else long(name) for name in list_recipes()])
def test_a_recipe_becomes_small_and_needs_no_card(name: str, tmp_path: Path) -> None:
    config = load_config(FOLDER / f"{name}.yaml")
    values = rehearsal_values(config, tmp_path, 4)
    small = small_values(config, values)
    (tmp_path / "plan.yaml").write_text(json.dumps(values))
    (tmp_path / "small.yaml").write_text(json.dumps(small))
    full, made = load_config(tmp_path / "plan.yaml"), load_config(tmp_path / "small.yaml")
    assert options_off(full) == options_off(made) == []
    assert full.datasets[0].resolution == config.datasets[0].resolution
    assert (max(made.datasets[0].resolutions(0)) <= EDGE and made.datasets[0].video.num_frames <= max(FRAMES, 1)) or (
        made.datasets[0].dataset_type == "image"
    )
    assert (made.train.methods, made.train.adapter, made.train.optimizer) == (
        config.train.methods,
        config.train.adapter,
        config.train.optimizer,
    )
    assert [prompt.prompt for prompt in made.validation.prompts] == [it.prompt for it in config.validation.prompts]


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) for name in list_recipes()])
def test_a_recipe_is_rehearsed(name: str, tmp_path: Path, start: Callable[..., Report]) -> None:
    """With media of the size that the recipe is for: all stages run, and the real run's folders stay empty."""
    file = tmp_path / f"{name}.yaml"
    shutil.copy(FOLDER / file.name, file)
    config = load_config(file)
    (dataset,) = config.datasets
    home, is_video = Project(tmp_path, {}), dataset.dataset_type == "video"
    size = (1280, 704) if is_video else (1088, 1024)
    for number in range(2):
        path = f"../{Path(dataset.instance_data_dir).name}/{number}"
        if is_video:
            home.video(f"{path}.mp4", dataset.video.num_frames, size, round(config.clip_rate))
        else:
            home.image(f"{path}.png", size, seed=number)
        if dataset.source_roles:
            home.image(f"../before/{number}.png", size, caption=None)
    for prompt in config.validation.prompts:
        if prompt.image:
            home.image(f"../before/{Path(str(prompt.image)).name}", size, caption=None)
    report = start(file)
    assert report.exit_code == 0 and report.rejects == [] and report.next_steps == ["latentpress run"]
    ran = [row["stage"] for row in report.details["stages"]]
    assert ran[: len(config.stage_order)] == config.stage_order
    assert not Path(config.root).exists() and not Path(config.output).exists()


@pytest.mark.slow
def test_what_would_be_rejected_is_listed_and_captions_have_a_stand_in(
    tmp_path: Path, start: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also vision features, near-duplicates and scores; nothing of the services is used."""
    monkeypatch.setattr("stages.rehearsing.settings.EDGE", 64)
    home = Project(tmp_path, {})
    home.image("0.png", (640, 512), caption="own words")
    home.image("1.png", (512, 640), caption=None, seed=1)
    home.image("small.png", (100, 100), seed=2)
    (home.media / "broken.png").write_bytes(b"no picture")
    settings = {
        "root": "work",
        "model": {"family": "kandinsky5-image", "assistant": "assistant.safetensors"},
        "datasets": [{"id": "photos", "instance_data_dir": "media", "resolution": 512}],
        "caption": {},
        "stages": {"max_reject_fraction": 1.0, "engine": "ray"},
        "vision": {"model": "dinov2_vits14", "size": 56},
        "train": {"methods": {"crepa": {"block_index": 0}}, "trackers": ["tensorboard", "wandb"]},
        "validation": {
            "prompts": [{"name": "cat", "prompt": "a cat"}],
            "scores": {"clip": "openai/clip-vit-large-patch14"},
        },
        "notify": {"webhooks": [{"url_env": "NOT_SET"}]},
        "hub": {"repo": "me/photos"},
    }
    file = home.folder / "photos.yaml"
    file.write_text(json.dumps(settings))
    kept = tmp_path / "kept"
    report = start(file, keep=kept)
    assert report.exit_code == 0
    assert home.rejects(report) == {"small.png": "needs-upscale", "broken.png": "not-an-image"}
    shown = "\n".join(report.details["not_shown"])
    for option in ("model.assistant", "stages.engine ray", "caption", "notify", "hub", "Captions of photos"):
        assert option in shown, option
    assert (kept / "output/run/samples/scores.json").exists() or list((kept / "output").rglob("scores*"))
    plan = current_plan(Store(str(kept / "work")), load_config(kept / FULL))
    assert {"own words", STAND_IN} <= {*plan.text_table["text"].to_pylist()}
    with pytest.raises(UsageError):
        start(file, keep=kept)


def test_a_rehearsal_ends_where_the_run_would(tmp_path: Path, start: Callable[..., Report]) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media/broken.png").write_bytes(b"no picture")
    settings = {"root": "work", "model": {"family": "sana"}, "datasets": [{"id": "a", "instance_data_dir": "media"}]}
    (tmp_path / "a.yaml").write_text(json.dumps(settings))
    with pytest.raises(LatentpressError) as caught:
        start(tmp_path / "a.yaml")
    assert caught.value.exit_code == 3
