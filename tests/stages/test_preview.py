"""The plan as a page: the pixels that the encoder gets, everything escaped, and no item that stops it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.cli.report import heading
from schemas.clips import clip_times
from schemas.errors import LatentpressError
from stages import preview
from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask
from stages.pages.plan_samples import PlanTable, frame_indices
from stages.preview import MAX_EXAMPLES
from tests.stages.html_page import alike, decoded
from tests.stages.plan_previews import planned, rows, settings, show, video_settings


@pytest.mark.slow
def test_an_image_is_shown_as_the_encoder_gets_it(project) -> None:
    home = project(**settings(crop_aspect="square"))
    path = home.image("wide.png", (200, 64))
    planned(home)
    report, page = show(home)
    assert (report.done, report.exit_code) == (1, 0)
    [shown] = page.pictures("cropped to 64x64@1: wide.png")
    assert alike(shown, read_cropped_image(path, rows(home)["wide.png"]["geometry"]))
    assert not alike(shown, np.asarray(Image.open(path).resize((64, 64))))
    [drawing] = page.of("svg")
    assert drawing["viewbox"] == "0 0 200 64"  # whole, in its own shape
    assert drawing["aria-label"] == "wide.png: whole picture, 68.0% cut off"
    [_, frame] = page.of("path")
    assert frame["d"] == "M68.00 0.00h64.00v64.00h-64.00z"
    assert "200x64 → 64x64@1: resized to 200x64, cropped at (68, 0)" in page.article("wide.png")


@pytest.mark.slow
def test_a_clip_is_shown_by_frames_of_its_times(project) -> None:
    home = project("kandinsky5-video-i2v", **video_settings(clip="middle"))
    path = home.video("clip.mp4", frames=48, rate=24)
    planned(home)
    _, page = show(home)
    sample = rows(home)["clip.mp4"]
    times, frames = clip_times(sample["start"], sample["rate"], 17), read_sample_frames(path, sample, "pyav")
    assert sample["start"] > 0
    shown = page.pictures(" s of clip.mp4")
    assert len(shown) == 9 and "starts from its first frame" in page.article("clip.mp4")
    for picture, index in zip(shown, frame_indices(17), strict=True):
        assert alike(picture, frames[index]), index
        assert f"{times[index]:.2f} s" in page.article("clip.mp4")
    assert np.abs(shown[0].astype(int) - shown[-1]).mean() > 50  # they do differ
    [drawing] = page.of("image")
    assert alike(decoded(drawing["href"]), read_sample_frames(path, sample | one_frame(64, 48), "pyav")[0])


def one_frame(width: int, height: int) -> dict[str, Any]:
    return {"geometry": {"bucket": f"{width}x{height}@1", "resize_w": width, "resize_h": height, "x": 0, "y": 0}}


@pytest.mark.slow
def test_what_cannot_be_read_is_shown_with_its_reason(project) -> None:
    home = project(**settings())
    for number, name in enumerate(("fine.png", "gone.png", "other.png")):
        home.image(name, seed=number)
    planned(home)
    (home.media / "gone.png").unlink()
    (home.media / "other.png").write_bytes(b"something else")
    report, page = show(home)
    assert (report.done, report.exit_code) == (1, 0)
    assert home.rejects(report) == {"gone.png": "missing", "other.png": "changed"}
    assert "can't be shown (missing)" in page.article("gone.png")
    assert "can't be shown (changed)" in page.article("other.png")
    assert len(page.articles) == 3 and len(page.pictures("fine.png")) == 1


@pytest.mark.slow
def test_an_item_that_takes_too_long_costs_itself_alone(project) -> None:
    home = project(**settings())
    home.image("slow.png", (1500, 1500))
    planned(home)
    report, page = show(home, "stages.item_timeout_s=0.0001")
    assert home.rejects(report) == {"slow.png": "timed-out"}
    assert "took longer than" in page.article("slow.png")


@pytest.mark.slow
def test_a_bucket_has_the_line_that_bucket_prints(project) -> None:
    home = project(**settings(crop_aspect="closest", crop_aspect_buckets=[1.0, 1.6], repeats=2, eval_fraction=0.3))
    for number in range(12):
        home.image(f"{number}.png", (64 + 16 * (number % 5), 64), seed=number)
    table = planned(home).details["buckets"]
    config = home.config()
    sheet = PlanTable(Store(config.root), config, current_plan(Store(config.root), config))
    assert len(table) > 1 and sheet.bucket_rows() == table
    _, page = show(home, items=20)
    for row in table:
        assert all(heading(key) in page.text for key in row)
        assert f"of {sheet.count(row['bucket'])} samples" in page.text
    assert sum("held out" in article for article in page.articles) == sheet.active.num_rows - sum(
        row["samples"] for row in table
    )


@pytest.mark.slow
def test_an_i2i_source_is_shown_beside_its_target(project) -> None:
    home = project("kandinsky5-image-i2i", **settings(conditioning_data="sources", is_regularization_data=True))
    home.image("pair.png", seed=1)
    source = home.image("../sources/pair.png", (128, 96), caption=None, seed=2)
    planned(home)
    _, page = show(home)
    sample = rows(home)["pair.png"]
    [shown] = page.pictures("i2i source, cropped: pair.png")
    assert alike(shown, read_cropped_image(source, sample["source_geometry"]))
    assert "regularization" in page.article("pair.png") and "source: pair.png" in page.article("pair.png")


@pytest.mark.slow
def test_a_mask_is_laid_over_what_is_not_trained(project) -> None:
    home = project(**settings())
    home.settings["datasets"][0]["mask_data"] = str(home.folder / "masks")
    path = home.image("one.png", (64, 64))
    half = np.zeros((64, 64), np.uint8)
    half[:, 32:] = 255
    (home.folder / "masks").mkdir()
    Image.fromarray(half).save(home.folder / "masks" / "one.png")
    planned(home)
    _, page = show(home)
    sample = rows(home)["one.png"]
    [shown] = page.pictures("mask: red is not trained: one.png")
    mask = read_sample_mask(home.folder / "masks" / "one.png", "image", sample["mask_geometry"], [])[0] > 0
    pixels = read_cropped_image(path, sample["geometry"])
    assert alike(shown[:, 36:], pixels[:, 36:]) and mask[:, 36:].all()
    left = shown[:, :28].reshape(-1, 3).mean(axis=0)
    assert left[0] > left[1] + 60 and left[0] > left[2] + 60


@pytest.mark.slow
def test_rules_have_their_counts_and_examples(project) -> None:
    home = project(**settings(minimum_image_size=50))
    home.image("good.png", (64, 64))
    for number in range(5):
        home.image(f"small{number}.png", (20, 20), seed=number)
    (home.media / "<i>.png").write_text("no picture")
    (home.media / "<i>.txt").write_text("a caption")
    planned(home, "stages.max_reject_fraction=1.0")
    _, page = show(home)
    assert "too-small" in page.text and "not-an-image" in page.text
    assert len(re.findall(r"small\d\.png: is 20x20, less than minimum_image_size = 50", page.text)) == MAX_EXAMPLES
    assert not page.of("i")


@pytest.mark.slow
def test_a_dry_run_writes_nothing(project) -> None:
    home = project(**settings())
    home.image("one.png")
    planned(home)
    before = sorted(home.folder.rglob("*"))
    report = home.run(partial(preview.run, plan=True), dry_run=True)
    assert (report.remaining, report.exit_code) == (1, 0)
    assert sorted(home.folder.rglob("*")) == before
    done = home.run(partial(preview.run, plan=True))
    name = done.details["generation"]
    assert Path(done.details["page"]) == home.folder / "output" / "preview" / f"plan-{name}.html"
    assert Path(done.details["page"]).exists()


def test_there_must_be_a_plan(project) -> None:
    home = project(**settings())
    for plan in (True, False):
        with pytest.raises(LatentpressError, match="there is no plan"):
            home.run(partial(preview.run, plan=plan))


def test_a_plan_whose_older_part_was_removed_is_named(project) -> None:
    home = project(**settings())
    home.image("one.png")
    planned(home)
    home.image("two.png", seed=1)
    planned(home)
    oldest = sorted((home.root / "plans").iterdir())[0]
    for path in oldest.iterdir():
        path.unlink()
    with pytest.raises(LatentpressError, match="1 samples that no plan describes"):
        show(home)
