"""A media table of many rows: in several batches, by way of files, the same whatever the order of changes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import discover
from stages.discovery import media_table
from stages.discovery.media_table import OtherSettings, media_table_path, read_media_table
from stages.discovery.sources.columns import LISTING_SCHEMA
from tests.stages.discovery.invented_readers import FailingReader, InventedReader, no_order


def rows_of(home) -> list[dict]:
    return read_media_table(Store(home.root), "photos").to_pylist()


def read(report) -> int:
    return report.details["datasets"][0]["files_read"]


class Invented:
    """A source of rows that are nowhere: the captions of the numbers to list, in no order."""

    captions: dict[int, str]
    chunk = 7

    def __init__(self, *_: object) -> None:
        self.ignored: Counter[str] = Counter()

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        numbers = sorted(self.captions, key=no_order)
        for start in range(0, len(numbers), self.chunk):
            part = numbers[start : start + self.chunk]
            columns: dict[str, object] = {name: [None] * len(part) for name in LISTING_SCHEMA.names}
            columns |= {"path": [f"{number:04d}.png" for number in part], "kind": ["image"] * len(part)}
            columns |= {"size": part, "version": ["1"] * len(part)}
            columns["captions"] = [[self.captions[number]] for number in part]
            yield pa.table(columns, schema=LISTING_SCHEMA).append_column("extra.score", pa.array(part))


@pytest.fixture
def invented(project, monkeypatch: pytest.MonkeyPatch):
    from stages.discovery import item_reader

    monkeypatch.setattr(discover, "open_source", Invented)
    monkeypatch.setattr(item_reader, "ItemReader", InventedReader)
    monkeypatch.setattr(discover, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(discover, "MAX_PENDING_ROWS", 11)
    return project()


def table_bytes(home) -> bytes:
    return (home.root / media_table_path("photos")).read_bytes()


@pytest.mark.slow
def test_the_bytes_of_a_table_do_not_depend_on_the_order_of_changes(invented, monkeypatch: pytest.MonkeyPatch) -> None:
    home = invented
    numbers = range(60)
    Invented.captions = {number: f"caption {number}" for number in numbers if number % 3}
    home.run(discover.run)
    Invented.captions |= {number: "late" for number in numbers if not number % 3}
    Invented.captions |= {7: "corrected"}
    Invented.captions.pop(8)
    report = home.run(discover.run).details["datasets"][0]
    assert {name: report[name] for name in ("new", "removed", "captions_changed", "files_read")} == {
        "new": 20,
        "removed": 1,
        "captions_changed": 1,
        "files_read": 20,
    }
    rows = rows_of(home)
    assert [row["path"] for row in rows] == [f"{number:04d}.png" for number in numbers if number != 8]
    assert all(row["captions"] == [Invented.captions[row["extra.score"]]] for row in rows)
    assert all(int(row["media_id"], 16) == row["size"] == row["extra.score"] for row in rows)
    grown = table_bytes(home)
    (home.root / media_table_path("photos")).unlink()
    monkeypatch.setattr(Invented, "chunk", 60)
    home.run(discover.run)
    assert table_bytes(home) == grown
    assert not [path for path in home.root.rglob("*") if "tmp" in path.name or path.parent.name == "partial"]


@pytest.mark.slow
def test_a_listing_that_says_the_same_leaves_the_table_alone(invented) -> None:
    home = invented
    Invented.captions = {number: f"caption {number}" for number in range(40)}
    home.run(discover.run)
    before = (home.root / media_table_path("photos")).stat()
    report = home.run(discover.run)
    assert (read(report), report.skipped) == (0, 40)
    assert (home.root / media_table_path("photos")).stat() == before


@pytest.mark.slow
def test_what_a_stop_left_is_used_with_the_table_that_was_there(invented, monkeypatch: pytest.MonkeyPatch) -> None:
    home = invented
    Invented.captions = {number: f"caption {number}" for number in range(30)}
    home.run(discover.run)
    Invented.captions |= {number: f"caption {number}" for number in range(30, 170)} | {5: "corrected"}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        # Beyond the items that two processes may be reading, whose results may not be collected yet.
        patch.setattr("stages.discovery.item_reader.ItemReader", FailingReader)
        home.run(discover.run, "stages.discover.workers=2")
    assert len(rows_of(home)) == 30
    report = home.run(discover.run)
    assert 0 < read(report) < 140
    counts = report.details["datasets"][0]
    assert (counts["new"], counts["removed"], counts["captions_changed"]) == (140, 0, 1)
    assert [row["captions"][0] for row in rows_of(home)] == [Invented.captions[number] for number in range(170)]


@pytest.mark.slow
def test_a_face_detector_is_known_by_its_content(invented, tmp_path: Path) -> None:
    """Another file of the same name finds other faces; the same file under another name finds the same."""
    home, detector = invented, tmp_path / "yunet.onnx"
    Invented.captions = {number: f"caption {number}" for number in range(20)}
    home.settings["datasets"][0] |= {"crop_style": "face", "face_detector": str(detector)}
    detector.write_bytes(b"one")
    assert read(home.run(discover.run)) == 20 and read(home.run(discover.run)) == 0
    home.settings["datasets"][0]["face_detector"] = str(detector.rename(tmp_path / "other.onnx"))
    assert read(home.run(discover.run)) == 0
    (tmp_path / "other.onnx").write_bytes(b"two")
    with pytest.raises(OtherSettings, match="discovered with different settings: faces was"):
        media_table.read_configured_media(Store(home.root), home.config().datasets[0])
    assert read(home.run(discover.run)) == 20
    (tmp_path / "other.onnx").unlink()
    with pytest.raises(LatentpressError, match=r"datasets\.photos\.face_detector: .*other\.onnx does not exist"):
        home.run(discover.run)
