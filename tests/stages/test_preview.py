"""The plan as a page: the pixels that the encoder gets, escaped text, and damaged items, which do not stop it."""

import math
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
from schemas.errors import LatentpressError, UsageError
from stages import preview
from stages.media.files import MediaError
from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask
from stages.pages.html import Section, render_template
from stages.pages.plan_samples import PlanSample, PlanTable, SamplePixels, frame_indices
from stages.preview import MAX_EXAMPLES, plan_card
from tests.stages.html_page import ESCAPED, HOSTILE, Page, alike, decoded
from tests.stages.plan_previews import planned, rows, settings, show, video_settings


@pytest.mark.slow
def test_images_are_shown_as_the_encoder_gets_them_and_what_is_left_out_with_its_reason(project) -> None:
    home = project(**settings(crop_aspect="square", minimum_image_size=50))
    path = home.image("wide.png", (200, 64))
    for number, name in enumerate(("fine.png", "gone.png", "other.png")):
        home.image(name, (64, 64), seed=number)
    for number in range(5):
        home.image(f"small{number}.png", (20, 20), seed=number)
    (home.media / "<i>.png").write_text("no picture")
    (home.media / "<i>.txt").write_text("a caption")
    planned(home, "stages.max_reject_fraction=1.0")
    (home.media / "gone.png").unlink()
    (home.media / "other.png").write_bytes(b"something else")
    report, page = show(home)
    assert (report.done, report.exit_code, len(page.articles)) == (2, 0, 4)
    [picture] = page.pictures("cropped to 64x64@1: wide.png")
    assert alike(picture, read_cropped_image(path, rows(home)["wide.png"]["geometry"]))
    assert not alike(picture, np.asarray(Image.open(path).resize((64, 64))))
    drawing = next(one for one in page.of("svg") if "wide.png" in one["aria-label"])
    assert drawing["viewbox"] == "0 0 200 64"  # uncropped, in its original shape
    assert drawing["aria-label"] == "wide.png: full picture, 68.0% cut off"
    assert "M68.00 0.00h64.00v64.00h-64.00z" in [path["d"] for path in page.of("path")]
    assert "200x64 → 64x64@1: resized to 200x64, cropped at (68, 0)" in page.article("wide.png")

    assert home.rejects(report) == {"gone.png": "missing", "other.png": "changed"}
    assert "(missing)" in page.article("gone.png")
    assert "(changed)" in page.article("other.png")
    assert "too-small" in page.text and "not-an-image" in page.text
    assert len(re.findall(r"small\d\.png: is 20x20, less than minimum_image_size = 50", page.text)) == MAX_EXAMPLES
    assert not page.of("i")


@pytest.mark.slow
def test_a_clip_is_shown_by_frames_of_its_times(project) -> None:
    home = project("kandinsky5-video-i2v", **video_settings(clip_selection="middle"))
    path = home.video("clip.mp4", frames=48, rate=24)
    planned(home)
    _, page = show(home)
    sample = rows(home)["clip.mp4"]
    times, frames = clip_times(sample["start"], sample["rate"], 17), read_sample_frames(path, sample, "pyav")
    assert sample["start"] > 0
    shown_frames = page.pictures(" s of clip.mp4")
    assert len(shown_frames) == 9 and "starts from its first frame" in page.article("clip.mp4")
    for picture, index in zip(shown_frames, frame_indices(17), strict=True):
        assert alike(picture, frames[index]), index
        assert f"{times[index]:.2f} s" in page.article("clip.mp4")
    assert np.abs(shown_frames[0].astype(int) - shown_frames[-1]).mean() > 50  # the two differ
    [drawing] = page.of("image")
    assert alike(decoded(drawing["href"]), read_sample_frames(path, sample | one_frame(64, 48), "pyav")[0])


def one_frame(width: int, height: int) -> dict[str, Any]:
    return {"geometry": {"bucket": f"{width}x{height}@1", "resize_w": width, "resize_h": height, "x": 0, "y": 0}}


@pytest.mark.slow
def test_an_item_that_takes_too_long_costs_itself_alone(project) -> None:
    home = project(**settings())
    home.image("slow.png", (1500, 1500))
    planned(home)
    report, page = show(home, "stages.item_timeout_s=0.0001")
    assert home.rejects(report) == {"slow.png": "timed-out"}
    assert "took longer than" in page.article("slow.png")


@pytest.mark.slow
def test_a_bucket_has_the_line_that_bucket_prints_and_can_be_chosen(project) -> None:
    home = project(**settings(crop_aspect="closest", crop_aspect_buckets=[1.0, 1.6], repeats=2, eval_fraction=0.3))
    for number in range(12):
        home.image(f"{number}.png", (64 + 16 * (number % 5), 64), seed=number)
    table = planned(home).details["buckets"]
    config = home.config()
    plan = PlanTable(Store(config.root), config, current_plan(Store(config.root), config))
    assert len(table) > 1 and plan.bucket_rows() == table
    before = sorted(home.folder.rglob("*"))
    dry = home.run(partial(preview.run, plan=True, items=20), dry_run=True)
    assert (dry.remaining, dry.exit_code) == (12, 0) and sorted(home.folder.rglob("*")) == before
    report, page = show(home, items=20)
    name = report.details["generation"]
    assert Path(dry.details["page"]) == home.folder / "output" / "preview" / f"plan-{name}.html"
    for row in table:
        assert all(heading(key) in page.text for key in row)
        assert f"of {plan.count(row['bucket'])} samples" in page.text
    held_out = plan.active.num_rows - sum(row["samples"] for row in table)
    assert sum("held out" in article for article in page.articles) == held_out

    report, page = show(home, bucket=["64x64@1"])
    assert [row["bucket"] for row in report.details["buckets"]] == ["64x64@1"]
    assert len(page.articles) == min(6, plan.count("64x64@1"))
    with pytest.raises(UsageError, match="512x512@1"):
        show(home, bucket=["512x512@1"])
    with pytest.raises(UsageError, match="write WIDTHxHEIGHT"):
        show(home, bucket=["large"])


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
    [picture] = page.pictures("mask: red is not trained: one.png")
    mask = read_sample_mask(home.folder / "masks" / "one.png", "image", sample["mask_geometry"], [])[0] > 0
    pixels = read_cropped_image(path, sample["geometry"])
    assert alike(picture[:, 36:], pixels[:, 36:]) and mask[:, 36:].all()
    left_color = picture[:, :28].reshape(-1, 3).mean(axis=0)
    assert left_color[0] > left_color[1] + 60 and left_color[0] > left_color[2] + 60


def test_there_must_be_a_plan(project) -> None:
    home = project(**settings())
    for plan in (True, False):
        with pytest.raises(LatentpressError, match="plan"):
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
    with pytest.raises(LatentpressError) as raised:
        show(home)
    assert "1 samples" in raised.value.message and "latentpress bucket" in raised.value.next_step


def plan_page(word: str) -> Page:
    """A page with `word` as every text: a sample that can't be shown, an image, and a clip."""
    place = dict.fromkeys(("dataset", "path", "source_path", "mask_path"), word)
    place |= {"role": "eval", "regularization": True, "repeats": 2, "weight": 2.0}
    cut = {"bucket": "64x64@1", "resize_w": 80, "resize_h": 64, "x": 8, "y": 0}
    sample = {"kind": "image", "condition": "source", "mask_id": word, "geometry": cut}
    shape, dot = {"width": 60, "height": 48, "lost": 0.2, "stretched": 0.0}, np.zeros((1, 10, 10, 3), np.uint8)
    clip = sample | {"kind": "video", "start": 0.5, "rate": 12.0, "condition": "first-frame"}
    results = MediaError("missing", word, word, word), SamplePixels(dot, (dot,), dot, dot[0])
    items = [(PlanSample(place, kind, shape), result) for kind in (sample, clip) for result in results]
    line = {"bucket": "64x64@1", word: word, "unknown": math.nan, "lines": [word], "latents_mib": 1.5}
    cards = [plan_card(item, [word, "", word, word], result) for item, result in items]
    sections = [Section(word, word, line, word, cards), Section(word, table=[line])]
    pieces = list(render_template("preview.html", title=word, intro=[word], buckets=[line], sections=sections))
    assert len(pieces) > len(cards)  # one item is rendered at a time
    return Page(b"".join(pieces).decode())


def test_whatever_text_a_plan_holds_adds_no_tag_and_no_attribute() -> None:
    page, plain = plan_page(HOSTILE), plan_page("word")
    assert page.structure == plain.structure
    for card in page.articles:
        assert f"/{ESCAPED}" in card and "\\udcff" in card and "49" not in card
    assert page.of("img")[0]["alt"] == f"i2i source, cropped: {ESCAPED}"
    assert page.of("svg")[0]["aria-label"] == f"{ESCAPED}: full picture, 20.0% cut off"


def test_no_template_switches_escaping_off() -> None:
    root = Path(__file__).resolve().parents[2]
    templates = [path for part in ("stages", "trainer", "examples") for path in (root / part).rglob("templates/*.html")]
    assert len(templates) >= 4
    for path in templates:
        assert not re.search(r"\|\s*safe\b|autoescape", path.read_text()), path


@pytest.mark.slow
def test_the_choice_stays_when_items_are_added_and_equal_files_are_shown_once(project) -> None:
    home = project(**settings())
    for number in range(8):
        home.image(f"old{number}.png", seed=number)
    planned(home)
    before = titles(show(home, items=4)[1])
    for number in range(4):
        home.image(f"new{number}.png", seed=100 + number)
    for number in range(8):
        home.image(f"zsame{number}.png", seed=number)
    planned(home)
    after = titles(show(home, items=4)[1])
    assert len(before) == len(after) == 4
    assert {title for title in after if "old" in title} <= before
    lowest = sorted(rows(home).values(), key=lambda row: row["sample_id"])[:4]
    assert after == {row["path"] for row in lowest}


def titles(page: Page) -> set[str]:
    return {name for text in page.articles for name in re.findall(r"photos/(\S+\.png)", text)}
