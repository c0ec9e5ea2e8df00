"""Source images and masks beside the media: found by name, listed once, kept until they change."""

import os
from pathlib import Path

import pytest

from stages import discover
from tests.stages.test_discover import MANY, read, rows_of


def sources(project, *names: str):
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    for name in names:
        home.image(f"../sources/{name}", seed=len(name))
    return home


def test_a_source_has_the_very_name_of_its_target(project) -> None:
    home = sources(project, "one.jpg", "two.v2.png", "three.png", "three.jpg")
    for name in ("one.png", "two.png", "two.v2.png", "three.png"):
        home.image(name)
    report = home.run(discover.run, MANY)
    assert home.rejects(report) == {"two.png": "no-source", "three.png": "several-sources"}
    found = {row["path"]: row["source"] for row in rows_of(home)}
    assert found == {"one.png": "one.jpg", "two.v2.png": "two.v2.png"}


def test_a_folder_of_sources_is_listed_once(project, monkeypatch: pytest.MonkeyPatch) -> None:
    home = sources(project, "0.png", "1.png", "2.png")
    for number in range(3):
        home.image(f"{number}.png", seed=number)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(Path(str(path)).name), scandir(path))[1])
    assert home.run(discover.run, "stages.discover.workers=1").done == 3
    assert listed.count("sources") == 1


@pytest.mark.slow
def test_both_companions_are_kept_until_they_change(project) -> None:
    home = sources(project, "one.png")
    home.settings["datasets"][0]["mask_data"] = str(home.folder / "masks")
    home.image("one.png")
    home.image("../masks/one.png", (20, 10))
    home.run(discover.run)
    (before,) = rows_of(home)
    assert (before["mask"], before["mask_kind"], before["mask_width"], before["mask_height"]) == (
        "one.png",
        "image",
        20,
        10,
    )
    assert read(home.run(discover.run)) == 0
    home.image("../masks/one.png", (30, 10), seed=5)
    report = home.run(discover.run)
    (after,) = rows_of(home)
    assert (read(report), report.done, after["mask_width"]) == (1, 0, 30)
    assert after["mask_id"] != before["mask_id"]
    assert {name: after[name] for name in after if "mask" not in name} == {
        name: before[name] for name in before if "mask" not in name
    }
