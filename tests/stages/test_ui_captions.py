"""The page of `latentpress ui` with captions: listed, searched, edited, and taken back."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from cache.store.store import Store
from stages import discover
from stages.discovery.media_table import read_media_table
from stages.pages.ui.captions_page import MOST_SHOWN
from tests.background import until as until_so
from tests.project import Project
from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)
from tests.stages.describing import SMALL, with_ends, written
from tests.stages.ui_server import UiServer


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    made = project()
    made.image("a.png", (64, 48), "a <b>bold</b> caption", 1)
    made.image("b.png", (64, 48), "Another one\nand a second", 2)
    made.config()
    return made


def test_read_searched_and_edited(home: Project, server: UiServer) -> None:
    assert "is not discovered yet" in server.get("/captions").text
    home.run(discover.run)
    text = server.get("/captions").text
    assert "2 of 2 items, 0 edited" in text and "a &lt;b&gt;bold" in text and "<b>bold" not in text
    assert "1 of 2 items" in server.get("/captions?words=ANOTHER+second").text
    table = read_media_table(Store(home.root), "photos").to_pydict()
    a = dict(zip(table["path"], table["media_id"], strict=True))["a.png"]
    assert server.post(f"/captions/{a}/save", text=" \n").status == 409
    assert server.post(f"/captions/{a}/save", text="  a <i>new</i> one \r\n\r\nand more").status == 200
    zero = server.post(f"/captions/{a}/save", text="a\0cat")
    assert zero.status == 409 and "zero byte" in zero.json["error"]
    again = server.post(f"/captions/{a}/save", text="late")
    assert again.status == 409 and "edited this caption" in again.json["error"]
    edited = server.get("/captions?edited=1&words=new").text
    assert "1 of 2 items, 1 edited" in edited and "a &lt;i&gt;new" in edited and "a &lt;b&gt;bold" in edited
    before = json.dumps(["a <i>new</i> one", "and more"])
    assert server.post(f"/captions/{a}/restore", before=before).status == 200
    assert "0 edited" in server.get("/captions").text
    for path in (f"/captions/{'0' * 32}/save", "/captions/x/save", f"/captions/{a}/remove"):
        assert server.post(path, text="x").status == 404
    for odd in ("[1]", "{", '"x"', "[" * 5000 + "]" * 5000):
        assert server.post(f"/captions/{a}/save", text="x", before=odd).status == 400
    for odd in ("?first=-1", "?first=9999999", "?dataset=<b>", "?words=%00"):
        assert server.get(f"/captions{odd}").status == 200
    assert (home.media / "a.txt").read_text() == "a <b>bold</b> caption" and MOST_SHOWN > 2


@pytest.mark.long
@pytest.mark.slow
def test_thumbnails_beside_captions_are_made_by_a_program(home: Project, server: UiServer) -> None:
    """Of the items that are shown and no others; by a button that a script presses."""
    home.image("c.png", (64, 48), "the same as a.png", 1)
    home.image("d.png", (64, 48), "damaged later", 3)
    home.run(discover.run)
    (home.media / "d.png").write_bytes(b"no picture")
    before = server.get("/captions?words=bold").text
    assert 'data-make="start-caption-thumbnails"' in before and "<img" not in before and "no picture" in before
    assert server.post("/captions/thumbnails", dataset="photos", words="bold").status == 200
    assert server.wait_for_end("caption-thumbnails").exit_code == 0
    text = server.get("/captions?words=bold").text
    (address,) = set(re.findall(r'<img src="(/thumbnails/[0-9a-f]{32}\.webp)"', text))
    answer = server.get(address)
    assert answer.status == 200 and answer.headers["content-type"] == "image/webp" and "data-make" not in text
    rest = server.get("/captions").text
    assert rest.count("<img") == 2 and rest.count("data-late") == 2, (
        "c.png is the same picture; the others were not shown"
    )
    assert server.post("/captions/thumbnails", dataset="photos").status == 200
    assert server.wait_for_end("caption-thumbnails").exit_code == 0
    rest = server.get("/captions").text
    assert rest.count("<img") == 3 and "data-late" not in rest and rest.count("no picture") == 1, "d.png has none"
    for verb in ("start", "restart", "retry"):
        assert server.post(f"/jobs/caption-thumbnails/{verb}").status == 404, "of what, it has to be told"
    assert server.post("/captions/thumbnails", dataset="photos", words="absent").status == 409


def test_in_a_browser(home: Project, server: UiServer, browser: Any) -> None:  # noqa: F811
    """An edit is saved by keys and taken back; runs are queued, moved and removed without leaving the page."""
    home.run(discover.run)
    page = browser.new_page()
    errors = note_errors(page)
    page.goto(f"{server.url}/captions?words=bold")
    page.locator("textarea").fill("my own words")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".mark", has_text="edited").wait_for()
    assert page.locator("textarea").input_value() == "my own words" and "words=bold" in page.url
    page.locator("summary").click()
    page.locator("details button").click()
    page.locator(".mark").wait_for(state="detached")
    assert page.locator("textarea").input_value() == "a <b>bold</b> caption"
    page.goto(f"{server.url}/queue")
    for name in ("one", "two"):
        page.locator("#run-name").fill(name)
        page.keyboard.press("Enter")
        until(page, f"document.querySelector('#entries li:last-child h2')?.textContent === '{name}'")
    page.locator("#up-2").click()
    until(page, "document.querySelector('#entries li h2').textContent === 'two'")
    page.locator("#remove-1").click()
    until(page, "document.querySelectorAll('#entries li').length === 1")
    assert errors == [] and page.locator("#start-queue").is_visible()
    page.close()


@pytest.mark.slow
def test_captions_by_a_model_are_shown_and_an_edit_wins(
    home: Project, forked_programs: None, server: UiServer, tiny: Callable[[str], Any]
) -> None:
    """Of items whose files have none, started there. A picture that is there twice, once with a caption, is edited
    twice."""
    home.settings |= {"caption": SMALL}
    home.settings["model"]["path"] = str(with_ends(tiny("kandinsky5-image-t2i"), home.folder / "model"))
    home.settings["stages"] |= {"caption": {"threads": 1, "readers": 1}, "max_reject_fraction": 1.0}
    for number in range(4):
        home.image(f"{number}.png", (64, 48), None, number)  # type: ignore[arg-type]
    assert "start-caption" not in server.get("/captions").text
    home.run(discover.run)
    assert 'id="start-caption"' in server.get("/captions").text
    assert server.post("/jobs/caption/start").status == 200 and server.wait_for_end("caption").exit_code == 0
    found = written(home)
    until_so(lambda: f"<span>{len(found)} of {len(found)} items</span>" in server.get("/").text, "its bar")
    path, (text, *_) = max(found.items(), key=lambda made: sum(letter.isalpha() for letter in made[1][0]))
    page = server.get("/captions").text
    assert page.count(">by a model<") == len(found)
    word = max(re.findall("[a-z]+", text), key=len)
    assert word in page
    table = read_media_table(Store(home.root), "photos").to_pydict()
    media_id = dict(zip(table["path"], table["media_id"], strict=True))[path]
    assert server.post(f"/captions/{media_id}/save", text="mine").status == 200
    edited = server.get("/captions?edited=1").text
    assert "2 edited" in edited and "mine</textarea>" in edited and "Of the model" in edited and word in edited
