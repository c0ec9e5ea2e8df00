"""Damaged and hostile tars, and the offsets of members in intact tars."""

import gzip
import io
import struct
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.discovery.sources import tars
from stages.discovery.sources.base import open_source
from stages.media.files import MediaError
from tests.stages.discovery.tars import dataset, picture, read, scan, write


def problems(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["path"], row["problem"].partition(":")[0]) for row in rows if row["problem"]]


@pytest.fixture(scope="module")
def whole_tar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, int]]:
    """A tar of four samples, its content, and the sizes of its members."""
    folder = tmp_path_factory.mktemp("cut")
    tar = write(folder / "s.tar", [{"__key__": f"{n:03d}", "jpg": picture(n), "txt": "x"} for n in range(4)])
    return tar, tar.read_bytes(), {row["path"]: row["size"] for row in scan(open_source(dataset(folder)))}


@given(st.integers(0, 15000))
def test_a_tar_cut_anywhere_lists_what_is_whole(whole_tar: tuple[Path, bytes, dict[str, int]], cut: int) -> None:
    tar, data, intact = whole_tar
    end = max(i for i, byte in enumerate(data) if byte) // 512 * 512 + 512
    tar.write_bytes(data[: min(cut, end)])
    source = open_source(dataset(tar.parent))
    rows = scan(source)
    assert rows[0]["path"] == "s.tar" and rows[0]["problem"].partition(":")[0] in ("truncated", "empty-file")
    assert problems(rows)[1:] in ([], [(rows[-1]["path"], "no-caption")])  # its text is behind the cut
    for row in rows[1:]:
        assert row["size"] == intact[row["path"]] == len(read(source.open(row["path"])))


def test_a_damaged_header(tmp_path: Path) -> None:
    tar = write(tmp_path / "s.tar", [{"__key__": f"{n:03d}", "jpg": picture(n), "txt": "x"} for n in range(4)])
    data = bytearray(tar.read_bytes())
    second = bytes(data).index(b"001.jpg")
    data[second + 124 : second + 136] = b"garbage!!!!!"
    tar.write_bytes(data)
    source = open_source(dataset(tmp_path))
    rows = scan(source)
    assert [(row["path"], (row["problem"] or "").partition(":")[0]) for row in rows] == [
        ("s.tar", "unreadable"),
        ("s.tar/000.jpg", ""),
    ]
    assert "is not a valid tar after byte" in rows[0]["problem"]
    assert read(source.open("s.tar/000.jpg")) == picture(0)
    with pytest.raises(MediaError, match="not in the tar"):
        source.open("s.tar/002.jpg")


@pytest.mark.parametrize("data", [b"", b"x" * 2000, gzip.compress(b"x" * 5000, mtime=0)], ids=["empty", "text", "gzip"])
def test_files_that_are_no_tars(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "s.tar").write_bytes(data)
    assert problems(scan(open_source(dataset(tmp_path))))[0][0] == "s.tar"


def info(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **more: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, size
    for key, value in more.items():
        setattr(made, key, value)
    return made


def test_members_that_mean_harm_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name in ("../up.jpg", "/absolute.jpg", "a/../../b.jpg"):
            tar.addfile(info(name, size=3), io.BytesIO(b"bad"))
        tar.addfile(info("link.jpg", tarfile.SYMTYPE, linkname=str(tmp_path / "secret.jpg")))
        tar.addfile(info("hard.jpg", tarfile.LNKTYPE, linkname="../secret.jpg"))
        tar.addfile(info("device.jpg", tarfile.CHRTYPE))
        tar.addfile(info("folder.jpg", tarfile.DIRTYPE))
        tar.addfile(info("./good.jpg", size=4), io.BytesIO(b"good"))
        tar.addfile(info("good.txt", size=1), io.BytesIO(b"x"))
        tar.addfile(info("good.jpg", size=5), io.BytesIO(b"other"))
        tar.addfile(info(".hidden.jpg", size=5), io.BytesIO(b"other"))
        tar.addfile(info("noext", size=5), io.BytesIO(b"other"))
    source = open_source(dataset(tmp_path / "s.tar"))
    (row,) = scan(source)
    assert (row["path"], row["problem"]) == ("s.tar/good.jpg", None)
    assert read(source.open(row["path"])) == b"good"
    assert source.ignored == {
        "member with an unsafe name": 3,
        "member that is not a regular file": 3,
        "second member with the same name": 1,
        "member without a key": 2,
    }
    for path in ("s.tar/../secret.jpg", "../secret.jpg", "s.tar/link.jpg", str(tmp_path / "secret.jpg")):
        with pytest.raises(MediaError):
            source.open(path)


def test_long_names_are_read(tmp_path: Path) -> None:
    name = "f" * 90 + "/" + "ü" * 120 + ".jpg"
    for number, style in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=style) as tar:
            tar.addfile(info(name, size=4), io.BytesIO(b"good"))
    source = open_source(dataset(tmp_path, caption_strategy="instanceprompt", instance_prompt="x"))
    assert [row["path"] for row in scan(source)] == [f"0.tar/{name}", f"1.tar/{name}"]
    assert read(source.open(f"1.tar/{name}")) == b"good"


def header(name: bytes, size: bytes, kind: bytes) -> bytes:
    block = bytearray(512)
    block[: len(name)], block[124:136], block[156:157], block[257:265] = name, size, kind, b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "data",
    [
        header(b"x", b"77777777777\0", tarfile.XHDTYPE),  # a header of 8 GiB
        header(b"x", b"\x80" + struct.pack(">3xQ", 1 << 62), tarfile.GNUTYPE_LONGNAME),
        header(b"a.jpg", b"\xff" * 11 + b"\x00", tarfile.REGTYPE) + bytes(1024),  # a negative size
        header(b"x", b"\xff" * 11 + b"\x00", tarfile.XHDTYPE) + bytes(1024),
        header(b"x", b"00000000000\0", tarfile.XHDTYPE) * 3000,  # headers of headers of headers
        header(b"x", b"00000100000\0", tarfile.XHDTYPE) + b"1" * (1 << 15) + bytes(1024),
    ],
)
def test_headers_that_mean_harm(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "s.tar").write_bytes(data)
    rows = scan(open_source(dataset(tmp_path)))
    assert [row["path"] for row in rows if row["problem"]][:1] == ["s.tar"]


@given(
    st.lists(st.tuples(st.text("aé.", min_size=1, max_size=300), st.integers(0, 2000)), max_size=6),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_are_where_tarfile_finds_them(named: list[tuple[str, int]], style: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=style) as tar:
        for number, (name, size) in enumerate(named):
            made = info(f"d/{name}{number}", size=size, mtime=number + 0.5)
            try:
                tar.addfile(made, io.BytesIO(bytes([number]) * size))
            except ValueError:  # too long for this format
                continue
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        theirs = [(member.name, member.offset_data, member.size) for member in tar]
    ignored: Counter[str] = Counter()
    ours = list(tars.iter_members(io.BytesIO(out.getvalue()), len(out.getvalue()), "x", ignored))
    assert [tuple(member) for member in ours] == [row for row in theirs if ".." not in row[0].split("/")]
    assert sum(ignored.values()) == len(theirs) - len(ours)
