"""The program encode-vision: contents of its shards, its units, and which samples a change encodes again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from cache.sets.set_lookup import current_plan
from cache.shards.shard import ShardRow
from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.errors import USAGE, LatentpressError
from stages import bucket, discover, encode_vision
from stages.encoding.vision.worker import IMAGENET_MEAN, IMAGENET_STD, Encoder
from stages.media.video import read_frames
from tests.model_hub import branch_that_moves


@pytest.fixture
def make(project, tiny):
    """make(kind) -> Project with a tiny DINOv2 for 84 pixels: six patches per side, or in proportion."""

    def made(kind: str):
        vision = {"model": str(tiny("dinov2")), "size": 84, "batch_size": 4}
        home = project(kind, vision=vision)
        home.settings["stages"]["encode-vision"] = {"threads": 1}
        return home

    return made


def prepare(home) -> None:
    home.run(discover.run)
    home.run(bucket.run)


def rows(home) -> list[ShardRow]:
    readers = [open_reader(Store(home.root), f"vision/{name}") for name in home.shards("vision")]
    return [shard.read(number) for shard in readers for number in range(len(shard))]


@torch.no_grad()
def patches(home, frames: list[np.ndarray], grid: tuple[int, int]) -> torch.Tensor:
    """features_FCHW, computed only with transformers."""
    size = {"height": grid[0] * 14, "width": grid[1] * 14}
    processor = BitImageProcessorPil(
        size=size, do_center_crop=False, image_mean=list(IMAGENET_MEAN), image_std=list(IMAGENET_STD)
    )
    model = transformers.Dinov2Model.from_pretrained(home.settings["vision"]["model"]).eval()
    tokens = model(processor(frames, return_tensors="pt")["pixel_values"]).last_hidden_state[:, 1:]
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def nearest(row: ShardRow, expected: list[torch.Tensor]) -> float:
    """Largest difference from the nearest of the files' features, in units of bfloat16's rounding."""
    array = row.tensors["vision"]
    assert array.dtype == "bfloat16"
    bits = np.frombuffer(bytes(array.raw()), np.int16).reshape(array.shape)
    values = torch.from_numpy(bits.copy()).view(torch.bfloat16).float()
    assert all(each.shape == values.shape for each in expected)
    return min(((each - values).abs() / (2**-8 * each.abs() + 1e-4)).max().item() for each in expected)


@pytest.mark.slow
def test_images_have_the_features_of_their_own_pixels(make) -> None:
    """64x64 at stride 16: six by six patches on four by four tokens; a token has 1.5 patches per side."""
    home = make("kandinsky5-image-t2i")
    files = [home.image(f"{number}.png", (64, 64), "a picture", number) for number in range(3)]
    prepare(home)
    assert home.run(encode_vision.run).done == 3
    expected = []
    for path in files:
        fine = patches(home, [np.asarray(Image.open(path).convert("RGB"))], (6, 6)).repeat_interleave(2, 2)
        area = torch.nn.functional.avg_pool2d(fine.repeat_interleave(2, 3), 3)
        expected.append(area.permute(0, 2, 3, 1))
    feature_rows = rows(home)
    assert len(feature_rows) == 3 and feature_rows[0].tensors["vision"].shape == (1, 4, 4, 32)
    assert max(nearest(row, expected) for row in feature_rows) <= 1


@pytest.mark.slow
def test_clips_have_features_of_each_latent_frame(make) -> None:
    """Nine frames in passes of four: the first alone, then two means of four."""
    home = make("kandinsky5-video-t2v")
    files = [home.video(f"{number}.mp4", 12, (64, 64)) for number in range(2)]
    prepare(home)
    assert home.run(encode_vision.run).done == 2
    expected = []
    for path in files:
        frames = list(read_frames(path, [number / 12 for number in range(9)]))
        fine = patches(home, frames, (6, 6)).repeat_interleave(2, 2).repeat_interleave(2, 3)
        area = torch.nn.functional.avg_pool2d(fine, 3).permute(0, 2, 3, 1)
        expected.append(torch.stack([area[0], area[1:5].mean(0), area[5:].mean(0)]))
    feature_rows = rows(home)
    assert len(feature_rows) == 2 and feature_rows[0].tensors["vision"].shape == (3, 4, 4, 32)
    assert max(nearest(row, expected) for row in feature_rows) <= 1


def test_the_target_is_what_an_i2i_sample_has_features_of(make) -> None:
    home = make("kandinsky5-image-i2i")
    target = home.image("0.png", (64, 64), "a picture", 1)
    home.image("../source/0.png", (64, 64), "", 2)
    home.settings["datasets"][0]["conditioning_data"] = "source"
    prepare(home)
    assert home.run(encode_vision.run).done == 1
    fine = patches(home, [np.asarray(Image.open(target).convert("RGB"))], (6, 6)).repeat_interleave(2, 2)
    area = torch.nn.functional.avg_pool2d(fine.repeat_interleave(2, 3), 3).permute(0, 2, 3, 1)
    (row,) = rows(home)
    assert nearest(row, [area]) <= 1


@pytest.mark.slow
def test_shards_are_of_the_units_of_latents_and_made_once(make) -> None:
    home = make("kandinsky5-image-t2i")
    for number in range(4):
        home.image(f"{number}.png", (64, 64) if number % 2 else (96, 64), f"picture {number}", number)
    prepare(home)
    assert home.run(encode_vision.run).done == 4
    store = Store(home.root)
    shards = [open_reader(store, f"vision/{name}") for name in home.shards("vision")]
    units = current_plan(store, home.config()).units("latents")
    assert {shard.meta.unit: tuple(shard.meta.ids) for shard in shards} == {u.unit_id: u.members for u in units}
    before = home.shards("vision")
    second_report = home.run(encode_vision.run)
    assert (second_report.done, second_report.skipped) == (0, 4) and home.shards("vision") == before


def test_what_changes_bytes_makes_another_cache_and_what_does_not_none(make) -> None:
    home = make("kandinsky5-video-t2v")
    name = encode_vision.STAGE.fingerprint(home.config())
    for change in ("vision.size=98", "vision.precision=bfloat16", "latents.decoder=decord"):
        assert encode_vision.STAGE.fingerprint(home.config(change)) != name, change
    for change in ("vision.batch_size=1", "latents.posterior=mode", "train.seed=1", "text.max_length=256"):
        assert encode_vision.STAGE.fingerprint(home.config(change)) == name, change


@pytest.mark.slow
def test_provenance_says_what_the_name_stands_for(make) -> None:
    home = make("kandinsky5-image-t2i")
    home.image("0.png", (64, 64))
    prepare(home)
    home.run(encode_vision.run)
    (path,) = (home.root / "vision").glob("*/provenance.json")
    record = json.loads(path.read_text())
    assert record["size"] == 84 and record["weights"].keys() == {"content"} and record["token"] == [1, 16]
    assert record["fingerprint"] == path.parent.name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    home.image("1.png", (64, 64), seed=1)
    prepare(home)
    assert home.run(encode_vision.run).done == 1
    assert path.read_bytes() == content


def test_the_weights_of_a_repository_are_those_of_the_commit_that_names_the_cache(make, tmp_path, monkeypatch) -> None:
    """The branch moves after the cache was named: a worker that starts later loads the commit of the cache's name."""
    home = make("kandinsky5-image-t2i")
    home.image("0.png", (64, 64))
    prepare(home)
    weights, branch = branch_that_moves(Path(home.settings["vision"]["model"]), tmp_path / "hub", monkeypatch)
    home.settings["vision"]["model"] = weights["repo"]
    assert encode_vision.STAGE.fingerprint_inputs(home.config())["weights"] == weights
    branch.write_text("b" * 40)  # a commit without weights
    assert home.run(encode_vision.run).done == 1


def test_without_a_model_it_says_what_to_set(project) -> None:
    home = project("kandinsky5-image-t2i")
    home.image("0.png", (64, 64))
    prepare(home)
    with pytest.raises(LatentpressError, match=r"vision\.model is not set") as caught:
        home.run(encode_vision.run)
    assert caught.value.exit_code == USAGE and "dinov2_vits14" in caught.value.next_step


@pytest.mark.slow
def test_a_clip_of_several_passes_takes_smaller_ones_when_memory_runs_out(make, monkeypatch) -> None:
    """Nine frames in passes of four, of which only two fit into memory."""
    home, passes, patches = make("kandinsky5-video-t2v"), [], Encoder.patches
    home.video("clip.mp4")
    prepare(home)
    expected = home.run(encode_vision.run, "vision.batch_size=2") and rows(home)
    shutil.rmtree(home.root / "vision")

    def fits_two(self, frames_BHWC):
        passes.append(len(frames_BHWC))
        if len(frames_BHWC) > 2:
            raise torch.OutOfMemoryError("20 MiB")
        return patches(self, frames_BHWC)

    monkeypatch.setattr(Encoder, "patches", fits_two)
    assert home.run(encode_vision.run).done == 1
    assert passes == [4, 2, 2, 2, 2, 1]
    assert rows(home)[0].tensors == expected[0].tensors
