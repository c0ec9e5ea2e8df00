import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.discovery.sources.captions import add_row_captions
from stages.discovery.sources.columns import TextLookup, extra_columns
from stages.discovery.sources.table_reader import find_media_column, read_table
from tests.stages.discovery.listings import write_table


def captions_of(table: pa.Table, *names: str) -> list[list[str]]:
    columns = {"path": pa.nulls(len(table))}
    add_row_captions(columns, table.select(names), np.arange(len(table)), "t.parquet")
    return [captions or [] for captions in columns["captions"].to_pylist()]


ROWS = [
    {"file_name": "0001", "caption": 'a "quoted", text', "score": 5, "rate": 0.5, "good": True},
    {"file_name": "0002", "caption": "zwei\nZeilen ü", "score": None, "rate": 2, "good": False},
]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_the_three_kinds_give_the_same_table(tmp_path: Path, kind: str) -> None:
    table = read_table(str(write_table(tmp_path, ROWS, kind)), text=["file_name"])
    assert table.to_pylist() == ROWS
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert kinds == {"file_name": "string", "caption": "string", "score": "int64", "rate": "double", "good": "bool"}


def test_a_column_whose_later_cells_are_of_another_kind_is_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"{i},{i},{i}" for i in range(5000)]
    path.write_text("\n".join(["a,b,c", *lines, "1.5,x,-"]))
    assert [str(field.type) for field in read_table(str(path)).schema] == ["double", "string", "int64"]


def test_a_byte_order_mark_and_empty_lines_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfa,b\n1,x\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}')
    assert read_table(str(tmp_path / "a.csv")).column_names == ["a", "b"]
    assert read_table(str(tmp_path / "a.jsonl")).column("a").to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("t.csv", b"a,b\n1,2\n3\n", r"t\.csv, line 3: has 1 cell, but the header has 2: 3"),
        ("t.csv", b'a,b\n1,"open\n2,"x"\n3,y\n', r"line 2: a quote is wrong between this line and line 3"),
        ("t.csv", b'a,b\n1.png,"open\n2.png,"\n3.png,y\n', r"line 2: a quoted cell continues over line 3, which"),
        ("t.csv", b'a,b\n1,2\n3,"a \\"big\\" cat"\n', r"line 3: a quote is wrong"),
        ("t.csv", b"a,b\r1,2\r3\r", r"t\.csv, line 1: .*new-line"),
        ("t.csv", "a,b\n1,2\n".encode("utf-16"), r"t\.csv, line 1: is UTF-16, not UTF-8"),
        ("t.csv", "a,b\n1,2\n".encode("utf-16-le"), r"t\.csv, line 1: is UTF-16, or not text"),
        ("t.csv", b"a;b\n1;2\n3\n", r"t\.csv, line 3: has 1 cell, but the header has 2"),
        ("t.csv", b"a,b\n1,2\n3,caf\xe9\n", r"t\.csv, line 3: is not UTF-8 \(byte 5\)"),
        ("t.csv", b"a,a\n1,2\n", "two columns are named 'a'"),
        ("t.csv", b"", r"t\.csv: is empty"),
        ("t.jsonl", '{"a": 1}\n'.encode("utf-16"), r"t\.jsonl, line 1: is UTF-16, not UTF-8"),
        (
            "t.jsonl",
            b'{"a": "[[{"}\n{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            r"t\.jsonl, line 2: is not JSON .*nested",
        ),
        ("t.jsonl", b'{"a": 1}\n\n{"a": "x"}\n', r"line 3: 'a' is text .*a number in line 1"),
        ("t.jsonl", b'{"a": "x"}\n{"a": "y", "a": "z"}\n', "line 2: is not JSON"),
        ("t.jsonl", b'{"a": "x"}\n[1]\n', r"line 2: is a list, not an object"),
        ("t.jsonl", b'{"a": "x"}\n{"a": "caf\xe9"}\n', r"line 2: is not UTF-8"),
        ("t.jsonl", b'{"a": "x"}\n\n{"a": "\\ud800"}\n', r"line 3: is not JSON .*surrogate"),
        ("t.parquet", b"PAR1 no", r"t\.parquet: can't be read as parquet"),
        ("t.xlsx", b"", r"\.csv, \.jsonl, \.parquet"),
    ],
)
def test_a_broken_table_is_named_with_its_line(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(LatentpressError, match=says) as caught:
        read_table(str(tmp_path / name))
    assert caught.value.next_step


TEXTS = ("file", "caption", "alternatives", "licence")


@pytest.mark.parametrize(
    ("column", "source"), [*((column, "manifest") for column in TEXTS), ("caption", "huggingface")]
)
def test_text_of_parquet_that_is_not_utf8_is_named_with_its_column(tmp_path: Path, column: str, source: str) -> None:
    texts = {name: [b"a.png", b"b.png", b"c.png", b"d.png"] for name in TEXTS}
    texts[column][2] = b"\xff"
    bytes_ = {name: pa.array(values, pa.binary()) for name, values in texts.items()}
    columns = {name: pa.Array.from_buffers(pa.string(), 4, values.buffers()) for name, values in bytes_.items()}
    columns["alternatives"] = pa.ListArray.from_arrays([0, 1, 2, 3, 4], columns["alternatives"])
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
    settings = {"source": source, "caption_column": ["caption", "alternatives"], "media_column": "file"}
    place = Dataset(id="d", instance_data_dir=str(tmp_path / "t.parquet"), **settings)
    with pytest.raises(LatentpressError, match=rf"t\.parquet: column '{column}' is not UTF-8"):
        list(open_source(place).scan())


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_separator_that_is_certain_is_taken(tmp_path: Path, delimiter: str) -> None:
    lines = ["file_name,caption", 'a.png,"one; two\t three | four"', "b.png,five"]
    (tmp_path / "t.csv").write_text("\n".join([line.replace(",", delimiter) for line in lines]))
    assert read_table(str(tmp_path / "t.csv")).to_pylist() == [
        {"file_name": "a.png", "caption": "one; two\t three | four"},
        {"file_name": "b.png", "caption": "five"},
    ]


def test_a_comma_in_the_header_decides(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("file_name,tags;a\na.png,x;y\n")
    assert read_table(str(tmp_path / "t.csv")).to_pylist() == [{"file_name": "a.png", "tags;a": "x;y"}]


def test_captions_of_several_lines_are_kept(tmp_path: Path) -> None:
    caption = 'a "big" cat,\nsitting, as in b.png, twice\n\n5" tall\\'
    path = str(write_table(tmp_path, [{"file_name": "a.png", "caption": caption}], "csv"))
    assert read_table(path).to_pylist() == [{"file_name": "a.png", "caption": caption}]


@pytest.mark.slow
@given(st.text(alphabet='ab,;"\n\r\\ \t', max_size=40))
def test_csv_is_read_as_a_strict_reader_does_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(b"f,c\n" + text.encode())
    try:
        read_values = read_table(str(path), text=["f", "c"])
    except LatentpressError as error:
        assert "any.csv, line " in str(error) and error.next_step
        return
    with path.open(newline="") as file:
        expected = [row for row in csv.reader(file, strict=True) if row][1:]
    assert [[row["f"] or "", row["c"] or ""] for row in read_values.to_pylist()] == expected


def test_an_absent_table_is_named_and_a_url_without_its_secrets(tmp_path: Path) -> None:
    with pytest.raises(LatentpressError, match=r"never\.csv: does not exist"):
        read_table(str(tmp_path / "never.csv"))
    with pytest.raises(LatentpressError) as caught:
        read_table("http://user:hunter2hunter2@127.0.0.1:9/t.csv?sig=abcdefghijklmnopqrstuv")
    assert "hunter2" not in str(caught.value) and "abcdefgh" not in str(caught.value)


def test_a_bad_line_is_quoted_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,caption\nhttps://h/a.png?sig=abcdefghijklmnopqrstuv\n")
    with pytest.raises(LatentpressError, match=r"https://h/a\.png") as caught:
        read_table(str(tmp_path / "t.csv"))
    assert "abcdefgh" not in str(caught.value)


def test_the_column_of_media_is_the_first_usual_one_or_the_one_named() -> None:
    table = pa.table({"id": ["1"], "image": ["a"], "path": ["b"], "list": [["a"]]})
    assert find_media_column(table, None, "t.csv") == "path"
    assert find_media_column(table, "id", "t.csv") == "id"
    with pytest.raises(LatentpressError, match=r"no column 'url'; .*id, image, path, list"):
        find_media_column(table, "url", "t.csv")
    with pytest.raises(LatentpressError, match=r"no column named file_name.*its columns: id"):
        find_media_column(pa.table({"id": ["1"]}), None, "t.csv")
    with pytest.raises(LatentpressError, match=r"contains list<.*>, not file names"):
        find_media_column(table, "list", "t.csv")


def test_a_column_of_bytes_is_named_as_that(tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"x", "path": "a.png"}])
    path = str(tmp_path / "t.parquet")
    pq.write_table(pa.table({"id": ["1"], "image": image, "caption": [b"words"]}), path)
    table = read_table(path)
    for column in (None, "image"):
        with pytest.raises(LatentpressError, match=r"column 'image' contains binary, not file names") as caught:
            find_media_column(table, column, path)
        assert "source: huggingface" in caught.value.next_step
    with pytest.raises(LatentpressError, match=r"'caption' contains binary, not captions"):
        captions_of(table, "caption")
    pq.write_table(pa.table({"file_name": ["a.png"], "image": image}), path)
    assert find_media_column(read_table(path), None, path) == "file_name"


words = st.one_of(st.none(), st.text(alphabet=" ab\n\u3000ü", max_size=4))


@settings(deadline=None)
@given(st.lists(st.tuples(words, st.one_of(st.none(), st.lists(words, max_size=5))), max_size=12))
def test_captions_equal_those_of_a_plain_loop(rows) -> None:
    table = pa.table(
        {
            "a": pa.array([a for a, _ in rows], pa.string()),
            "b": pa.array([b for _, b in rows], pa.list_(pa.string())),
        }
    )
    expected = [
        list(dict.fromkeys(text.strip() for text in [a, *(b or [])] if text is not None and text.strip()))
        for a, b in rows
    ]
    assert captions_of(table, "a", "b") == expected
    assert captions_of(table.slice(1), "a", "b") == expected[1:]


def test_extras_are_what_can_be_compared() -> None:
    ignored: Counter[str] = Counter()
    table = pa.table({"path": ["a"], "t": ["x"], "n": [1], "l": [[1]], "s": [{"a": 1}], "b": [b"x"]})
    assert list(extra_columns(table, ["path"], ignored)) == ["extra.t", "extra.n"]
    assert dict(ignored) == {"column that is neither text nor number": 3}


keys = st.lists(st.sampled_from([None, "", "a", "b", "ab", "ü", "a\0", "\0", "日本", " a"]), max_size=30)


@settings(deadline=None)
@given(keys, keys)
def test_lookup_finds_what_a_plain_loop_finds(keys, wanted) -> None:
    lookup = TextLookup(pa.chunked_array([pa.array(keys[:7], pa.string()), pa.array(keys[7:], pa.string())]))
    texts = pa.array(wanted, pa.string())
    every = [[row for row, key in enumerate(keys) if key == text and key is not None] for text in wanted]
    first, counts = lookup.count(texts)
    assert first.tolist() == [rows[0] if rows else -1 for rows in every]
    assert counts.tolist() == [len(rows) for rows in every]
    owner, rows = lookup.pairs(texts)
    assert list(zip(owner.tolist(), rows.tolist(), strict=True)) == [(i, r) for i, rs in enumerate(every) for r in rs]
    assert np.array_equal(lookup.find(texts), first)
