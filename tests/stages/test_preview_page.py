"""The page of a plan: escaping, which samples are chosen, what it needs."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import UsageError
from stages.media.files import MediaError
from stages.pages.html import Section, render_template
from stages.pages.plan_samples import PlanSample, SamplePixels
from stages.preview import plan_card
from tests.stages.html_page import HOSTILE, SEEN, Page
from tests.stages.plan_previews import planned, rows, settings, show


def plan_page(word: str) -> Page:
    """A page whose every text is `word`: a sample that can't be shown, an image, and a clip."""
    place = dict.fromkeys(("dataset", "path", "source_path", "mask_path"), word)
    place |= {"role": "eval", "regularization": True, "repeats": 2, "weight": 2.0}
    cut = {"bucket": "64x64@1", "resize_w": 80, "resize_h": 64, "x": 8, "y": 0}
    sample = {"kind": "image", "condition": "source", "mask_id": word, "geometry": cut}
    shape, dot = {"width": 60, "height": 48, "lost": 0.2, "stretched": 0.0}, np.zeros((1, 10, 10, 3), np.uint8)
    clip = sample | {"kind": "video", "start": 0.5, "rate": 12.0, "condition": "first-frame"}
    found = MediaError("missing", word, word, word), SamplePixels(dot, (dot,), dot, dot[0])
    items = [(PlanSample(place, kind, shape), result) for kind in (sample, clip) for result in found]
    line = {"bucket": "64x64@1", word: word, "unknown": math.nan, "lines": [word], "latents_mib": 1.5}
    cards = [plan_card(item, [word, "", word, word], result) for item, result in items]
    sections = [Section(word, word, line, word, cards), Section(word, table=[line])]
    pieces = list(render_template("preview.html", title=word, intro=[word], buckets=[line], sections=sections))
    assert len(pieces) > len(cards)  # it is rendered an item at a time
    return Page(b"".join(pieces).decode())


def test_whatever_text_a_plan_holds_adds_no_tag_and_no_attribute() -> None:
    page, plain = plan_page(HOSTILE), plan_page("word")
    assert page.structure == plain.structure
    for card in page.articles:
        assert f"/{SEEN}" in card and "\\udcff" in card and "49" not in card
    assert page.of("img")[0]["alt"] == f"i2i source, cropped: {SEEN}"
    assert page.of("svg")[0]["aria-label"] == f"{SEEN}: whole picture, 20.0% cut off"


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


@pytest.mark.slow
def test_a_bucket_can_be_chosen(project) -> None:
    home = project(**settings())
    for number, size in enumerate(((64, 64), (128, 64))):
        home.image(f"{number}.png", size, seed=number)
    names = sorted(row["bucket"] for row in planned(home).details["buckets"])
    assert len(names) == 2
    report, page = show(home, bucket=["64x64@1"])
    assert [row["bucket"] for row in report.details["buckets"]] == ["64x64@1"]
    assert len(page.articles) == 1
    with pytest.raises(UsageError, match="has no 512x512@1"):
        show(home, bucket=["512x512@1"])
    with pytest.raises(UsageError, match="write WIDTHxHEIGHT"):
        show(home, bucket=["large"])
