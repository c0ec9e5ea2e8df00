"""Tars as img2dataset and video2dataset write them, made with webdataset's own writer, and tars that are damaged."""

import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from PIL import Image

from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.discovery.sources.webdataset import WebDatasetSource
from stages.media import files
from stages.media.files import MediaError
from tests.forms import long
from tests.stages.discovery.tars import dataset, picture, read, scan, write

wds = pytest.importorskip("webdataset")


def record(number: int, **more: Any) -> dict:
    """The content of the .json that img2dataset writes for a sample."""
    common = {"url": f"https://example.org/{number}.jpg", "key": f"{number:09d}", "status": "success"}
    return common | {"error_message": None, "width": 20, "height": 10, "exif": "{}"} | more


def img2dataset(folder: Path, shards: int = 2, each: int = 3) -> Path:
    """img2dataset's layout: tars, and next to each a table of its downloads and its counts."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        samples = []
        for row in range(each):
            number = shard * 10000 + row
            caption = f"picture {number}"
            samples.append(
                {
                    "__key__": f"{number:09d}",
                    "jpg": picture(number),
                    "txt": caption,
                    "json": record(number, caption=caption, similarity=0.1 * row),
                }
            )
        failed = record(9000, status="failed_to_download", error_message="404", caption="none", similarity=0.0)
        samples.append({"__key__": f"{shard:05d}9000", "json": failed})
        write(folder / f"{shard:05d}.tar", samples)
        (folder / f"{shard:05d}.parquet").write_bytes(b"PAR1")
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def as_known(source: WebDatasetSource) -> pa.Table:
    """The media table that a discovery of everything would leave behind."""
    table = pa.concat_tables(source.scan(None), promote_options="permissive")
    table = table.filter(pa.compute.is_null(table["problem"])).sort_by("path")
    return table.append_column("media_id", pa.repeat("0" * 32, len(table)))


# -- tars of img2dataset and video2dataset ---------------------------------------------------------------------------


def test_img2dataset(tmp_path: Path) -> None:
    source = open_source(dataset(img2dataset(tmp_path / "shards")))
    rows = scan(source)
    assert [row["path"] for row in rows] == [
        f"{shard:05d}.tar/{shard * 10000 + row:09d}.jpg" for shard in range(2) for row in range(3)
    ]
    first = rows[0]
    status = (tmp_path / "shards/00000.tar").stat()
    assert first["version"] == f"{status.st_size}:{status.st_mtime_ns}"
    assert (first["kind"], first["captions"], first["problem"]) == ("image", ["picture 0"], None)
    assert first["size"] == len(picture(0))
    assert (first["extra.url"], first["extra.width"]) == ("https://example.org/0.jpg", 20)
    assert rows[1]["extra.similarity"] == pytest.approx(0.1)
    assert source.ignored == {".parquet": 2, ".json": 2, "key that was not downloaded": 2}


def test_members_are_read_where_they_are(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(open_source(dataset(img2dataset(tmp_path / "shards")))))
    for row in scan(source):
        blob = pickle.loads(pickle.dumps(source.open(row["path"])))
        number = int(row["path"][-13:-4])
        assert read(blob) == picture(number)
        assert files.media_size(blob) == row["size"]
        with blob.open() as file, Image.open(file) as image:
            assert image.size == (20, 10)
        assert os.fspath(blob) == str(tmp_path / "shards" / row["path"])
        files.require_unchanged(blob, files.compute_media_id(blob))


def test_video2dataset(tmp_path: Path) -> None:
    samples = [
        {"__key__": "0000000", "mp4": b"video", "jpg": b"thumbnail", "txt": "a video", "json": record(0)},
        {"__key__": "0000001", "jpg": b"a picture", "txt": "a picture", "m4a": b"sound"},
    ]
    write(tmp_path / "00000.tar", samples)
    source = open_source(dataset(tmp_path, dataset_type="video"))
    rows = scan(source)
    assert [(row["path"], row["kind"]) for row in rows] == [
        ("00000.tar/0000000.mp4", "video"),
        ("00000.tar/0000001.jpg", "image"),
    ]
    assert source.ignored == {"further .jpg of a key": 1, ".m4a": 1}
    images = open_source(dataset(tmp_path))
    assert [row["path"] for row in scan(images)] == ["00000.tar/0000000.jpg", "00000.tar/0000001.jpg"]
    assert images.ignored == {".mp4": 1, ".m4a": 1}


# -- captions ----------------------------------------------------------------------------------------------------------


def captions(rows: list[dict]) -> list[tuple]:
    return [(row["captions"], (row["problem"] or "").partition(":")[0]) for row in rows]


def test_captions_of_text_and_of_records(tmp_path: Path) -> None:
    more = {"caption": ["from json", "another", "from json"], "long": "a long one"}
    samples = [
        {"__key__": "a", "jpg": b"1", "txt": "one\n\n two \none", "json": more},
        {"__key__": "b", "jpg": b"2", "json": more},
        {"__key__": "c", "jpg": b"3"},
        {"__key__": "d", "jpg": b"4", "txt": " \n"},
        {"__key__": "e", "jpg": b"5", "txt": b"\xff\xfe"},
    ]
    write(tmp_path / "s.tar", samples)
    rows = scan(open_source(dataset(tmp_path)))
    assert captions(rows) == [
        (["one", "two"], ""),
        (["from json", "another"], ""),
        (None, "no-caption"),
        (None, "empty-caption"),
        (None, "caption-not-utf8"),
    ]
    assert rows[0]["extra.long"] == "a long one"
    rows = scan(open_source(dataset(tmp_path, caption_column=["long", "caption"])))
    assert captions(rows)[:3] == [(["a long one", "from json", "another"], "")] * 2 + [(None, "no-caption")]
    assert "extra.long" not in rows[0]
    with pytest.raises(LatentpressError, match="nowhere"):
        scan(open_source(dataset(tmp_path, caption_column=["nowhere"])))


def test_items_with_a_dot_in_their_name_do_not_vanish(tmp_path: Path) -> None:
    """webdataset ends the key at the first dot. Without a medium of its own such a key is probably an item."""
    samples = [{"__key__": f"cat.{number}", "jpg": b"1"} for number in range(3)]
    samples += [{"__key__": "dog", "jpg": b"1", "v2.jpg": b"2", "txt": "a dog"}]
    write(tmp_path / "s.tar", samples)
    source = open_source(dataset(tmp_path))
    rows = scan(source)
    assert [(row["path"], (row["problem"] or "").partition(":")[0]) for row in rows] == [
        *((f"s.tar/cat.{number}.jpg", "dotted-name") for number in range(3)),
        ("s.tar/dog.jpg", ""),
    ]
    assert "0.jpg is its extension" in rows[0]["problem"] and "single dot" in rows[0]["advice"]
    assert source.ignored == {".v2.jpg": 1}


def test_records_of_several_kinds(tmp_path: Path) -> None:
    samples = [
        {"__key__": "a", "jpg": b"1", "txt": "x", "json": b'{"n": 1, "m": 1, "b": true, "l": [1], "h": "\\ud800"}'},
        {"__key__": "b", "jpg": b"2", "txt": "x", "json": b'{"n": 2.5, "m": "two", "big": 100000000000000000000}'},
        {"__key__": "c", "jpg": b"3", "txt": "x", "json": b"not json"},
        {"__key__": "d", "jpg": b"4", "txt": "x", "json": b"[]"},
    ]
    write(tmp_path / "s.tar", samples)
    source = open_source(dataset(tmp_path))
    rows = scan(source)
    assert [row["extra.n"] for row in rows] == [1.0, 2.5, None, None]
    assert [row["extra.m"] for row in rows] == ["1", "two", None, None]
    assert (rows[0]["extra.b"], rows[1]["extra.big"], rows[0]["extra.h"]) == (True, 1e20, "?")
    assert "extra.l" not in rows[0]
    assert source.ignored["member .json that is not a JSON object"] == 2


# -- companions ------------------------------------------------------------------------------------------------------


def test_companions_in_the_tar(tmp_path: Path) -> None:
    samples = [
        {"__key__": "a", "jpg": b"target", "source.jpg": b"the source", "mask.png": b"the mask", "txt": "x"},
        {"__key__": "b", "jpg": b"target", "txt": "x"},
    ]
    write(tmp_path / "s.tar", samples)
    source = open_source(dataset(tmp_path, conditioning_column="source.jpg", mask_column=".mask.png"))
    rows = scan(source)
    assert [row["source"] for row in rows] == ["s.tar/a.source.jpg", None]
    assert [(row["mask"], row["mask_kind"]) for row in rows] == [("s.tar/a.mask.png", "image"), (None, None)]
    assert rows[0]["source_version"] == rows[0]["version"]
    assert read(source.open_companion("source", rows[0]["source"])) == b"the source"
    assert read(source.open_companion("mask", rows[0]["mask"])) == b"the mask"
    assert not source.ignored
    plain = open_source(dataset(tmp_path))
    assert len(scan(plain)) == 2 and plain.ignored == {".source.jpg": 1, ".mask.png": 1}


def test_a_companion_that_has_an_extension_of_media(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [{"__key__": "a", "jpg": b"source", "png": b"target", "txt": "x"}])
    (row,) = scan(open_source(dataset(tmp_path, conditioning_column="jpg")))
    assert (row["path"], row["source"]) == ("s.tar/a.png", "s.tar/a.jpg")


# -- which tars ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("shards", ["00000.tar", "00001.tar", "00002.tar"]),
        ("shards/{00000..00001}.tar", ["00000.tar", "00001.tar"]),
        ("shards/0000[12].tar", ["00001.tar", "00002.tar"]),
        ("shards/00002.tar", ["00002.tar"]),
        ("{shards,none*}/00002.tar", ["shards/00002.tar"]),
        (".", ["shards/00000.tar", "shards/00001.tar", "shards/00002.tar"]),
    ],
)
def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: list[str]) -> None:
    img2dataset(tmp_path / "shards", shards=3, each=1)
    monkeypatch.chdir(tmp_path)
    for place in (pattern, str(tmp_path / pattern)):
        source = open_source(dataset(place))
        rows = scan(source)
        assert [row["path"].rpartition("/")[0] for row in rows] == names
        assert read(source.open(rows[0]["path"])).startswith(b"\xff\xd8")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none", "does not exist"),
        ("empty", "does not contain a tar"),
        ("empty/x.tar", "No such file"),
        ("s.tar.gz", "does not exist"),
        ("{0..1.tar", "00000"),
        ("{0..999999999}.tar", "more than 1,000,000 names"),
        ("{0..900000}{0..900000}.tar", "more than 1,000,000 names"),
        long("{" * 1200 + "a,b" + "}" * 1200, "recursion depth"),
        ("{{0..9999},{20000..29999}}.tar", "No such file"),
    ],
)
def test_places_that_hold_no_tar(tmp_path: Path, place: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LatentpressError, match=words):
        scan(open_source(dataset(tmp_path / place)))


def test_tars_at_a_url(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for tar in img2dataset(tmp_path / "shards").iterdir():
        fs.pipe_file(f"/wds/{tar.name}", tar.read_bytes())
    for place in ("memory://wds", "memory://wds/{00000..00001}.tar", "memory://wds/0*.tar"):
        source = open_source(dataset(place))
        rows = scan(source)
        assert len(rows) == 6
        blob = pickle.loads(pickle.dumps(source.open(rows[-1]["path"])))
        assert os.fspath(blob) == "memory://wds/00001.tar/000010002.jpg"
        assert read(blob) == picture(10002)
    with pytest.raises(MediaError, match="identity: content"):
        open_source(dataset("memory://wds", identity="store")).open(rows[0]["path"]).media_id()
    with pytest.raises(LatentpressError, match="does not exist"):
        scan(open_source(dataset("memory://wds/{00007..00008}.tar")))
    fs.store.clear()


# -- tars that have not changed --------------------------------------------------------------------------------------


def test_only_the_changed_tar_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = img2dataset(tmp_path / "shards", shards=3)
    place = dataset(folder)
    known_rows = as_known(open_source(place))
    write(folder / "00001.tar", [{"__key__": "new", "jpg": b"new", "txt": "new"}])
    write(folder / "00003.tar", [{"__key__": "added", "jpg": b"new", "txt": "new"}])
    (folder / "00002.tar").unlink()
    opened: list[str] = []
    real = files.open_media
    monkeypatch.setattr(
        "stages.discovery.sources.webdataset.open_media", lambda path: opened.append(str(path)) or real(path)
    )
    paths = [row["path"] for row in scan(open_source(place), known_rows)]
    assert paths[3:] == ["00001.tar/new.jpg", "00003.tar/added.jpg"] and len(paths) == 5
    assert [os.path.basename(path) for path in opened] == ["00001.tar", "00003.tar"]


def test_other_settings_or_items_rejected_open_it_again(tmp_path: Path) -> None:
    folder = img2dataset(tmp_path / "shards", shards=1)
    known_rows = as_known(open_source(dataset(folder)))
    (first, *_) = scan(open_source(dataset(folder, caption_column=["url"])), known_rows)
    assert first["captions"] == ["https://example.org/0.jpg"]
    assert len(scan(open_source(dataset(folder)), known_rows.slice(1))) == 3


def test_a_field_of_one_kind_here_and_another_there(tmp_path: Path) -> None:
    """The first tar with a field determines its type; values of another type in later tars are null, and counted."""
    fields: list[dict] = [{"score": 1, "tag": "x"}, {"score": "2.5", "tag": 7}, {"score": "good", "tag": True}, {}]
    for number, more in enumerate(fields):
        sample = {"__key__": "0", "jpg": picture(number), "txt": "x", "json": record(number, **more)}
        write(tmp_path / f"{number}.tar", [sample])
    source = open_source(dataset(tmp_path))
    table = pa.concat_tables(source.scan(None), promote_options="permissive")
    assert table["extra.score"].to_pylist() == [1, 2.5, None, None]
    assert table["extra.tag"].to_pylist() == ["x", "7", "true", None]
    assert source.ignored == {"score of another type than in the first tar with it": 1}
