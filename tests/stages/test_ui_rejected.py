"""The page of `latentpress ui` with rejected items: reasons with remedies, and the search."""

import re
from collections.abc import Callable

import pytest

from cache.store.store import Store
from stages import bucket, discover
from stages.maintenance.rejected_items import list_rejected_items
from stages.pages import thumbnails
from stages.pages.thumbnails import can_have_thumbnail
from stages.pages.ui.child_programs import ChildPrograms
from stages.pages.ui.records import MAX_SHOWN
from tests.project import Project
from tests.stages.ui_server import UiServer

HOSTILE = "<img src=x onerror=alert(1)>.png"


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    new_project = project(stages={"max_reject_fraction": 1.0})
    new_project.settings["datasets"][0]["minimum_image_size"] = 32
    new_project.image("good.png", (64, 48), "a caption")
    new_project.image("tiny.png", (16, 16), "a caption")
    new_project.image("without.png", (64, 48)).with_suffix(".txt").unlink()
    (new_project.media / "broken.png").write_bytes(b"no picture")
    (new_project.media / "broken.txt").write_text("a caption")
    (new_project.media / HOSTILE).write_bytes(b"no picture")
    new_project.config()
    return new_project


def test_reasons_remedies_and_the_search(home: Project, server: UiServer) -> None:
    home.run(discover.run)
    home.run(bucket.run)
    text = server.get("/rejected").text
    assert "4 of 4 items" in text and "broken.png" in text and "tiny.png" in text and "without.png" in text
    assert "minimum_image_size" in text, "the remedy for items that are too small"
    assert "<img" not in text and "&lt;img src=x" in text

    matches = server.get("/rejected?words=BROKEN").text
    assert "1 of 4 items" in matches and "tiny.png" not in matches
    assert "0 of 4 items" in server.get("/rejected?words=broken+tiny").text
    stage = server.get("/rejected?stage=bucket").text
    assert "tiny.png" in stage and "broken.png" not in stage
    assert 'href="/rejected?stage=bucket">1 rejected</a>' in server.get("/").text
    for odd in ("?first=-1", "?first=99999999", "?first=x", "?stage=<b>", "?words=%00"):
        answer = server.get(f"/rejected{odd}")
        assert answer.status == 200 and "<b><" not in answer.text, odd


def test_before_a_download_the_rejects_of_discovery_are_listed(project: Callable[..., Project]) -> None:
    """The repository's commit, to which the encoding stages' lists belong, is unknown."""
    home = project(stages={"max_reject_fraction": 1.0})
    home.settings["model"].pop("path")
    home.image("good.png", (64, 48), "a caption")
    (home.media / "broken.png").write_bytes(b"no picture")
    home.run(discover.run)
    home.run(bucket.run)
    config = home.config()
    assert [item.path for item in list_rejected_items(Store(config.root), config)] == ["broken.png"]


def test_many_items_have_pages(home: Project, server: UiServer) -> None:
    for number in range(MAX_SHOWN + 5):
        (home.media / f"bad{number:04d}.png").write_bytes(b"no picture")
    home.run(discover.run)
    first = server.get("/rejected?words=bad").text
    assert f"1 to {MAX_SHOWN} are shown" in first and "bad0000.png" in first and "bad0204.png" not in first
    second = server.get(f"/rejected?words=bad&first={MAX_SHOWN}").text
    assert f"{MAX_SHOWN + 1} to {MAX_SHOWN + 5} are shown" in second and "bad0204.png" in second


@pytest.mark.slow
def test_thumbnails_are_made_by_a_program_and_nothing_else_is_served(home: Project, server: UiServer) -> None:
    home.run(discover.run)
    home.run(bucket.run)
    before = server.get("/rejected").text
    assert 'data-make="start-thumbnails"' in before and "<img" not in before
    assert home.run(thumbnails.run).done == 2, "tiny.png and without.png can be read"
    text = server.get("/rejected").text
    assert "data-make" not in text, "the other items can't have thumbnails"
    addresses = re.findall(r'<img src="(/thumbnails/[0-9a-f]{32}\.webp)"', text)
    assert len(addresses) == 2 and text.count("no picture") == 2
    for address in addresses:
        answer = server.get(address)
        assert answer.status == 200 and answer.headers["content-type"] == "image/webp"
    folder = home.folder / "output/.ui/thumbnails"
    (folder / f"{'0' * 32}.webp").symlink_to(home.media / "good.png")
    for name in ("0" * 32, "../starts/discover", "..%2f..%2fx", "A" * 32, "good"):
        assert server.get(f"/thumbnails/{name}.webp").status == 404, name


def test_only_paths_below_the_dataset_have_thumbnails() -> None:
    assert can_have_thumbnail("a/b.png")
    for path in ("", "/etc/x.png", "../x.png", "a/../../x.png"):
        assert not can_have_thumbnail(path), path


def test_trying_again_starts_the_stage(home: Project, server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    home.run(discover.run)
    assert 'action="/jobs/discover/retry"' in server.get("/rejected").text
    started = []
    monkeypatch.setattr(ChildPrograms, "start", lambda self, name, *more: started.append((name, *more)))
    for stage in ("discover", "encode-text", "encode-latents"):
        assert stage in server.post(f"/jobs/{stage}/retry").json["message"]
    assert started == [
        ("discover",),
        ("encode-text", "--retry-rejects"),
        ("encode-latents", "--retry-rejects"),
    ]
    assert server.post("/jobs/report/retry").status == 404
