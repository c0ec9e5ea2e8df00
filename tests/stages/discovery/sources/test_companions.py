from pathlib import Path

import pyarrow as pa
import pytest

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import CompanionFinder, companion_finders
from stages.discovery.sources.columns import listing_table
from tests.stages.discovery.tars import read


def place(folder: Path, *names: str) -> str:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return str(folder)


def finder(where: str, role: str = "source") -> CompanionFinder:
    option = {"mask_data" if role == "mask" else "conditioning_data": where}
    return CompanionFinder(Dataset(id="d", instance_data_dir="x", **option), role)


def found_by(companions: CompanionFinder, *paths: str) -> dict[str, list]:
    """The columns of a listing that the companions of these items add, with the problems' reasons alone."""
    columns = {"path": pa.array(paths)}
    companions.add(columns)
    columns_by_name = {name: column.to_pylist() for name, column in columns.items()}
    return columns_by_name | {"reason": [text and text.partition(":")[0] for text in columns_by_name["problem"]]}


def test_the_companion_has_the_very_name_of_its_item(tmp_path: Path) -> None:
    folder = place(tmp_path, "one.jpg", "deep/two.v2.PNG", "three.png", "three.jpg", "four.mp4", ".five.png", "six.txt")
    items = ["one.png", "deep/two.v2.png", "two.v2.png", "deep/two.png", "three.png", "four.mp4", "six.png"]
    columns_by_name = found_by(finder(folder), *items)
    assert columns_by_name["source"] == ["one.jpg", "deep/two.v2.PNG", None, None, None, None, None]
    missing = ["no-source"] * 2
    assert columns_by_name["reason"] == [None, None, *missing, "several-sources", *missing]
    assert columns_by_name["advice"][3:5] == [f"add {folder}/deep/two.png", "keep one source image"]
    assert columns_by_name["advice"][0] is None and "mask_kind" not in columns_by_name


def test_masks_may_be_videos(tmp_path: Path) -> None:
    folder = place(tmp_path, "a.mp4", "b.png")
    columns_by_name = found_by(finder(folder, "mask"), "a.mov", "b.mov", "c.mov")
    assert columns_by_name["mask_kind"] == ["video", "image", None]
    assert columns_by_name["problem"] == [None, None, "no-mask: has no mask"]


def test_a_changed_companion_has_another_version_and_the_place_is_listed_once(tmp_path: Path) -> None:
    folder = place(tmp_path, "a.png")
    companions = finder(folder)
    before = found_by(companions, "a.png")["source_version"]
    (tmp_path / "a.png").write_bytes(b"longer than before")
    assert found_by(companions, "a.png")["source_version"] == before
    assert found_by(finder(folder), "a.png")["source_version"] != before
    assert Path(companions.open("a.png")) == tmp_path / "a.png"


def test_an_absent_place_is_named_with_its_option(tmp_path: Path) -> None:
    dataset = Dataset(id="d", instance_data_dir="x", conditioning_data=str(tmp_path / "no"))
    with pytest.raises(LatentpressError, match=r"datasets\.d\.conditioning_data: .*no does not exist"):
        found_by(companion_finders(dataset)["source"], "a.png")
    with pytest.raises(LatentpressError, match=r"holds nothing|does not exist"):
        found_by(finder("memory://nowhere-at-all", "mask"), "a.png")


def test_a_listing_keeps_the_first_problem(tmp_path: Path) -> None:
    folder = place(tmp_path, "a.png")
    dataset = Dataset(id="d", instance_data_dir="x", conditioning_data=folder, mask_data=folder)
    columns = {
        "path": pa.array(["a.png", "b.png", "c.png"]),
        "problem": pa.array([None, "no-caption: has no caption", None], pa.string()),
        "advice": pa.array([None, "write one", None], pa.string()),
        "extra.score": pa.array([1, 2, 3]),
    }
    for finder in companion_finders(dataset).values():
        finder.add(columns)
    rows = listing_table(columns).to_pylist()
    problems = [None, "no-caption: has no caption", "no-source: has no source image"]
    assert [row["problem"] for row in rows] == problems
    assert [row["advice"] for row in rows] == [None, "write one", f"add {folder}/c.png"]
    row_values = {"source": "a.png", "mask": "a.png", "mask_kind": "image", "extra.score": 1}
    assert row_values.items() <= rows[0].items()


def test_a_place_in_a_store_is_listed_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("a.png", "deep/b.png", ".hidden/c.png", "d.txt"):
        fs.pipe_file(f"/levels/{name}", b"x")
    monkeypatch.setattr(type(fs), "find", lambda *_, **__: pytest.fail("the whole place was listed at once"))
    companions = finder("memory://levels")
    columns_by_name = found_by(companions, "a.jpg", "deep/b.jpg", ".hidden/c.jpg", "d.jpg")
    assert columns_by_name["source"] == ["a.png", "deep/b.png", None, None]
    assert read(companions.open("deep/b.png")) == b"x"
