"""The page of `latentpress report` in a real browser, headless Chromium without a network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages import bucket, discover, report
from tests.project import Project
from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)
from tests.stages.html_page import HOSTILE
from tests.stages.report_run import FakeRun, eval_line, step_line

pytestmark = pytest.mark.slow

CUT_OFF = """[...document.querySelectorAll('.wide')].filter((table) => table.scrollWidth > table.clientWidth)
    .map((table) => table.innerText)"""
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def make_page(project: Callable[..., Project]) -> Path:
    hostile = HOSTILE.replace("\x00", "").replace("\udcff", "")
    home = project(validation={"size": "64x48", "prompts": [{"name": "one", "prompt": hostile}]}, train={"steps": 40})
    home.image("a.png", (64, 48), hostile)
    home.image("b.png", (48, 64), "an old house by the sea")
    home.run(discover.run)
    home.run(bucket.run)
    runs = [FakeRun(home, "first"), FakeRun(home, "second")]
    for fake_run in runs:
        fake_run.metrics(eval_line(0, 2.0), *(step_line(step) for step in range(1, 41)), eval_line(40, 1.5))
        for step in range(0, 41, 5):
            fake_run.latent(step, "one", prompt=hostile, negative_prompt=hostile)
            fake_run.clip(step, "one", size=(128, 96))
    return Path(home.run(report.run, runs=["first", "second"]).details["page"])


def test_a_page_in_a_browser(project: Callable[..., Project], browser: Any) -> None:  # noqa: F811
    """Plots have points, clips play, a phone scrolls only down, keys reach all controls, and no request is sent."""
    page_path = make_page(project)
    for size, scheme in (("desktop", "light"), ("phone", "dark")):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=size == "phone"
        )
        page, requests = context.new_page(), []
        errors = note_errors(page)
        page.on("request", lambda request, entries=requests: entries.append(request.url))
        page.on("dialog", lambda dialog, entries=errors: entries.append("a script of a caption ran"))
        page.goto(page_path.as_uri())
        assert errors == [] and not [url for url in requests if not url.startswith(("data:", "blob:", "file:"))]
        assert [url for url in requests if url.startswith("file:")] == [page_path.as_uri()]

        assert page.evaluate("document.documentElement.scrollWidth") == width
        background, text = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color")
        )
        assert _brightness(background) > 200 > 100 > _brightness(text) or scheme == "dark"
        assert _brightness(background) < 50 < 200 < _brightness(text) or scheme == "light"
        label = page.evaluate("getComputedStyle(document.querySelector('.chart text')).fill")
        assert (_brightness(label) > 120) == (scheme == "dark")

        box = page.locator(".legend input").first
        box.focus()
        page.keyboard.press("Space")
        displays = page.evaluate("[...document.querySelectorAll('#plot-loss g')].map((curve) => curve.style.display)")
        assert displays == ["none", "", "", ""], "a key hides a curve"
        if size == "phone":
            assert page.evaluate(CUT_OFF) == []
            finger_scrolls(context, page)
        else:
            values_and_zoom(page)

        video = page.locator("video").first
        video.scroll_into_view_if_needed()
        until(page, "document.querySelector('video').currentTime > 0.2")
        assert page.evaluate("document.querySelector('video').videoWidth") == 128
        assert reached_by_tab(page) >= {"A", "SUMMARY", "VIDEO", "DIV"}
        context.close()


def values_and_zoom(page: Any) -> None:
    """Values under the mouse; a drag enlarges a part of the steps, a double click shows all of them."""
    chart = page.locator("#plot-eval .lines")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 20)
    assert page.inner_text("#plot-eval .readout").split("\n") == ["step 40", "first: 1.5", "second: 1.5"]
    labels = page.locator("#plot-eval .across").text_content()
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40)
    page.mouse.up()
    left, _, width, _ = map(float, chart.get_attribute("viewBox").split())
    assert (left, width) == (pytest.approx(600, abs=3), pytest.approx(300, abs=5))
    assert page.locator("#plot-eval .across").text_content() != labels
    chart.dblclick()
    assert chart.get_attribute("viewBox") == "0 0 1000 1000"
    assert page.locator("#plot-eval .across").text_content() == labels


def finger_scrolls(context: Any, page: Any) -> None:
    """A finger that moves over a plot scrolls the page."""
    page.evaluate("document.getElementById('plot-loss').scrollIntoView()")
    before = page.evaluate("scrollY")
    session = context.new_cdp_session(page)
    for y in range(250, 0, -20):
        session.send(
            "Input.dispatchTouchEvent",
            {"type": "touchStart" if y == 250 else "touchMove", "touchPoints": [{"x": 200, "y": y}]},
        )
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    until(page, f"scrollY > {before} + 150")


def _brightness(colour: str) -> float:
    """Brightness of "rgb(1, 2, 3)" or "#010203", 0 to 255."""
    if colour.startswith("#"):
        return sum(int(colour[place : place + 2], 16) for place in (1, 3, 5)) / 3
    return sum(map(int, colour[4:-1].split(","))) / 3


def reached_by_tab(page: Any) -> set[str]:
    """Tags of the focused elements, in order of the Tab key."""
    tags = set()
    page.locator("nav a").first.focus()
    for _ in range(150):
        tags.add(page.evaluate("document.activeElement.tagName"))
        page.keyboard.press("Tab")
    return tags
