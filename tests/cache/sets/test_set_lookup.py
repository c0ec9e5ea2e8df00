"""A root that several configurations share: each trains on the set that it makes, and on no other."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from cache.sets.set_lookup import diff_recipes, open_configured_set
from cache.sets.trainset import SetNotFound
from schemas.config.pipeline import Config
from schemas.errors import INCOMPLETE, USAGE
from schemas.recipe import build_recipe
from stages import bucket, discover, encode_latents, encode_text, export, index, status
from tests.forms import long
from tests.project import SETTINGS
from trainer.__main__ import run as train

STAGES = (discover, bucket, encode_text, encode_latents, index)


def made(home, *overrides: str) -> str:
    """Every stage before training; the set's id."""
    for program in STAGES:
        report = home.run(program.run, *overrides)
    return report.details["set"].removeprefix("sets/")


def trained_on(home, *overrides: str) -> str:
    """The id of the set that training opens, first of all; home.said: the warnings."""
    warnings: list[str] = []
    with closing(open_configured_set(home.config(*overrides), warnings.append)) as data:
        home.said = "\n".join(warnings)
        return data.id


@pytest.fixture
def photos(project, built):
    """Two pictures, encoded and indexed."""
    return built(project("sana"), make_two)


def make_two(home) -> None:
    for number in range(2):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    made(home)


def indexed(home) -> str:
    """The id of the only set."""
    report = home.run(index.run)
    assert report.done == 0
    return report.details["set"].removeprefix("sets/")


@pytest.mark.long
def test_configurations_of_one_root_train_on_the_sets_that_they_make(photos) -> None:
    photos.image("../other/a.png", (64, 64), "quite another picture", 7)
    option = "datasets=[{id: others, instance_data_dir: other, resolution: 64, allow_upscale: true}]"
    first, second = indexed(photos), made(photos, option)
    assert first != second
    assert (trained_on(photos), trained_on(photos, option)) == (first, second)
    for overrides, set_id in (((), first), ((option,), second)):
        assert photos.run(status.run, *overrides).details["training_set"] == f"sets/{set_id}"
        assert photos.run(export.run, *overrides, to=str(photos.folder / set_id)).details["set"] == f"sets/{set_id}"


@pytest.mark.slow
def test_a_checkpoint_with_another_scaling_factor_has_a_set_of_its_own(photos, tiny, tmp_path: Path) -> None:
    """Latents of the two differ by that factor; the transformer is the same."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny("sana"), copy)
    settings = json.loads((copy / "vae/config.json").read_text())
    (copy / "vae/config.json").write_text(json.dumps(settings | {"scaling_factor": 2 * settings["scaling_factor"]}))
    first, second = indexed(photos), made(photos, f"model.path={copy}")
    assert (trained_on(photos), trained_on(photos, f"model.path={copy}")) == (first, second)

    # Without the autoencoder, both sets fit, and train.set must name one.
    alone = tmp_path / "alone"
    for part in ("transformer", "scheduler"):
        shutil.copytree(copy / part, alone / part)
    with pytest.raises(Exception, match=f"{first}.*{second}|{second}.*{first}") as caught:
        trained_on(photos, f"model.path={alone}")
    assert "train.set" in caught.value.next_step
    assert trained_on(photos, f"model.path={alone}", f"train.set={second}") == second

    # A named set of another autoencoder is refused if the checkpoint shows the difference.
    with pytest.raises(Exception, match="autoencoder") as caught:
        trained_on(photos, f"train.set={second}")
    assert caught.value.exit_code == USAGE


@pytest.mark.slow
def test_a_changed_configuration_has_no_set_until_it_is_made(photos) -> None:
    first = indexed(photos)
    changes = ["datasets.photos.prepend=new", "text.max_length=64", "datasets.photos.resolution=32"]
    with pytest.raises(SetNotFound) as caught:
        photos.run(train, *changes)
    assert caught.value.exit_code == INCOMPLETE
    assert "datasets.photos.resolution is 64.0 in the set and 32.0 in the configuration" in caught.value.message
    assert 'datasets.photos.prepend is "" in the set and "new" in the configuration' in caught.value.message
    assert "text.max_length is 300 in the set and 64 in the configuration" in caught.value.message
    assert "latentpress run" in caught.value.next_step and f"train.set: {first}" in caught.value.next_step
    assert not (photos.folder / "output").exists()
    assert "latentpress index" in photos.run(status.run, "text.max_length=64").details["training_set"]
    assert trained_on(photos) == first
    assert made(photos, *changes) == trained_on(photos, *changes) != first


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_recipe_equals_itself_once_it_was_written(kind: str) -> None:
    """Whatever type a setting has, such as the tuple of the hidden states that are stored."""
    model, datasets = SETTINGS[kind], [{"id": "a", "instance_data_dir": "a", "conditioning_data": "b"}]
    if kind.endswith("v"):
        datasets = [{"id": "a", "instance_data_dir": "a", "dataset_type": "video"}]
    train = {"experts": "both"} if "a14b" in kind else {}
    config = Config.model_validate({"root": "r", "model": model, "datasets": datasets, "train": train})
    recipe = build_recipe(config, 16)
    assert diff_recipes(json.loads(json.dumps(recipe)), recipe) == []


@pytest.mark.slow
def test_a_set_that_is_named_is_used_and_what_differs_is_said(photos) -> None:
    first = indexed(photos)
    for name in (first, str(photos.root), f"{photos.root}/sets/{first}"):
        assert trained_on(photos, f"train.set={name}", "datasets.photos.prepend=x") == first
        assert 'datasets.photos.prepend is "" in the set and "x" in the configuration' in photos.said
        assert trained_on(photos, f"train.set={name}") == first
        assert "in the configuration" not in photos.said
    with pytest.raises(Exception, match="for sana t2i"):
        photos.run(
            train, f"train.set={first}", "model.family=kandinsky5-image", "model.path=null", "model.flavour=null"
        )


@pytest.mark.slow
def test_the_trainer_needs_neither_media_nor_datasets_nor_encoders(photos, tiny, tmp_path: Path) -> None:
    first = indexed(photos)
    alone = tmp_path / "alone"
    shutil.copytree(tiny("sana") / "transformer", alone / "transformer")
    shutil.rmtree(photos.media)
    assert trained_on(photos, f"model.path={alone}") == first
    export_folder = str(tmp_path / "export")
    photos.run(export.run, to=export_folder)
    del photos.settings["datasets"], photos.settings["root"]
    report = photos.run(train, f"train.set={export_folder}", f"model.path={alone}", dry_run=True)
    assert report.details["set"] == f"sets/{first}"
    assert "train.set names" not in photos.said


@pytest.mark.parametrize("change", ["instance_data_dir=other", long("mask_data=other"), long("follow_links=true")])
def test_other_media_under_the_same_id_are_discovered_and_planned(photos, change: str) -> None:
    """Earlier, every program reported "done"."""
    first = indexed(photos)
    for number in range(2):
        photos.image(f"../other/{number}.png", (64, 64), f"other {number}", 7 + number)
    option = f"datasets.photos.{change}"
    for program in (encode_text, encode_latents, index):
        with pytest.raises(Exception, match="does not have a plan") as caught:
            photos.run(program.run, option)
        assert "latentpress discover" in caught.value.next_step
    with pytest.raises(Exception, match=f"discovered with different settings: {change.partition('=')[0]} was"):
        photos.run(bucket.run, option)
    photos.run(discover.run, option)
    assert photos.run(bucket.run, option).exit_code == 0
    with pytest.raises(SetNotFound):
        trained_on(photos, option)
    assert trained_on(photos) == first


@pytest.mark.long
def test_a_project_that_is_moved_finds_everything(photos) -> None:
    photos.settings["datasets"][0]["instance_data_dir"] = str(photos.media)  # below the configuration, whole
    first = made(photos)
    photos.folder = photos.folder.rename(photos.folder.with_name("moved"))
    for name in ("media", str(photos.media), "./media"):
        photos.settings["datasets"][0]["instance_data_dir"] = name
        assert trained_on(photos) == first
        for program in STAGES:
            assert photos.run(program.run, dry_run=True).remaining == 0


@pytest.mark.slow
def test_the_runs_configuration_lists_what_was_not_in_force(photos) -> None:
    first = indexed(photos)
    few = ["train.steps=1", "validation.eval_samples=0", "train.device=cpu", f"train.set={first}"]
    photos.run(train, *few, "text.max_length=64")
    config_text = (photos.folder / "output/run/config.yaml").read_text()
    assert config_text.startswith(
        f"# Not in force, as set {first} was named: text.max_length is 300 in the set and 64 in"
    )
