"""Folders on the page of `latentpress ui`: only names and counts below the roots."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.cli.console import Options
from stages.pages.ui.places import NotPermitted, Places
from stages.ui import NoFolder, list_places, open_projects
from tests.stages.ui_server import UiServer, projects_server

SECRET = "secret"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder allowed/ with folders, hidden folders, links to its inside and to its outside, and sibling folders."""
    top = tmp_path_factory.mktemp("tree")
    for folder in ("allowed/photos/day", "allowed/.hidden/inside", f"{SECRET}/inside", "allowed2"):
        (top / folder).mkdir(parents=True)
    for name in ("photos/a.png", "photos/b.JPG", "photos/c.mp4", "photos/.d.png", "photos/e.txt", "photos/day/f.png"):
        (top / "allowed" / name).write_bytes(b"")
    (top / SECRET / "config.yaml").write_text("model: a")
    allowed = top / "allowed"
    (allowed / "out").symlink_to(top / SECRET)
    (allowed / "up").symlink_to("..")
    (allowed / "to-hidden").symlink_to(".hidden")
    (allowed / "out.yaml").symlink_to(top / SECRET / "config.yaml")
    (allowed / "stays").symlink_to("photos")
    (allowed / "circle").symlink_to("circle")
    (allowed / "job.yaml").write_text("a: 1")
    (allowed / "<img src=x onerror=alert(1)>").mkdir()
    os.mkdir(os.fsencode(allowed) + b"/\xff")
    os.mkfifo(allowed / "pipe.json")
    return top


def test_names_and_counts(tree: Path) -> None:
    listing = Places([tree / "allowed"]).list_folder(str(tree / "allowed"))
    assert [(folder.name, folder.pictures, folder.clips) for folder in listing.folders] == [
        ("<img src=x onerror=alert(1)>", 0, 0),
        ("photos", 2, 1),
        ("stays", 2, 1),
    ]
    assert listing.parent is None and list(listing.configurations) == ["job.yaml"]
    inner = Places([tree / "allowed"]).list_folder(str(tree / "allowed/photos"))
    assert (inner.pictures, inner.clips) == (2, 1) and inner.parent == str(tree / "allowed")
    places = Places([tree / "allowed", tree / "allowed2"])
    assert [Path(folder.path).name for folder in places.list_roots().folders] == ["allowed", "allowed2"]
    assert places.list_folder(str(tree / "allowed2")).parent == ""


PIECES = ("..", ".", "", "photos", "day", "out", "up", "to-hidden", ".hidden", "stays", "inside", "circle", SECRET,
          "allowed", "allowed2", "\0", "~", "*", "x" * 300, "\udcff", "pipe.json", "out.yaml", "job.yaml")  # fmt: skip


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8), st.sampled_from(("", "/", "top", "allowed"))
)
def test_no_path_leads_out(tree: Path, pieces: list[str], start: str) -> None:
    """Every path that is found is below the root and not hidden, and only NotPermitted is raised."""
    allowed = tree / "allowed"
    before = {"": "", "/": "/", "top": f"{tree}/", "allowed": f"{allowed}/"}[start]
    places = Places([allowed])
    for find in (places.find_folder, places.find_file):
        try:
            path = find(before + "/".join(pieces))
        except NotPermitted:
            continue
        relative_path = path.resolve().relative_to(allowed.resolve())
        assert not any(part.startswith(".") for part in relative_path.parts) and SECRET not in path.resolve().parts
        assert path.is_dir() if find == places.find_folder else path.is_file()


def test_what_is_permitted_is_found(tree: Path) -> None:
    places = Places([tree / "allowed"])
    for name in ("", "photos", "photos/day", "stays/day", "./photos"):
        assert places.find_folder(f"{tree}/allowed/{name}").is_dir()
    assert places.find_file(f"{tree}/allowed/job.yaml").is_file()
    (tree / "link").symlink_to("allowed")
    assert Places([tree / "link"]).find_folder(str(tree / "allowed/photos")), (
        "by the path of the link or by the path of its target"
    )


@pytest.fixture
def server(tree: Path) -> Iterator[UiServer]:
    projects = open_projects([], tree / "allowed2", Options())
    with projects_server(projects, browse=[tree / "allowed"]) as started:
        yield started


def test_the_pages_tell_nothing_of_other_places(server: UiServer, tree: Path) -> None:
    for path in ("/folders", "/new", "/import"):
        text = server.get(path).text
        assert "photos" in text and "&lt;img src=x" in text and "<img" not in text and ".hidden" not in text
        for folder in (
            f"{tree}/{SECRET}",
            f"{tree}/allowed/out",
            f"{tree}/allowed/up/{SECRET}",
            "/etc",
            f"{tree}/none",
        ):
            answer = server.get(f"{path}?at={folder}")
            assert answer.status == 200 and "is not below the folders that may be browsed" in answer.text
            assert "inside" not in answer.text and "config.yaml" not in answer.text
    assert "is not below" in server.get(f"/new?media={tree}/{SECRET}").text
    for form in ({"media": f"{tree}/{SECRET}"}, {"media": f"{tree}/allowed/photos", "sources": "/etc"}, {}):
        refused = server.post("/new/propose", name="a", **form)
        assert refused.status == 409 and refused.json["next_step"]
    for at, file in ((f"{tree}/{SECRET}", "config.yaml"), (f"{tree}/allowed", "out.yaml"), (f"{tree}/allowed", "../x")):
        assert server.post("/import/propose", at=at, name="a", **{f"file:{file}": "on"}).status == 409
    assert not list((tree / "allowed2").iterdir())


def test_a_root_has_to_be_there(tree: Path) -> None:
    with pytest.raises(NoFolder, match="absent"):
        list_places(open_projects([], tree / "allowed2", Options()), [tree / "absent"])
