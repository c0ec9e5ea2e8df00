import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.discovery.sources.manifest import ManifestSource
from stages.media.files import MediaError
from tests.stages.discovery.listings import listed, put, reason, write_table
from tests.stages.discovery.tars import read


def source(table: Path, **settings: Any) -> ManifestSource:
    opened = open_source(Dataset(id="d", instance_data_dir=str(table), **settings))
    assert isinstance(opened, ManifestSource)
    return opened


@pytest.fixture
def server(tmp_path: Path, serve) -> tuple[str, Path]:
    """A web server over a folder; it takes any query. (its URL, the folder)"""
    (tmp_path / "web").mkdir()
    return f"http://{serve(tmp_path / 'web')}", tmp_path / "web"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_files_with_captions_and_further_columns(tmp_path: Path, kind: str) -> None:
    put(tmp_path, "a.png", "deep/b.jpg")
    rows = [
        {"file_name": "a.png", "caption": "one", "score": 5.5, "licence": "cc0"},
        {"file_name": "./deep//b.jpg", "caption": 'two, "zwei"', "score": 1.0, "licence": "none"},
    ]
    manifest = pickle.loads(pickle.dumps(source(write_table(tmp_path, rows, kind))))
    items = listed(manifest)
    status = (tmp_path / "a.png").stat()
    assert list(items) == ["a.png", "deep/b.jpg"]
    assert (items["a.png"]["size"], items["a.png"]["version"]) == (status.st_size, str(status.st_mtime_ns))
    assert [row["captions"] for row in items.values()] == [["one"], ['two, "zwei"']]
    assert [row["extra.score"] for row in items.values()] == [5.5, 1.0]
    assert {name for name in items["a.png"] if name.startswith("extra.")} == {"extra.score", "extra.licence"}
    assert read(manifest.open("deep/b.jpg")) == b"deep/b.jpg"


def test_unusual_names_missing_files_and_what_is_no_file(tmp_path: Path) -> None:
    odd = ["a b.png", "new\nline.png", "quo'te\".png", "-dash.png", "\u00e9.png", "e\u0301.png", "x" * 251 + ".png"]
    put(tmp_path, *odd)
    (tmp_path / "folder.png").mkdir()
    names = [*odd, "folder.png", "none.png", "a b.png/x.png", "y" * 300 + ".png", ""]
    manifest = source(write_table(tmp_path, [{"file_name": name, "caption": "x"} for name in names]))
    items = listed(manifest)
    assert {path: reason(row) for path, row in items.items()} == dict.fromkeys(odd) | {
        "folder.png": "unreadable",
        "none.png": "missing",
        "a b.png/x.png": "missing",
        "y" * 300 + ".png": "unreadable",
    }
    assert manifest.ignored == {"row without a path": 1}
    assert items["none.png"]["captions"] == ["x"] and items["none.png"]["size"] is None


def test_paths_beside_the_base_are_whole_and_the_base_can_be_moved(tmp_path: Path) -> None:
    put(tmp_path, "media/a.png", "b.png", "c.png")
    names = ["a.png", "../b.png", str(tmp_path / "c.png"), str(tmp_path / "media/x/../a.png")]
    (tmp_path / "tables").mkdir()
    table = write_table(tmp_path / "tables", [{"path": name, "caption": name} for name in names])
    manifest = source(table, media_root=str(tmp_path / "media"))
    items = listed(manifest)
    assert list(items) == ["a.png", str(tmp_path / "b.png"), str(tmp_path / "c.png")]
    assert items["a.png"]["captions"] == ["a.png", str(tmp_path / "media/x/../a.png")]
    assert [read(manifest.open(path)) for path in items] == [b"media/a.png", b"b.png", b"c.png"]
    assert all(row["problem"] is None for row in items.values())


def test_a_path_in_several_rows_is_one_item_with_all_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.discovery.sources.manifest.CHUNK_ROWS", 3)
    put(tmp_path, *(f"{i}.png" for i in range(5)))
    rows = [{"file_name": f"{i % 5}.png", "caption": f"c{i // 4}", "score": i} for i in range(12)]
    items = listed(source(write_table(tmp_path, rows)))
    assert {path: row["captions"] for path, row in items.items()} == {
        "0.png": ["c0", "c1", "c2"],
        "1.png": ["c0", "c1", "c2"],
        "2.png": ["c0", "c1"],
        "3.png": ["c0", "c2"],
        "4.png": ["c1", "c2"],
    }
    assert [row["extra.score"] for row in items.values()] == [0, 1, 2, 3, 4]


def test_kinds_by_extension_and_otherwise_by_the_dataset(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.MP4", "c.bin", "d")
    table = write_table(tmp_path, [{"file": name, "caption": "x"} for name in ("a.png", "b.MP4", "c.bin", "d")])
    videos = listed(source(table, dataset_type="video"))
    assert [row["kind"] for row in videos.values()] == ["image", "video", "video", "video"]
    manifest = source(table)
    assert {path: row["kind"] for path, row in listed(manifest).items()} == dict.fromkeys(
        ["a.png", "c.bin", "d"], "image"
    )
    assert manifest.ignored == {".mp4": 1}


def test_rows_without_a_caption_are_rejected(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    rows = [{"image": "a.png", "one": "", "two": " "}, {"image": "b.png", "one": "", "two": "x"}]
    items = listed(source(write_table(tmp_path, rows), caption_column=["one", "two"]))
    assert [(reason(row), row["captions"]) for row in items.values()] == [("empty-caption", None), (None, ["x"])]
    with pytest.raises(LatentpressError, match=r"no column 'caption'; .*image, one, two"):
        listed(source(write_table(tmp_path, rows)))
    with pytest.raises(LatentpressError, match="no column 'x'"):
        listed(source(write_table(tmp_path, rows), media_column="x", caption_column=["one"]))


def test_captions_in_text_files(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "red_fox-2.png")
    table = write_table(tmp_path, [{"path": "a.png"}, {"path": "red_fox-2.png"}])
    manifest = source(table, caption_strategy="textfile")
    items = listed(manifest)
    status = (tmp_path / "a.txt").stat()
    assert items["a.png"]["captions_at"] == "a.txt"
    assert items["a.png"]["captions_version"] == f"{status.st_size}:{status.st_mtime_ns}"
    assert manifest.read_captions("a.txt") == ["a.txt"]
    assert items["red_fox-2.png"]["problem"] == "no-caption: has no caption"
    assert items["red_fox-2.png"]["advice"] == "write it into red_fox-2.txt"


def test_companions_by_column_and_by_name(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "s/1.png", "m/1.mp4", "masks/a.png")
    rows = [
        {"path": "a.png", "caption": "x", "before": "s/1.png", "where": "m/1.mp4"},
        {"path": "b.png", "caption": "x", "before": "s/2.png", "where": ""},
    ]
    table = write_table(tmp_path, rows)
    manifest = source(table, conditioning_column="before", mask_column="where")
    items = listed(manifest)
    assert (items["a.png"]["source"], items["a.png"]["mask"], items["a.png"]["mask_kind"]) == (
        "s/1.png",
        "m/1.mp4",
        "video",
    )
    assert (items["b.png"]["problem"], items["b.png"]["source"]) == ("no-source: its source image does not exist", None)
    assert read(manifest.open_companion("source", "s/1.png")) == b"s/1.png"
    only = listed(source(table, mask_column="where"))
    assert (only["b.png"]["problem"], only["b.png"]["advice"]) == (
        "no-mask: has no mask",
        f"add it in column 'where' of {table}",
    )
    assert only["a.png"]["extra.before"] == "s/1.png"
    manifest = source(table, mask_data=str(tmp_path / "masks"))
    assert {path: reason(row) for path, row in listed(manifest).items()} == {"a.png": None, "b.png": "no-mask"}
    assert read(manifest.open_companion("mask", "a.png")) == b"masks/a.png"
    with pytest.raises(LatentpressError, match="no column 'nothing'"):
        listed(source(table, mask_column="nothing"))


@pytest.mark.slow
def test_urls_with_secrets_are_opened_and_never_shown(tmp_path: Path, server: tuple[str, Path]) -> None:
    url, web = server
    put(web, "a.png", "b.png")
    secret = "abcdefghijklmnopqrstuvwxyz0123456789"
    signed = [f"{url}/a.png?X-Signature={secret}", f"{url}/b.png?X-Signature={secret}", f"{url}/b.png?v={secret}"]
    names = [*signed, f"{url}/b.png", f"{url}/none.png?X-Signature={secret}", "http://127.0.0.1:9/x?k=" + secret]
    put(tmp_path, "local.png")
    table = write_table(tmp_path, [{"url": name, "caption": "x"} for name in [*names, "local.png"]], "jsonl")
    manifest = source(table)
    items = listed(manifest)
    assert len(items) == 7 and secret not in repr(items)
    assert [reason(row) for row in items.values()] == [None, None, None, None, "missing", "unreadable", None]
    paths = list(items)
    assert paths[0].startswith(f"{url}/a.png#") and paths[3] == f"{url}/b.png"
    assert items[paths[0]]["size"] == 5 and items[paths[0]]["version"]
    copy = pickle.loads(pickle.dumps(manifest))
    assert [read(copy.open(path)) for path in paths[:4]] == [b"a.png", b"b.png", b"b.png", b"b.png"]
    assert secret not in os.fspath(copy.open(paths[0]))
    with pytest.raises(MediaError) as caught:
        read(copy.open(paths[4]))
    assert caught.value.reason == "missing" and secret not in str(caught.value)


@pytest.mark.slow
def test_text_files_beside_urls_but_not_beside_signed_ones(tmp_path: Path, server: tuple[str, Path]) -> None:
    url, web = server
    put(web, "a.png", "a.txt", "b.png")
    names = [f"{url}/a.png", f"{url}/a.png?k=1", f"{url}/b.png"]
    manifest = source(write_table(tmp_path, [{"url": name} for name in names]), caption_strategy="textfile")
    rows = list(listed(manifest).values())
    assert [row["captions_at"] for row in rows] == [f"{url}/a.txt", None, None]
    assert [reason(row) for row in rows] == [None, "no-caption", "no-caption"]
    assert rows[1]["advice"] == "write captions into the table"
    assert manifest.read_captions(f"{url}/a.txt") == ["a.txt"]


@pytest.mark.slow
def test_a_table_at_a_url_is_the_base_of_its_paths(tmp_path: Path, server: tuple[str, Path]) -> None:
    url, web = server
    put(web, "set/a.png", "set/s/a.png", "b.png")
    rows = [
        {"path": "a.png", "caption": "x", "before": "s/a.png"},
        {"path": f"{url}/b.png", "caption": "y", "before": "s/a.png"},
    ]
    write_table(web / "set", rows)
    dataset = Dataset(id="d", instance_data_dir=f"{url}/set/table.csv", source="manifest", conditioning_column="before")
    manifest = open_source(dataset)
    assert isinstance(manifest, ManifestSource)
    items = listed(manifest)
    assert list(items) == ["a.png", f"{url}/b.png"]
    assert [row["source"] for row in items.values()] == ["s/a.png", "s/a.png"]
    assert read(manifest.open("a.png")) == b"set/a.png"
    assert read(manifest.open_companion("source", "s/a.png")) == b"set/s/a.png"


def test_a_table_of_another_ending_is_read_as_the_caption_strategy_says(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    table = write_table(tmp_path, [{"path": "a.png", "caption": "x"}], "jsonl").rename(tmp_path / "table.txt")
    manifest = open_source(Dataset(id="d", instance_data_dir=str(table), source="manifest", caption_strategy="jsonl"))
    assert isinstance(manifest, ManifestSource)
    assert listed(manifest)["a.png"]["captions"] == ["x"]
    with pytest.raises(LatentpressError, match=r"table\.txt: its format is unknown"):
        settings = {"source": "manifest", "caption_strategy": "filename"}
        listed(source(table, **settings))


@pytest.mark.parametrize("place", ["jupyter://x", "zip://x", "nowhere://x"])
def test_a_row_of_a_scheme_that_can_not_be_opened_is_rejected(tmp_path: Path, place: str) -> None:
    """And the other rows are listed; as the place of a dataset it is an error in words."""
    put(tmp_path, "a.png")
    rows = listed(
        source(write_table(tmp_path, [{"path": "a.png", "caption": "x"}, {"path": f"{place}/b.png", "caption": "y"}]))
    )
    assert rows["a.png"]["problem"] is None
    assert (
        "unreadable: " in rows[f"{place}/b.png"]["problem"] and "can't be opened" in rows[f"{place}/b.png"]["problem"]
    )
    with pytest.raises(LatentpressError, match=f"{place}: can't be opened"):
        listed(open_source(Dataset(id="d", instance_data_dir=place)))


@pytest.mark.parametrize(
    ("cell", "reason", "says"),
    [
        ("images/a.png", "missing", "relative to"),
        ("images\\a.png", "backslash-path", "in place of each backslash"),
        ("images/none.png", "missing", "restore it"),
    ],
)
def test_a_path_that_is_wrong_in_the_table_is_named(tmp_path: Path, cell: str, reason: str, says: str) -> None:
    put(tmp_path, "images/a.png")
    table = write_table(tmp_path, [{"path": cell, "caption": "a"}])
    source = open_source(Dataset(id="d", instance_data_dir=str(table), media_root=str(tmp_path / "images")))
    (row,) = pa.concat_tables(source.scan(None)).to_pylist()
    assert row["problem"].partition(":")[0] == reason and says in row["advice"]
