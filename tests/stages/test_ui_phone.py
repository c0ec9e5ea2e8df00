"""`latentpress ui` on a phone, by keys, and with hostile names, in a real browser."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from cache.runs.run_queue import RunQueue
from stages import discover
from tests.project import Project
from tests.stages.browser import browser  # noqa: F401 (a fixture)
from tests.stages.report_run import FakeRun, step_line
from tests.stages.ui_server import ui_server

pytestmark = pytest.mark.slow


def test_pages_on_a_phone_and_by_keys(project: Callable[..., Project], browser: Any) -> None:  # noqa: F811
    home = project()
    home.config()
    run = FakeRun(home)
    run.metrics(*(step_line(step) for step in range(1, 4)))
    run.latent(3, "one", prompt="<img src=x onerror=alert(1)>" + "x" * 500, bucket="64x48@12")
    run.clip(3, "one", size=(640, 480))
    run.latent(2, "one")
    (run.folder / "report.html").write_text("<p>a report</p>" + "<p>long</p>" * 100)
    preview = home.folder / "output/preview/latents-0123456789ab.html"
    preview.parent.mkdir()
    preview.write_text("<p id=said>a preview</p><p style='width: 3000px'>wide</p>")
    (home.media / f"{'n' * 200}.png").write_bytes(b"no picture")
    home.image(f"{'c' * 200}.png", caption="y" * 3000)
    home.run(discover.run)
    config = home.config()
    queue = RunQueue(home.folder / "output")
    queue.add(home.folder / "pipeline.yaml", [f"train.run={'r' * 100}"], config.run_folder)
    queue.switch(True)
    queue.take_next()
    queue.finish(1, "failed", "<img src=x onerror=alert(1)>" + "z" * 2000, "w" * 500)
    with ui_server(home) as server:
        server.site.programs._new_log("run").write_text(f"{'x' * 3000}\n<img src=x onerror=alert(1)>\n")
        context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
        page, dialogs, requests = context.new_page(), [], []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        for path in (
            *("/", "/pictures", "/pictures/one?name=one&step=3", "/settings", "/rejected", "/logs", "/logs/run"),
            *("/plan", "/preview", "/report", "/queue", "/captions"),
        ):
            page.goto(server.url + path)
            if path == "/preview":
                page.frame_locator("#document").locator("#said", has_text="a preview").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") == 390, path
            if page.locator("iframe").count():
                assert page.evaluate("document.documentElement.scrollHeight") == 844, "only the frame scrolls"
                assert page.locator("iframe").bounding_box()["height"] > 400
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert max(map(int, re.findall(r"\d+", colour)[:3])) < 50, "dark"
        assert (
            "nnnn" in server.get("/rejected").text
            and dialogs == []
            and all(url.startswith(server.url) for url in requests)
        )
        page.goto(f"{server.url}/pictures/one?name=one&step=3")
        assert page.evaluate("document.querySelector('video').play().then(() => true)")
        page.keyboard.press("ArrowLeft")
        page.wait_for_url("**/pictures/one?name=one&step=2")
        page.keyboard.press("Escape")
        page.wait_for_url("**/pictures")
        page.goto(server.url)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the content"
        focused = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            focused.add(page.evaluate("document.activeElement.id"))
        assert {"start-run", "log-run", "stages-state"} <= focused
        context.close()
