"""The page of `latentpress ui` with what was set aside: by reason with the remedy, and searched."""

from collections.abc import Callable

import pytest

from stages import bucket, discover
from stages.pages.ui.records import MOST_SHOWN
from tests.project import Project
from tests.stages.ui_server import UiServer

HOSTILE = "<img src=x onerror=alert(1)>.png"


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    made = project(stages={"max_reject_fraction": 1.0})
    made.settings["datasets"][0]["minimum_image_size"] = 32
    made.image("good.png", (64, 48), "a caption")
    made.image("tiny.png", (16, 16), "a caption")
    made.image("without.png", (64, 48)).with_suffix(".txt").unlink()
    (made.media / "broken.png").write_bytes(b"no picture")
    (made.media / "broken.txt").write_text("a caption")
    (made.media / HOSTILE).write_bytes(b"no picture")
    made.config()
    return made


def test_before_anything_was_set_aside(server: UiServer) -> None:
    assert "Nothing was set aside" in server.get("/set-aside").text


def test_reasons_remedies_and_the_search(home: Project, server: UiServer) -> None:
    home.run(discover.run)
    home.run(bucket.run)
    text = server.get("/set-aside").text
    assert "4 of 4 items" in text and "broken.png" in text and "tiny.png" in text and "without.png" in text
    assert "minimum_image_size" in text, "the remedy of what is too small"
    assert "<img" not in text and "&lt;img src=x" in text

    found = server.get("/set-aside?words=BROKEN").text
    assert "1 of 4 items" in found and "tiny.png" not in found
    assert "0 of 4 items" in server.get("/set-aside?words=broken+tiny").text
    stage = server.get("/set-aside?stage=bucket").text
    assert "tiny.png" in stage and "broken.png" not in stage
    assert 'href="/set-aside?stage=bucket">1 set aside</a>' in server.get("/").text
    for odd in ("?first=-1", "?first=99999999", "?first=x", "?stage=<b>", "?words=%00"):
        answer = server.get(f"/set-aside{odd}")
        assert answer.status == 200 and "<b><" not in answer.text, odd


def test_many_items_have_pages(home: Project, server: UiServer) -> None:
    for number in range(MOST_SHOWN + 5):
        (home.media / f"bad{number:04d}.png").write_bytes(b"no picture")
    home.run(discover.run)
    first = server.get("/set-aside?words=bad").text
    assert f"1 to {MOST_SHOWN} are shown" in first and "bad0000.png" in first and "bad0204.png" not in first
    second = server.get(f"/set-aside?words=bad&first={MOST_SHOWN}").text
    assert f"{MOST_SHOWN + 1} to {MOST_SHOWN + 5} are shown" in second and "bad0204.png" in second
