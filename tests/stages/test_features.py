"""The program features: one row per item, the model's output, and equal results for each division into parts."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cache.sets.item_rows import iter_item_rows
from cache.shards.shard import ShardRow
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages import discover, features, status, verify
from stages.encoding.stage_registry import FEATURES
from stages.encoding.vision.features import patch_grid
from stages.encoding.vision.worker import IMAGENET_MEAN, IMAGENET_STD
from stages.media.video import read_frames
from tests.golden import packaged
from tests.project import Project

pytestmark = pytest.mark.slow
SMALL = {"size": 84, "frames": 3, "precision": "float32"}


@pytest.fixture
def home(project: Any, tiny: Any, built: Any) -> Project:
    """Photographs of several shapes, a copy of one under another name, and a clip."""
    home_project = project("kandinsky5-video-t2v", features={"model": str(tiny("dinov2")), **SMALL})
    home_project.settings["stages"] |= {"features": {"threads": 1, "readers": 1}}
    return built(home_project, _discover_photographs)


def _discover_photographs(home: Project) -> None:
    for name in ("chelsea.png", "coffee.png", "camera.png", "astronaut.png"):
        Image.open(packaged("skimage", "data") / name).convert("RGB").reduce(4).save(home.media / name)
        (home.media / name).with_suffix(".txt").write_text(name)
    shutil.copyfile(home.media / "coffee.png", home.media / "again.png")
    (home.media / "again.txt").write_text("coffee")
    home.video("clip.mp4", frames=24)
    home.run(discover.run)


def rows(home: Project) -> dict[str, ShardRow]:
    """Path -> row."""
    store, config = Store(home.root), home.config()
    paths = dict(
        zip(
            *(FEATURES.find_plan(store, config).active.column(name).to_pylist() for name in ("sample_id", "path")),
            strict=True,
        )
    )
    item_rows = iter_item_rows(store, f"features/{FEATURES.fingerprint(config)}")
    return {paths[row.id]: row for _, _, row in item_rows}


@torch.no_grad()
def class_token(home: Project, frames_FHWC: np.ndarray) -> np.ndarray:
    """The class token, computed only with transformers."""
    size = Bucket(frames_FHWC.shape[2], frames_FHWC.shape[1], 1)
    grid = patch_grid(size, 84)
    model = transformers.Dinov2Model.from_pretrained(home.settings["features"]["model"]).eval()
    frames = [
        Image.fromarray(frame).resize((grid[1] * 14, grid[0] * 14), Image.Resampling.BICUBIC) for frame in frames_FHWC
    ]
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).float() / 255
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    vector = model((pixels - mean) / deviation).last_hidden_state[:, 0].mean(0)
    return (vector / vector.norm()).numpy()


def test_an_item_has_the_models_class_token_and_measures(home: Project) -> None:
    report = home.run(features.run)
    assert (report.done, report.remaining) == (5, 0)
    item_rows = rows(home)
    assert len(item_rows) == 5  # one row for two files with the same bytes
    for row in FEATURES.find_plan(Store(home.root), home.config()).active.to_pylist():
        if row["path"] not in item_rows:
            continue
        item, size = item_rows[row["path"]], Bucket.parse(row["bucket"])
        if row["path"] == "clip.mp4":
            pictures = list(read_frames(home.media / "clip.mp4", [2 * (k + 0.5) / 3 for k in range(3)]))
        else:
            pictures = [np.asarray(Image.open(home.media / row["path"]))]
        pixels = [
            Image.fromarray(picture).resize((size.width, size.height), Image.Resampling.LANCZOS) for picture in pictures
        ]
        expected = class_token(home, np.stack([np.asarray(image) for image in pixels]))
        vector = item.tensors["features"].numpy().astype(np.float32)
        np.testing.assert_allclose(vector, expected, atol=2e-3)
        assert (item.info["measures"]["motion"] is None) == (row["path"] != "clip.mp4")
    assert item_rows["chelsea.png"].info["measures"]["sharpness"] > 0 and item_rows["clip.mp4"].info["span"] == [
        0.333,
        1.667,
    ]


def test_a_second_run_has_nothing_to_do_and_a_partition_makes_the_same(home: Project, is_long: bool) -> None:
    assert home.run(features.run, dry_run=True).remaining == 5 and not (home.root / "features").exists()
    second_project = Project(home.folder.with_name("other"), home.settings)
    shutil.copytree(home.folder, second_project.folder, symlinks=True)
    home.run(features.run, "cache.unit_mib=1")
    second_report = home.run(features.run, "cache.unit_mib=1")
    assert (second_report.done, second_report.skipped, second_report.remaining) == (0, 5, 0)
    for part in ("0/2", "1/2"):
        second_project.run(features.run, "cache.unit_mib=1", shard=part)
    assert second_project.shards("features") == home.shards("features") and len(home.shards("features")) > 1
    if is_long:
        shutil.rmtree(second_project.root / "features")
        second_project.run(features.run, "cache.unit_mib=1", workers=2)
        assert second_project.shards("features") == home.shards("features")
    row = next(row for row in home.run(status.run).details["stages"] if row["stage"] == "features")
    assert (row["done"], row["remaining"]) == (5, 0)


def test_without_a_model_there_are_measures_alone_and_no_checkpoint_is_looked_for(home: Project) -> None:
    home.settings["features"]["model"] = None
    home.settings["model"]["path"] = None  # a repository that cannot be reached
    home.run(features.run)
    assert all(row.tensors.keys() == {"layouts"} and row.info["measures"] for row in rows(home).values())


def test_settings_that_matter_make_other_rows_beside_the_old_ones(home: Project) -> None:
    before = FEATURES.fingerprint(home.config())
    assert before == FEATURES.fingerprint(home.config("features.batch_size=1"))
    changes = ("features.size=98", "features.frames=2", "features.precision=bfloat16", "features.model=null")
    assert len({before, *(FEATURES.fingerprint(home.config(change)) for change in changes)}) == 5


def test_another_vision_model_has_its_own_size_and_what_shows_pictures_to_it_matters(home: Project) -> None:
    folder = home.folder / "vit"
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    home.settings["features"] |= {"model": str(folder)}
    with pytest.raises(LatentpressError, match=r"features\.size") as caught:
        home.run(features.run)
    assert caught.value.next_step == "remove features.size"
    del home.settings["features"]["size"]
    assert home.run(features.run).done == 5
    assert {row.tensors["features"].shape for row in rows(home).values()} == {(32,)}
    before = FEATURES.fingerprint(home.config())
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, "image_mean": [0.1] * 3}))
    assert FEATURES.fingerprint(home.config()) != before


def test_what_it_is_asked_without_its_section_or_without_weights_is_named(home: Project) -> None:
    (home.folder / "clip").mkdir()
    (home.folder / "clip" / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(LatentpressError, match=r"has no \*\.safetensors"):
        home.run(features.run, f"features.model={home.folder / 'clip'}", "features.size=null")
    home.settings.pop("features")
    with pytest.raises(LatentpressError, match="nothing to do") as caught:
        home.run(features.run)
    assert "features: {}" in caught.value.next_step


@pytest.mark.long
def test_damage_is_found_and_repaired(home: Project) -> None:
    """`caption` does not have a plan, because its filter needs a table that does not exist yet."""
    home.settings["caption"] = {}
    home.settings["datasets"][0]["where"] = "sharpness >= 0"
    home.run(discover.run)
    home.run(features.run)
    before = home.shards("features")
    path = next((home.root / "features").glob("*/*.arrow"))
    data = bytearray(path.read_bytes())
    data[data.index(b'"sharpness"') + 2] ^= 1
    path.write_bytes(data)
    [table] = (home.root / "items").iterdir()
    table.unlink()
    assert home.run(verify.run, repair=True).exit_code == 0
    assert "caption cannot encode damaged shards again: " in home.said
    assert home.shards("features") == before and home.run(verify.run).remaining == 0
