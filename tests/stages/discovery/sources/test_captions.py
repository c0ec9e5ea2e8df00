import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.config.datasets import Dataset
from stages.discovery.sources.base import open_source
from stages.discovery.sources.captions import (
    MAX_CAPTION_BYTES,
    CaptionLookup,
    caption_from_name,
    normalize_paths,
    public_path,
    read_caption_file,
)
from stages.discovery.sources.urls import join_url, scrub_secrets, strip_secrets
from stages.media.files import MediaError
from tests.stages.discovery.listings import write_table


@pytest.mark.parametrize(
    ("data", "captions"),
    [
        (b"one\n\n  two \r\none\n", ["one", "two"]),
        (b"\xef\xbb\xbfeins", ["eins"]),
        ("ü é é".encode(), ["ü é é"]),
        (b"one\rtwo\r\nthree", ["one", "two", "three"]),
        ("a\u2028b\u2029c\x85d\ve\ff\x1cg".encode(), ["a\u2028b\u2029c\x85d\ve\ff\x1cg"]),
    ],
)
def test_lines_of_a_text_file_are_alternatives(tmp_path: Path, data: bytes, captions: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_caption_file(str(tmp_path / "a.txt")) == captions


def test_with_captions_per_file_one_all_lines_are_a_caption(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n a cat\r\n\r\n  on a wall\ra cat\n")
    assert read_caption_file(str(tmp_path / "a.txt"), "one") == ["a cat\n\n  on a wall\na cat"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "no-caption"),
        (b"", "empty-caption"),
        (b" \n\t\n", "empty-caption"),
        (b"gar\xe7on", "caption-not-utf8"),
        ("a cat".encode("utf-16"), "caption-not-utf8"),
        ("a cat".encode("utf-16-le"), "caption-zero-bytes"),
        (b"x" * (MAX_CAPTION_BYTES + 1), "caption-too-long"),
    ],
)
def test_a_text_file_that_gives_no_caption(tmp_path: Path, data: bytes | None, reason: str) -> None:
    if data is not None:
        (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(MediaError) as caught:
        read_caption_file(str(tmp_path / "a.txt"))
    assert caught.value.reason == reason and "a.txt" in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["folder", "remote", "webdataset", "webdataset.json", "csv", "jsonl", "parquet", "caption_file", "hub"]
)
def test_every_source_reads_captions_alike(tmp_path: Path, kind: str) -> None:
    """Zero bytes are a problem of the item; a line separator of Unicode is part of the caption."""
    texts = {"a.png": "a cat", "b.png": "a\u2028dog\vand\x85a\ffox", "c.png": "a\0 \0c\0"}
    if kind == "csv":  # whose reader refuses zero bytes at the beginning
        texts = {"a.png": "a" * 2000} | texts | {"a.png": "a" * 2000}
    for name in texts:
        (tmp_path / name).write_bytes(b"x")
    rows = [{"file_name": name, "caption": text} for name, text in texts.items()]
    options: dict[str, Any] = {"instance_data_dir": str(tmp_path)}
    if kind in ("csv", "jsonl", "parquet"):
        options["instance_data_dir"] = str(write_table(tmp_path, rows, kind))
    elif kind == "caption_file":
        options |= {"caption_strategy": "jsonl", "caption_file": str(write_table(tmp_path, rows, "jsonl"))}
    elif kind == "hub":
        table = pa.table({"image": [name.encode() for name in texts], "caption": list(texts.values())})
        pq.write_table(table, tmp_path / "t.parquet")
        options |= {"source": "huggingface", "instance_data_dir": str(tmp_path / "t.parquet")}
    elif kind.startswith("webdataset"):
        with tarfile.open(tmp_path / "t.tar", "w") as tar:
            for name, text in texts.items():
                member = (".json", json.dumps({"caption": text})) if "json" in kind else (".txt", text)
                for ending, data in ((".png", b"x"), (member[0], member[1].encode())):
                    info = tarfile.TarInfo(name[0] + ending)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        options["instance_data_dir"] = str(tmp_path / "t.tar")
    else:
        for name, text in texts.items():
            (tmp_path / name).with_suffix(".txt").write_text(text)
        options["instance_data_dir"] = ("file://" if kind == "remote" else "") + str(tmp_path)
        options["source"] = kind
    source = open_source(Dataset(id="d", **options))
    found = sorted(pa.concat_tables(source.scan(None)).to_pylist(), key=lambda row: row["path"])
    read = list[list[str] | str]()
    for row in found:
        try:
            captions = source.read_captions(row["captions_at"]) if row["captions_at"] else row["captions"]
            read.append((row["problem"] or "").partition(":")[0] or captions)
        except MediaError as error:
            read.append(error.reason)
    assert read == [[texts["a.png"]], [texts["b.png"]], "caption-zero-bytes"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(MediaError, match="is not a regular file"):
        read_caption_file(str(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("deep/a_red-fox.png", "a red fox"),
        ("fox_0001.jpg", "fox"),
        ("fox (2).jpg", "fox"),
        ("fox-2_(3).jpg", "fox"),
        ("fox (red) 2.jpg", "fox (red) 2"),
        ("windows_95.final.png", "windows 95.final"),
        ("new\nline's.png", "new line's"),
        ("no_extension", "no extension"),
        ("a.b/0001.png", None),
        ("__.png", None),
    ],
)
def test_a_name_is_a_caption(path: str, words: str | None) -> None:
    assert caption_from_name(path) == (words or "")


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        ("a/b.png", "a/b.png"),
        ("./a//b.png", "a/b.png"),
        ("a/../b.png", "b.png"),
        ("/data/set/a.png", "a.png"),
        ("/data/set/x/../a.png", "a.png"),
        ("/data/settings/a.png", "/data/settings/a.png"),
        ("../a.png", "/data/a.png"),
        ("file:///data/set/a.png", "a.png"),
        ("s3://b/a//b.png", "s3://b/a//b.png"),
        ("..a.png", "..a.png"),
        ("", None),
        (None, None),
    ],
)
def test_names_in_a_table_become_paths_of_a_listing(cell: str | None, path: str | None) -> None:
    assert normalize_paths(pa.array([cell], pa.string()), "/data/set").to_pylist() == [path]


def dataset(folder: Path, **settings) -> Dataset:
    return Dataset(id="d", instance_data_dir=str(folder), **settings)


def test_a_table_gives_every_row_of_a_file_and_the_rest_of_the_first(tmp_path: Path) -> None:
    table = tmp_path / "c.csv"
    table.write_text("file_name,caption,score\na.png,one,1\n./b.png,,2\na.png,two,3\na.png,one,4\n")
    columns = {"path": pa.array(["b.png", "a.png", "c.png"])}
    CaptionLookup(dataset(tmp_path, caption_strategy="csv", caption_file=str(table)), str(tmp_path)).add(columns)
    assert columns["captions"].to_pylist() == [None, ["one", "two"], None]
    reasons = [text and text.partition(":")[0] for text in columns["problem"].to_pylist()]
    assert reasons == ["empty-caption", None, "no-caption"]
    assert [advice and str(table) in advice for advice in columns["advice"].to_pylist()] == [True, None, True]
    assert columns["extra.score"].to_pylist() == [2, 1, None]


# -- URLs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a@b/c.jpg", "s3://bucket/a@b/c.jpg"),
        ("ftp://me:pass@host:21/a.jpg", "ftp://host:21/a.jpg"),
        ("ftp://me:pa/ss@host/a.jpg", "ftp://host/a.jpg"),
        ("https://host/a.jpg?X-Amz-Signature=abc#t", "https://host/a.jpg"),
        ("https://host:8080/a@b.jpg", "https://host:8080/a@b.jpg"),
        ("zip://in.jpg::https://u:p@host/a.zip?sig=1", "zip://in.jpg::https://host/a.zip"),
        ("simplecache::s3://bucket/a#1.jpg", "simplecache::s3://bucket/a#1.jpg"),
    ],
)
def test_public_shows_no_secret(url: str, shown: str) -> None:
    assert strip_secrets(url) == shown
    assert strip_secrets(shown) == shown


def test_scrub_removes_what_libraries_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token-of-somebody")
    url = "https://me:p%40ssword@host/a.jpg?X-Amz-Signature=0123456789abcdef&X-Amz-Date=today"
    message = (
        f"404 for url={url!r}, again {url}, /a.jpg?X-Amz-Signature=0123456789abcdef, password p@ssword, "
        "other https://you:secret@else/b?token=t, session-token-of-somebody, 0123456789abcdef"
    )
    text = scrub_secrets(message, url)
    for secret in ("p%40ssword", "p@ssword", "0123456789abcdef", "you:secret", "token=t", "session-token-of"):
        assert secret not in text
    assert "https://host/a.jpg" in text and "https://else/b" in text


def test_a_url_with_another_signature_is_the_same_item() -> None:
    url = "https://bucket.s3.amazonaws.com/a.jpg"
    one, second = (public_path(f"{url}?X-Amz-Date={day}&X-Amz-Signature={day * 9}&v=1") for day in "ab")
    assert one == second and one.startswith(f"{url}#") and one != public_path(f"{url}?v=2&X-Amz-Date=a")
    assert public_path(f"{url}?Signature=1&Expires=2") == public_path(f"{url}?Signature=3&Expires=4")
    assert public_path(f"{url}?sig=1&se=2&id=1") == public_path(f"{url}?sig=3&se=4&id=1")
    assert public_path(f"{url}?se=2") != public_path(f"{url}?se=4"), "what no signature goes with names the item"
    assert public_path("https://me:one@host/a.jpg") == public_path("https://me:other@host/a.jpg")
    assert public_path(url) == url


def test_join() -> None:
    assert join_url("s3://bucket/x/", "a b?.jpg") == "s3://bucket/x/a b?.jpg"
    assert join_url("https://h/x?sig=1", "a.jpg") == "https://h/x/a.jpg?sig=1"
    assert join_url("zip://x::s3://bucket/a.zip", "b/c.jpg") == "zip://x/b/c.jpg::s3://bucket/a.zip"
