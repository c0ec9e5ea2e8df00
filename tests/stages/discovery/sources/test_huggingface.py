"""Datasets of the Hugging Face library from local files, without a network."""

import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources import huggingface
from stages.discovery.sources.base import open_source
from stages.discovery.sources.columns import LISTING_SCHEMA
from stages.discovery.sources.huggingface import HuggingFaceSource
from stages.media import files
from stages.media.files import MediaError
from tests.stages.discovery.tars import picture, read

hf = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library's cache in a folder of the test; it reads the environment once, at its import."""
    cache = tmp_path_factory.mktemp("hf")
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", cache / "datasets")
    monkeypatch.setattr(hf.config, "HF_MODULES_CACHE", str(cache / "modules"))
    huggingface.load_rows.cache_clear()
    yield
    huggingface.load_rows.cache_clear()


def dataset(place: Path | str, **options: Any) -> Dataset:
    return Dataset(id="set", source="huggingface", instance_data_dir=str(place), **options)


def scan(source: HuggingFaceSource) -> list[dict]:
    table = pa.concat_tables(source.scan(None), promote_options="permissive")
    assert table.schema.names[: len(LISTING_SCHEMA.names)] == LISTING_SCHEMA.names
    return table.to_pylist()


def embedded(count: int = 4, names: list[str | None] | None = None, **columns: list) -> Any:
    """A dataset whose table carries the bytes of its images."""
    names = names or [None] * count
    images = [{"bytes": picture(number), "path": name} for number, name in enumerate(names)]
    content = {"image": images, "caption": [f"picture {n}" for n in range(count)], **columns}
    rows = hf.Dataset.from_dict(content)
    return rows.cast_column("image", hf.Image(decode=False))


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# -- tables that carry the bytes ------------------------------------------------------------------------------------


def parquet(folder: Path, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    embedded(**options).to_parquet(folder / "train-00000-of-00001.parquet")
    return folder


def test_parquet(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "set", score=[1, 2, 3, 4], licence=["cc0", None, "cc-by", "cc0"], tags=[["x"]] * 4)
    before = tree(folder)
    source = open_source(dataset(folder))
    rows = scan(source)
    assert [row["path"] for row in rows] == [f"train/{number:09d}" for number in range(4)]
    assert [row["captions"] for row in rows] == [[f"picture {number}"] for number in range(4)]
    assert [row["size"] for row in rows] == [len(picture(number)) for number in range(4)]
    assert [row["extra.score"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["extra.licence"] is None and "extra.tags" not in rows[0]
    assert {row["kind"] for row in rows} == {"image"} and not any(row["problem"] for row in rows)
    for number, row in enumerate(rows):
        assert read(source.open(row["path"])) == picture(number)
    assert tree(folder) == before


def test_one_file(tmp_path: Path) -> None:
    file = parquet(tmp_path / "set") / "train-00000-of-00001.parquet"
    assert len(scan(open_source(dataset(file)))) == 4
    (tmp_path / "x.tsv").write_text("")
    with pytest.raises(LatentpressError, match=r"\.parquet"):
        scan(open_source(dataset(tmp_path / "x.tsv")))


def test_blobs_are_opened_in_other_processes(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(open_source(dataset(parquet(tmp_path / "set")))))
    blob = source.open("train/000000002")
    state = pickle.dumps(blob)
    assert picture(2) not in state and picture(2) not in pickle.dumps(source)
    huggingface.load_rows.cache_clear()
    copy = pickle.loads(state)
    assert read(copy) == picture(2) and files.media_size(copy) == len(picture(2))
    with copy.open() as file, Image.open(file) as image:
        assert image.size == (20, 10)
    files.require_unchanged(copy, files.compute_media_id(blob))


def test_rows_are_named_by_their_files(tmp_path: Path) -> None:
    names = ["a/one.png", "two.png", "two.png", None]
    source = open_source(dataset(parquet(tmp_path / "set", names=names)))
    rows = scan(source)
    paths = ["train/a/one.png", "train/two.png", "train/000000002", "train/000000003"]
    paths[1] = "train/000000001"  # two rows have that name
    assert [row["path"] for row in rows] == paths
    assert [read(source.open(path)) for path in paths] == [picture(number) for number in range(4)]
    with pytest.raises(MediaError) as caught:
        source.open("train/two.png")
    assert caught.value.reason == "missing"


def test_a_table_that_changed_has_other_versions(tmp_path: Path) -> None:
    place = dataset(parquet(tmp_path / "set"))
    versions = {row["version"] for row in scan(open_source(place))}
    assert len(versions) == 1 and versions != {None}
    huggingface.load_rows.cache_clear()
    assert {row["version"] for row in scan(open_source(place))} == versions
    huggingface.load_rows.cache_clear()
    parquet(tmp_path / "set", count=5, names=[None] * 5)
    later = time.time() + 10
    os.utime(tmp_path / "set/train-00000-of-00001.parquet", (later, later))
    rows = scan(open_source(place))
    assert len(rows) == 5 and not versions & {row["version"] for row in rows}


def test_saved_to_disk(tmp_path: Path) -> None:
    hf.DatasetDict({"train": embedded(), "test": embedded(2)}).save_to_disk(tmp_path / "dict")
    embedded(3).save_to_disk(tmp_path / "one")
    source = open_source(dataset(tmp_path / "dict", split="test"))
    assert [row["path"] for row in scan(source)] == ["test/000000000", "test/000000001"]
    assert read(source.open("test/000000001")) == picture(1)
    assert len(scan(open_source(dataset(tmp_path / "one")))) == 3
    with pytest.raises(LatentpressError, match="train, test"):
        scan(open_source(dataset(tmp_path / "dict", split="validation")))


def test_captions_of_several_columns(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "set", short=[["a", "b"], ["a"], [], [" "]], title=["t", "", None, ""])
    rows = scan(open_source(dataset(folder, caption_column=["short", "title"])))
    assert [row["captions"] for row in rows] == [["a", "b", "t"], ["a"], None, None]
    assert [(row["problem"] or "").partition(":")[0] for row in rows] == ["", "", "empty-caption", "empty-caption"]
    assert rows[0]["extra.caption"] == "picture 0"
    with pytest.raises(LatentpressError, match=r"text'; .*image, caption, short, title"):
        scan(open_source(dataset(folder, caption_column=["text"])))
    rows = scan(open_source(dataset(folder, caption_strategy="instanceprompt", instance_prompt="a pet")))
    assert [row["captions"] for row in rows] == [["a pet"]] * 4 and rows[0]["extra.caption"] == "picture 0"


def test_companions_in_columns(tmp_path: Path) -> None:
    sources = [{"bytes": picture(100 + number), "path": None} for number in range(3)] + [None]
    made = embedded(edited=sources, matte=sources).cast_column("edited", hf.Image(decode=False))
    made.cast_column("matte", hf.Image(decode=False)).save_to_disk(tmp_path / "set")
    source = open_source(dataset(tmp_path / "set", conditioning_column="edited", mask_column="matte"))
    rows = scan(source)
    assert [row["source"] for row in rows] == ["train/000000000", "train/000000001", "train/000000002", None]
    assert (rows[0]["mask"], rows[0]["mask_kind"], rows[3]["mask_kind"]) == ("train/000000000", "image", None)
    assert rows[0]["source_version"] and not any(name.startswith("extra.") for name in rows[0])
    assert read(source.open_companion("source", "train/000000001")) == picture(101)
    with pytest.raises(MediaError):
        source.open_companion("mask", "train/000000003")
    with pytest.raises(LatentpressError, match="nowhere"):
        scan(open_source(dataset(tmp_path / "set", conditioning_column="nowhere")))


def test_bytes_and_names_without_a_feature(tmp_path: Path) -> None:
    table = pa.table({"blob": [picture(0), None], "file_name": ["images/a.png", "images/b.png"], "caption": ["x", "y"]})
    pa.parquet.write_table(table, tmp_path / "set.parquet")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(picture(5))
    source = open_source(dataset(tmp_path / "set.parquet"))
    rows = scan(source)
    assert [(row["path"], bool(row["problem"])) for row in rows] == [
        ("train/000000000", False),
        ("train/000000001", True),
    ]
    assert read(source.open("train/000000000")) == picture(0)
    source = open_source(dataset(tmp_path / "set.parquet", media_column="file_name"))
    rows = scan(source)
    assert [row["path"] for row in rows] == ["train/images/a.png", "train/images/b.png"]
    assert (rows[0]["size"], rows[1]["size"]) == (len(picture(5)), None)
    assert read(source.open("train/images/a.png")) == picture(5)
    with pytest.raises(LatentpressError, match="no column 'none'"):
        scan(open_source(dataset(tmp_path / "set.parquet", media_column="none")))


# -- folders of files ------------------------------------------------------------------------------------------------


def image_folder(folder: Path, metadata: str, text: str) -> Path:
    (folder / "cats").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.png", "cats/c.png")):
        (folder / name).write_bytes(picture(number))
    (folder / metadata).write_text(text)
    return folder


CSV = "file_name,caption,score\na.png,first,1.5\nb.png,second,2.5\ncats/c.png,third,3.5\n"
JSONL = "".join(
    f'{{"file_name": "{name}", "caption": ["{text}", "again"], "score": {score}}}\n'
    for name, text, score in (("a.png", "first", 1.5), ("b.png", "second", 2.5), ("cats/c.png", "third", 3.5))
)


@pytest.mark.parametrize(("metadata", "text"), [("metadata.csv", CSV), ("metadata.jsonl", JSONL)])
def test_imagefolder(tmp_path: Path, metadata: str, text: str) -> None:
    folder = image_folder(tmp_path / "set", metadata, text)
    before = tree(folder)
    source = open_source(dataset(folder))
    rows = {row["path"]: row for row in scan(source)}
    assert sorted(rows) == ["a.png", "b.png", "cats/c.png"]
    assert rows["cats/c.png"]["captions"][0] == "third" and rows["b.png"]["extra.score"] == 2.5
    status = (folder / "a.png").stat()
    assert (rows["a.png"]["size"], rows["a.png"]["version"]) == (status.st_size, str(status.st_mtime_ns))
    assert source.open("cats/c.png") == str(folder / "cats/c.png")
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("metadata", "text", "says"),
    [
        ("metadata.csv", CSV + 'x.png,"open,1\ny.png,"x",2\n', r"metadata\.csv, line 5: a quote is wrong"),
        ("metadata.csv", CSV.replace(",", ";"), r"metadata\.csv, line 1: the cells are separated by ';'"),
        ("set.csv", "text,n\na,1\nb\n", r"set\.csv, line 3: has 1 cell, but the header has 2"),
        ("set.json", '[{"a": 1},\n{"b": %s}]\n' % ("[" * 3000 + "]" * 3000), r"line 2: is nested more than 100"),
        ("set.jsonl", '{"a": 1}\n{"a" 2}\n', r"set\.jsonl, line 2: is not JSON"),
    ],
)
def test_a_broken_table_is_named_with_its_line(tmp_path: Path, metadata: str, text: str, says: str) -> None:
    place = tmp_path / "set"
    if metadata.startswith("set"):
        place = tmp_path / metadata
        place.write_text(text)
    else:
        image_folder(place, metadata, text)
    with pytest.raises(LatentpressError, match=says):
        scan(open_source(dataset(place)))


def test_class_labels_are_names(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for number, name in enumerate(("cat/a.png", "dog/b.png")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(picture(number))
    rows = scan(open_source(dataset(folder, caption_strategy="filename")))
    assert {(row["path"], row["extra.label"]) for row in rows} == {("cat/a.png", "cat"), ("dog/b.png", "dog")}


def test_videofolder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a.mp4", "b.mp4"):
        (folder / name).write_bytes(name.encode())
    (folder / "metadata.csv").write_text("file_name,caption\na.mp4,first\nb.mp4,second\n")
    source = open_source(dataset(folder, dataset_type="video"))
    rows = {row["path"]: row for row in scan(source)}
    assert {(path, row["kind"], row["captions"][0]) for path, row in rows.items()} == {
        ("a.mp4", "video", "first"),
        ("b.mp4", "video", "second"),
    }
    assert read(source.open("b.mp4")) == b"b.mp4"
    with pytest.raises(LatentpressError, match="dataset_type: video"):
        scan(open_source(dataset(folder)))


# -- missing parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/none/such/folder", "./none", "a/b/c"])
def test_a_place_that_is_not_there(place: str) -> None:
    with pytest.raises(LatentpressError, match=f"{re.escape(place)}: does not exist"):
        scan(open_source(dataset(place)))


def test_a_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_notarealtoken")
    with pytest.raises(LatentpressError) as caught:
        scan(open_source(dataset("somebody/nothing:default")))
    assert "network" in caught.value.next_step and "hf_notarealtoken" not in str(caught.value)


def test_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(LatentpressError) as caught:
        scan(open_source(dataset(tmp_path)))
    assert caught.value.next_step == "pip install 'latentpress[huggingface]'"
