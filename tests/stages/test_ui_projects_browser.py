"""Projects, a new one, an import, folders and thumbnails of `latentpress ui` in a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.cli.console import Options
from schemas.config.loading import load_config
from stages import discover
from stages.ui import open_projects
from tests.foreign_examples import SIMPLETUNER
from tests.project import Project
from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)
from tests.stages.report_run import FakeRun, step_line
from tests.stages.ui_server import UiServer, projects_server

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def place(project: Callable[..., Project], tmp_path: Path) -> Path:
    """Two projects, one with a run, another trainer's configuration, and folders of hostile and long names."""
    folder = tmp_path / "all"
    for name in ("harbour", "lantern"):
        home = Project(folder / name, json.loads(json.dumps(project().settings)))
        for number in range(3):
            home.image(f"{number}.png", (64, 48), f"{HOSTILE} {name} {number}", number)
        home.config()
    home.run(discover.run)
    run = FakeRun(home)
    run.metrics(*(step_line(step) for step in range(1, 4)))
    run.latent(3, "one")
    run.picture(3, "one", (90, 120, 30))
    for name, text in SIMPLETUNER.items():
        (folder / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "theirs" / name).write_text(text)
    (folder / HOSTILE).mkdir()
    (folder / ("n" * 200)).mkdir()
    (folder / "theirs" / f"{HOSTILE}{'m' * 150}.json").write_text("{}")
    (folder / f"{HOSTILE}.yaml").write_text(f"model: {HOSTILE}{'z' * 500}")
    return folder


@pytest.fixture
def server(place: Path) -> Iterator[UiServer]:
    with projects_server(open_projects([], place, Options())) as started:
        yield started


@pytest.mark.parametrize(("width", "scheme", "script"), [(1280, "light", False), (390, "dark", True)])
def test_no_page_is_wider_than_the_window(
    server: UiServer,
    place: Path,
    browser: Any,  # noqa: F811
    width: int,
    scheme: str,
    script: bool,
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, java_script_enabled=script
    )
    page, dialogs, requests = context.new_page(), [], []
    errors = note_errors(page)
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    for path in (
        *("/projects", f"/new?at={place}", f"/new?media={place}/lantern/media", f"/import?at={place}/theirs"),
        *(f"/folders?at={place}", "/folders?at=/etc", "/p/harbour/", "/p/lantern/", "/p/lantern/captions"),
        *("/p/lantern/settings", "/p/lantern/pictures"),
    ):
        page.goto(server.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") == width, path
        assert page.locator("h1").count() == 1 and page.locator("header nav [aria-current]").count() <= 1
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = max(map(int, re.findall(r"\d+", colour)[:3])) < 50
        assert dark == (scheme == "dark")
        for control in page.locator("input:not([type=hidden]), select, textarea").all():
            named = "element => element.labels?.length || element.ariaLabel || element.hidden || !element.offsetParent"
            assert control.evaluate(named), (path, control.evaluate("element => element.outerHTML"))
    assert dialogs == [] and errors == [] and all(url.startswith(server.url) for url in requests)
    context.close()


def test_an_import_by_keys_and_without_a_script(server: UiServer, place: Path, browser: Any) -> None:  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 844}, java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{server.url}/import")
    for name in ("theirs", "config"):
        page.get_by_role("link", name=name, exact=True).focus()
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/{name}")
    page.get_by_label("config.json").focus()
    page.keyboard.press("Space")
    page.get_by_label("Name of the project").fill("mine")
    page.keyboard.press("Enter")
    page.wait_for_url("**/proposals/*")
    while page.locator("#write").count() == 0:
        page.wait_for_timeout(200)
        page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert "lora_rank" in page.locator("main").inner_text() and not (place / "mine").exists()
    page.locator("#write").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/p/mine/")
    assert load_config(place / "mine/pipeline.yaml").train.adapter.rank == 4
    page.get_by_role("link", name="Projects", exact=True).click()
    page.get_by_role("link", name="mine", exact=True).wait_for()
    context.close()


def test_files_are_sent_to_a_new_project(server: UiServer, place: Path, browser: Any) -> None:  # noqa: F811
    page = browser.new_page()
    page.goto(f"{server.url}/new")
    page.get_by_label("Name of the project").fill("my cat")
    text = {"name": "0.txt", "mimeType": "text/plain", "buffer": b"a cat"}
    page.locator("#files").set_input_files([text, {**text, "name": "run.sh"}])
    page.locator("#sent .problem").wait_for()
    assert "1 of 2 files" in page.locator("#sent").inner_text() and "run.sh" in page.locator("#sent").inner_text()
    page.get_by_role("link", name="Continue with the copied files").click()
    page.wait_for_url("**/new?media=*")
    assert page.locator("#name").input_value() == "my-cat" and (place / "my-cat/my-cat/0.txt").read_text() == "a cat"
    page.locator("#card").fill("6")
    fits = page.locator("#recipes").inner_text()
    assert "barely fits 6 GB: 5.7 of 6" in fits and "does not fit 6 GB: 11.3 of 6" in fits
    assert page.locator(".fits.no").count()
    page.close()


def test_a_folder_is_chosen_in_the_configuration(server: UiServer, place: Path, browser: Any) -> None:  # noqa: F811
    page = browser.new_page()
    errors = note_errors(page)
    page.goto(f"{server.url}/p/lantern/settings")
    page.get_by_label("Choose a folder: new dataset").focus()
    page.keyboard.press("Enter")
    chooser = page.locator("#chooser")
    for name in ("harbour", "media"):
        chooser.get_by_role("link", name=name, exact=True).focus()
        page.keyboard.press("Enter")
    chooser.locator("b", has_text="harbour/media").wait_for()
    chooser.locator("#take").focus()
    page.keyboard.press("Enter")
    assert page.locator('[id="new:datasets"]').input_value() == str(place / "harbour/media")
    page.keyboard.press("Enter")
    until(page, f"document.getElementById('text').value.includes({json.dumps(str(place / 'harbour/media'))})")
    page.get_by_label("Choose a folder: datasets.0.instance_data_dir").click()
    chooser.locator("#folders").wait_for()
    page.keyboard.press("Escape")
    assert not chooser.is_visible() and errors == []
    page.evaluate("document.getElementById('text').value = ''")
    page.close(run_before_unload=False)


def test_thumbnails_arrive_next_to_a_field_that_is_edited(server: UiServer, browser: Any) -> None:  # noqa: F811
    page = browser.new_page()
    errors = note_errors(page)
    page.goto(f"{server.url}/p/lantern/captions")
    field = page.locator("textarea").first
    field.fill("half a sentence")
    until(page, "[...document.querySelectorAll('.thumbnail img')].filter((one) => one.naturalWidth).length === 3")
    assert field.input_value() == "half a sentence" and errors == []
    assert field.evaluate("element => element === document.activeElement")
    page.close()
