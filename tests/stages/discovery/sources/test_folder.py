import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.discovery.sources.folder import FolderSource
from stages.discovery.sources.walk import BACK_LINK, OUTSIDE_LINK
from stages.media.files import IMAGE_EXTENSIONS
from tests.stages.discovery import listings
from tests.stages.discovery.listings import Row, put, reason


def source(folder: Path, **settings: Any) -> FolderSource:
    opened = open_source(Dataset(id="d", instance_data_dir=str(folder), **settings))
    assert isinstance(opened, FolderSource)
    return opened


def listed(folder: Path | FolderSource, **settings: Any) -> dict[str, Row]:
    return listings.listed(folder if isinstance(folder, FolderSource) else source(folder, **settings))


def test_media_at_any_depth_with_their_caption_files(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "deep/er/b.JPG", "deep/er/b.txt", "clip.mp4", "notes.md", "Makefile", "c.v2.webp")
    put(tmp_path, "c.v2.txt", ".hidden.png", ".git/d.png", "stray.txt", "ends.")
    folder_source = source(tmp_path)
    rows = listed(folder_source)
    assert {path: row["captions_at"] for path, row in rows.items()} == {
        "a.png": "a.txt",
        "deep/er/b.JPG": "deep/er/b.txt",
        "c.v2.webp": "c.v2.txt",
    }
    status = (tmp_path / "a.png").stat()
    assert (rows["a.png"]["size"], rows["a.png"]["version"]) == (status.st_size, str(status.st_mtime_ns))
    status = (tmp_path / "a.txt").stat()
    assert rows["a.png"]["captions_version"] == f"{status.st_size}:{status.st_mtime_ns}"
    assert all(row["problem"] is None and row["kind"] == "image" for row in rows.values())
    assert dict(folder_source.ignored) == {".mp4": 1, ".md": 1, "": 2}
    assert folder_source.read_captions("deep/er/b.txt") == ["deep/er/b.txt"]
    assert Path(folder_source.open("deep/er/b.JPG")).read_text() == "deep/er/b.JPG"


def test_two_files_of_one_name_share_a_caption_and_the_exact_extension_comes_first(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.jpg", "a.txt", "b.png", "b.TXT", "c.png", "c.TXT", "c.txt")
    rows = listed(tmp_path)
    assert {path: row["captions_at"] for path, row in rows.items()} == {
        "a.png": "a.txt",
        "a.jpg": "a.txt",
        "b.png": "b.TXT",
        "c.png": "c.txt",
    }


def test_a_missing_caption_has_a_reason_and_advice(tmp_path: Path) -> None:
    put(tmp_path, "x/a.b.png")
    (row,) = listed(tmp_path).values()
    assert reason(row) == "no-caption" and "trigger" in row["advice"]
    assert row["captions_at"] is None and row["captions_version"] is None


def test_a_name_that_is_not_utf8_is_rejected_as_it_can_be_printed(tmp_path: Path) -> None:
    put(tmp_path, "good.png", "good.txt")
    for name in (b"strange\xff.png", b"strange\xff.txt"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"x")
    rows = listed(tmp_path, mask_data=str(tmp_path))
    assert {path: reason(row) for path, row in rows.items()} == {
        "good.png": None,
        "strange\\udcff.png": "name-not-utf8",
    }
    assert rows["strange\\udcff.png"]["captions_at"] is None and rows["good.png"]["mask"] == "good.png"


def test_what_is_no_file_is_rejected(tmp_path: Path) -> None:
    put(tmp_path, "gone.txt", "pipe.txt", "self.txt", "orphan.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "never was.png")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "orphan.txt").symlink_to(tmp_path / "never was.txt")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    rows = listed(tmp_path)
    assert {path: reason(row) for path, row in rows.items()} == {
        "gone.png": "missing",
        "self.png": "unreadable",
        "pipe.png": "unreadable",
        "orphan.png": "no-caption",
    }
    assert rows["gone.png"]["size"] is None and rows["gone.png"]["version"] is None


def linked(tmp_path: Path) -> Path:
    put(tmp_path / "in", "real/one.png", "real/one.txt")
    put(tmp_path / "outside", "two.png", "two.txt")
    (tmp_path / "in/link").symlink_to(tmp_path / "in/real")
    (tmp_path / "in/file.png").symlink_to(tmp_path / "in/real/one.png")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/out").symlink_to(tmp_path / "outside")
    (tmp_path / "in/out.png").symlink_to(tmp_path / "outside/two.png")
    (tmp_path / "outside/back").symlink_to(tmp_path / "in/real")
    (tmp_path / "in/real/up").symlink_to("../..")
    return tmp_path / "in"


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    folder_source = source(linked(tmp_path))
    assert set(listed(folder_source)) == {"real/one.png", "link/one.png", "file.png"}
    assert dict(folder_source.ignored) == {OUTSIDE_LINK: 4, BACK_LINK: 1}


def test_links_are_followed_anywhere_on_request_but_never_round_in_circles(tmp_path: Path) -> None:
    folder_source = source(linked(tmp_path), follow_links=True)
    items = set(listed(folder_source))
    assert {"real/one.png", "link/one.png", "file.png", "out.png", "out/two.png", "out/back/one.png"} <= items
    assert folder_source.ignored[BACK_LINK] >= 3
    assert all(path.count("/") < 12 for path in items)


def test_a_folder_whose_name_begins_like_the_root_is_outside(tmp_path: Path) -> None:
    put(tmp_path / "in-other", "a.png")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "in-other")
    assert listed(tmp_path / "in") == {}


def test_a_folder_that_is_gone_while_walking_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "closed/a.png")
    original = os.scandir

    def refuse(path: str):
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(LatentpressError, match=r"closed: Permission denied") as caught:
        listed(tmp_path)
    assert "read permission" in caught.value.next_step


def test_what_is_removed_while_it_is_listed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "kept.png", "kept.txt", "gone.png", "gone.txt", "sub/a.png")
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere")
    original = os.scandir

    @contextmanager
    def scandir(path: str) -> Iterator[Iterator[os.DirEntry]]:
        with original(path) as entries:
            items = list(entries)
        for name in ("gone.png", "gone.txt", "sub/a.png"):
            (tmp_path / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (tmp_path / "sub").rmdir()
        yield iter(items)

    monkeypatch.setattr(os, "scandir", scandir)
    rows = listed(tmp_path)
    assert {path: reason(row) for path, row in rows.items()} == {"kept.png": None, "broken.png": "missing"}


def test_an_absent_folder_is_named_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(LatentpressError, match=r"datasets\.d\.instance_data_dir: .*none does not exist"):
        listed(tmp_path / "none")
    with pytest.raises(LatentpressError, match=r"datasets\.d\.media_root: .*none does not exist"):
        listed(tmp_path, media_root=str(tmp_path / "none"))
    (tmp_path / "one.tsv").write_bytes(b"x")
    with pytest.raises(LatentpressError, match=r"instance_data_dir: .*one\.tsv is a file, not a folder") as caught:
        listed(tmp_path / "one.tsv")
    assert "a table ends with .csv" in caught.value.next_step


def test_chunks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("base", "walk"):
        monkeypatch.setattr(f"stages.discovery.sources.{module}.CHUNK_ROWS", 4)
    assert list(source(tmp_path).scan()) == []
    put(tmp_path, *(f"{i % 3}/{i}.png" for i in range(22)), *(f"{i % 3}/{i}.txt" for i in range(0, 22, 2)))
    (tmp_path / "1/broken.png").symlink_to("nothing")
    chunks = list(source(tmp_path).scan())
    assert max(chunk.num_rows for chunk in chunks) == 4
    rows = {row["path"]: row for chunk in chunks for row in chunk.to_pylist()}
    assert len(rows) == 23 and reason(rows["1/broken.png"]) == "missing"
    for i in range(22):
        assert rows[f"{i % 3}/{i}.png"]["captions_at"] == (None if i % 2 else f"{i % 3}/{i}.txt")


names = st.text(
    alphabet=st.characters(exclude_characters="/\0", exclude_categories=("Cs",), max_codepoint=0x2FFF),
    min_size=1,
    max_size=12,
).filter(lambda name: name.strip(".") and not name.startswith("."))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(names, min_size=1, max_size=6), st.sampled_from([".png", ".Jpg", ".txt", ".md", ""]))
def test_any_names_are_listed_as_a_plain_walk_finds_them(tmp_path_factory, stems: set[str], ending: str) -> None:
    folder = tmp_path_factory.mktemp("tree")
    put(folder, *(stem + ending for stem in stems), *(f"{stem}/in.png" for stem in stems if ending))
    expected = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and os.path.splitext(path.name)[1].lower() in IMAGE_EXTENSIONS
    }
    assert set(listed(folder)) == expected
