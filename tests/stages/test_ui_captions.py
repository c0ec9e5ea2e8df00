"""The page of `latentpress ui` with captions: list, search, edit, restore."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from cache.store.store import Store
from schemas.config.loading import load_config
from schemas.errors import LatentpressError
from stages import discover
from stages.discovery.media_table import read_media_table
from stages.pages.ui.captions_page import MAX_SHOWN
from stages.pages.ui.child_programs import ChildPrograms
from tests.background import until as until_so
from tests.project import Project
from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)
from tests.stages.describing import SMALL, with_ends, written
from tests.stages.ui_server import UiServer


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    new_project = project()
    new_project.image("a.png", (64, 48), "a <b>bold</b> caption", 1)
    new_project.image("b.png", (64, 48), "Another one\nand a second", 2)
    new_project.config()
    return new_project


def test_read_searched_and_edited(home: Project, server: UiServer) -> None:
    for path in ("/captions", "/plan"):
        text = server.get(path).text
        assert 'action="/jobs/discover/start"' in text and ">Read the pictures</button>" in text, path
    home.run(discover.run)
    until_so(lambda: ">Plan the crops</button>" in server.get("/plan").text, "the next stage")
    text = server.get("/captions").text
    assert "2 of 2 items, 0 edited, 0 without" in text and "a &lt;b&gt;bold" in text and "<b>bold" not in text
    assert "1 of 2 items" in server.get("/captions?words=ANOTHER+second").text
    table = read_media_table(Store(home.root), "photos").to_pydict()
    a = dict(zip(table["path"], table["media_id"], strict=True))["a.png"]
    assert server.post(f"/captions/{a}/save", text=" \n").status == 409
    assert server.post(f"/captions/{a}/save", text="  a <i>new</i> one \r\n\r\nand more").status == 200
    zero = server.post(f"/captions/{a}/save", text="a\0cat")
    assert zero.status == 409 and "zero byte" in zero.json["error"]
    again = server.post(f"/captions/{a}/save", text="late")
    assert again.status == 409 and "edited this caption" in again.json["error"]
    edited = server.get("/captions?shown=edited&words=new").text
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
    assert (home.media / "a.txt").read_text() == "a <b>bold</b> caption" and MAX_SHOWN > 2


def test_items_without_a_caption_are_captioned_one_by_one_and_all_at_once(home: Project, server: UiServer) -> None:
    """`discover` rejects all items, so there is no media table yet; a caption is written into a new file."""
    for name in ("a", "b"):
        (home.media / f"{name}.txt").unlink()
    (home.media / "b.txt").write_text(" \n")
    with pytest.raises(LatentpressError):
        home.run(discover.run, "stages.max_reject_fraction=0")
    text = server.get("/captions").text
    assert "2 of 2 items, 0 edited, 2 without a caption" in text and "the text encoder of kandinsky5-image" in text
    a, b = re.findall(r'action="/captions/([0-9a-f]{32})/save"', text)
    assert server.post(f"/captions/{a}/save", text="").status == 409
    for media_id in (a, b):
        assert server.post(f"/captions/{media_id}/save", text="a cat\r\nan animal").status == 200
        assert server.post(f"/captions/{media_id}/save", text="late").status == 409
    assert (home.media / "b.txt").read_text() == "a cat\nan animal\n"
    assert "0 without a caption" in server.get("/captions").text
    assert server.post("/captions/replace", find="cat", **{"with": "dog"}).status == 200
    assert (home.media / "a.txt").read_text() == "a dog\nan animal\n"
    home.run(discover.run)
    until_so(lambda: not server.site.list_rejects(), "the new listing")
    assert server.post("/captions/replace", find="a dog", **{"with": "our dog"}).status == 200
    assert "2 of 2 items, 2 edited, 0 without" in server.get("/captions?words=our").text
    assert server.post("/captions/replace", find="Dog", **{"with": ""}).status == 409
    assert (home.media / "a.txt").read_text() == "a dog\nan animal\n"


def test_words_for_all_and_a_model_for_all(home: Project, server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    home.run(discover.run)
    assert server.post("/captions/trigger", dataset="photos", trigger=" ").status == 409
    assert server.post("/captions/trigger", dataset="none", trigger="x").status == 409
    assert server.post("/captions/trigger", dataset="photos", trigger=' oh\'wx: "woman" ').status == 200
    file = home.folder / "pipeline.yaml"
    assert load_config(file).datasets[0].trigger == 'oh\'wx: "woman"'
    assert "woman&#34;" in server.get("/captions").text
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(ChildPrograms, "start", lambda self, name, *more: started.append((name, *more)))
    assert server.post("/captions/describe").status == 200
    assert load_config(file).caption and started == [("run", "--set=stages.order=[discover, caption]")]


@pytest.mark.long
@pytest.mark.slow
def test_thumbnails_next_to_captions_are_made_by_a_program(home: Project, server: UiServer) -> None:
    """Only items that are shown get thumbnails; the script of the page presses the button."""
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
    text = server.get("/captions").text
    assert text.count("<img") == 2 and text.count("data-late") == 2, (
        "c.png is the same picture; b.png and d.png were not shown"
    )
    assert server.post("/captions/thumbnails", dataset="photos").status == 200
    assert server.wait_for_end("caption-thumbnails").exit_code == 0
    text = server.get("/captions").text
    assert text.count("<img") == 3 and "data-late" not in text and text.count("no picture") == 1, (
        "d.png has no thumbnail"
    )
    for verb in ("start", "restart", "retry"):
        assert server.post(f"/jobs/caption-thumbnails/{verb}").status == 404, "this program requires a list of items"
    assert server.post("/captions/thumbnails", dataset="photos", words="absent").status == 409


def test_in_a_browser(home: Project, server: UiServer, browser: Any) -> None:  # noqa: F811
    """An edit is saved by keys and restored; runs are queued, moved and removed without leaving the page."""
    home.run(discover.run)
    page = browser.new_page()
    errors = note_errors(page)
    page.goto(f"{server.url}/captions?words=bold")
    page.locator("textarea").fill("my own words")
    page.keyboard.press("Tab")
    page.locator(".mark", has_text="edited").wait_for()
    assert page.locator("textarea").input_value() == "my own words" and "words=bold" in page.url
    page.locator(".captions summary").click()
    page.locator(".captions details button").click()
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
    """The page starts the program for items without captions. A picture in two files, one of them with a caption, has
    two edits."""
    home.settings |= {"caption": SMALL}
    home.settings["model"]["path"] = str(with_ends(tiny("kandinsky5-image-t2i"), home.folder / "model"))
    home.settings["stages"] |= {"caption": {"threads": 1, "readers": 1}, "max_reject_fraction": 1.0}
    for number in range(4):
        home.image(f"{number}.png", (64, 48), None, number)  # type: ignore[arg-type]
    assert "start-caption" not in server.get("/captions").text
    home.run(discover.run)
    assert 'id="start-caption"' in server.get("/captions").text
    assert server.post("/jobs/caption/start").status == 200 and server.wait_for_end("caption").exit_code == 0
    captions = written(home)
    until_so(lambda: f"<span>{len(captions)} of {len(captions)} items</span>" in server.get("/").text, "its bar")
    path, (text, *_) = max(captions.items(), key=lambda pair: sum(letter.isalpha() for letter in pair[1][0]))
    page = server.get("/captions").text
    assert page.count(">by a model<") == len(captions)
    word = max(re.findall("[a-z]+", text), key=len)
    assert word in page
    table = read_media_table(Store(home.root), "photos").to_pydict()
    media_id = dict(zip(table["path"], table["media_id"], strict=True))[path]
    assert server.post(f"/captions/{media_id}/save", text="mine").status == 200
    edited = server.get("/captions?shown=edited").text
    assert "2 edited" in edited and "mine</textarea>" in edited and "Caption by the model" in edited and word in edited
