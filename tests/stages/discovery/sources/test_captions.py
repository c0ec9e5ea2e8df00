import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.captions import (
    MAX_CAPTION_BYTES,
    CaptionLookup,
    captions_from_names,
    make_caption_lookup,
    normalize_paths,
    read_caption_file,
    strip_extensions,
)
from stages.media.errors import MediaError


@pytest.mark.parametrize(
    ("data", "captions"),
    [
        (b"one\n\n  two \r\none\n", ["one", "two"]),
        (b"\xef\xbb\xbfeins", ["eins"]),
        ("ü é é".encode(), ["ü é é"]),
    ],
)
def test_lines_of_a_text_file_are_alternatives(tmp_path: Path, data: bytes, captions: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_caption_file(str(tmp_path / "a.txt")) == captions


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "no-caption"),
        (b"", "empty-caption"),
        (b" \n\t\n", "empty-caption"),
        (b"\xef\xbb\xbf", "empty-caption"),
        (b"gar\xe7on", "caption-not-utf8"),
        (b"x" * (MAX_CAPTION_BYTES + 1), "caption-too-long"),
    ],
)
def test_a_text_file_that_gives_no_caption(tmp_path: Path, data: bytes | None, reason: str) -> None:
    if data is not None:
        (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(MediaError) as caught:
        read_caption_file(str(tmp_path / "a.txt"))
    assert caught.value.reason == reason and "a.txt" in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(MediaError, match="is no regular file"):
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
    assert captions_from_names(pa.array([path])).to_pylist() == [[words] if words else []]


@given(st.lists(st.text(alphabet="a./ \nb", min_size=1, max_size=8)))
def test_stems_are_those_of_the_operating_system(paths: list[str]) -> None:
    assert strip_extensions(pa.array(paths, pa.string())).to_pylist() == [os.path.splitext(path)[0] for path in paths]


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
    assert columns["advice"].to_pylist() == [f"write a caption into {table}", None, f"add a row for it to {table}"]
    assert columns["extra.score"].to_pylist() == [2, 1, None]


def test_several_columns_and_lists_are_alternatives(tmp_path: Path) -> None:
    table = tmp_path / "c.jsonl"
    table.write_text('{"path": "a.png", "long": ["x", "y"], "short": "z"}\n{"path": "b.png", "long": [], "short": "q"}')
    settings = dataset(tmp_path, caption_strategy="jsonl", caption_file=str(table), caption_column=["short", "long"])
    columns = {"path": pa.array(["a.png", "b.png"])}
    CaptionLookup(settings, str(tmp_path)).add(columns)
    assert columns["captions"].to_pylist() == [["z", "x", "y"], ["q"]]


def test_a_table_without_the_column_says_which_there_are(tmp_path: Path) -> None:
    table = tmp_path / "c.csv"
    table.write_text("file_name,text\na.png,one\n")
    lookup = make_caption_lookup(dataset(tmp_path, caption_strategy="csv", caption_file=str(table)), str(tmp_path))
    assert lookup is not None
    with pytest.raises(LatentpressError, match=r"no column 'caption'; there are: file_name, text"):
        lookup.add({"path": pa.array(["a.png"])})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'file_name,caption\na.png,"open\nb.png,"x"\n', r"line 2: a quote is opened and not closed"),
        (b'file_name,caption\na.png,"a \\"big\\" cat"\n', r'line 2: CSV has no \\"'),
        ("file_name,caption\na.png,x\n".encode("utf-16"), r"line 1: is UTF-16"),
    ],
)
def test_a_table_of_captions_is_checked_like_any_other(tmp_path: Path, data: bytes, says: str) -> None:
    table = tmp_path / "captions.csv"
    table.write_bytes(data)
    lookup = make_caption_lookup(dataset(tmp_path, caption_strategy="csv", caption_file=str(table)), str(tmp_path))
    assert lookup is not None
    with pytest.raises(LatentpressError, match=r"captions\.csv, " + says):
        lookup.add({"path": pa.array(["a.png", "b.png"])})


def test_one_prompt_for_all_and_what_sources_do_themselves(tmp_path: Path) -> None:
    settings = dataset(tmp_path, caption_strategy="instanceprompt", instance_prompt=" sks dog ")
    lookup, columns = make_caption_lookup(settings, str(tmp_path)), {"path": pa.array(["a", "b"])}
    assert lookup is not None
    lookup.add(columns)
    assert columns["captions"].to_pylist() == [["sks dog"], ["sks dog"]] and "problem" not in columns
    assert make_caption_lookup(dataset(tmp_path), str(tmp_path)) is None
    assert make_caption_lookup(dataset(tmp_path / "m.csv"), str(tmp_path)) is None
