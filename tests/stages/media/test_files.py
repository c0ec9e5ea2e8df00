"""Files and Blobs: opened, measured, named by content, and compared with the plan."""

import io
import os
import pickle
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stages.media import files
from stages.media.files import Blob, FileWindow, MediaError


class Held(Blob):
    """Bytes in memory, with or without a store's word for them."""

    def __init__(self, data: bytes, given: str | None = None, content: bytes | None = None) -> None:
        self.name, self.data, self.given, self.content = "held", data, given, content
        self.refreshed = 0

    def open(self):
        return io.BytesIO(self.data)

    def size(self) -> int:
        return len(self.data)

    def media_id(self) -> str | None:
        return self.given

    def refresh(self) -> None:
        self.refreshed += 1

    def verify(self) -> None:
        if self.content not in (None, self.data):
            raise MediaError("changed", self, "is damaged", "upload it again")


def reason(call, *args) -> str:
    with pytest.raises(MediaError) as caught:
        call(*args)
    return caught.value.reason


def test_an_error_names_the_file_the_problem_and_the_next_step_in_any_process() -> None:
    error = pickle.loads(pickle.dumps(MediaError("truncated", Path("a/b.mp4"), "ends at 1.0 s", "replace it")))
    assert (error.reason, error.path, str(error)) == ("truncated", "a/b.mp4", "a/b.mp4: ends at 1.0 s; replace it")


def test_a_file_and_a_blob_of_its_bytes_have_one_id(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"content" * 1000)
    blob = pickle.loads(pickle.dumps(Held(path.read_bytes())))
    assert files.compute_media_id(path) == files.compute_media_id(blob) == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert files.media_size(path) == files.media_size(blob) == 7000
    assert os.fspath(blob) == "held"
    with files.open_media(path) as first, files.open_media(blob) as second:
        assert first.read() == second.read()


def test_check_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    planned_id = files.compute_media_id(path)
    files.require_unchanged(path, planned_id)
    path.write_bytes(b"two")
    assert reason(files.require_unchanged, path, planned_id) == "changed"
    path.unlink()
    assert reason(files.require_unchanged, path, planned_id) == "missing"


def test_check_of_what_a_store_vouches_for() -> None:
    blob = Held(b"one", given="1" * 32, content=b"one")
    files.require_unchanged(blob, "1" * 32)
    assert blob.refreshed == 1
    assert reason(files.require_unchanged, blob, "2" * 32) == "changed"
    assert reason(files.require_unchanged, Held(b"two", given="1" * 32, content=b"one"), "1" * 32) == "changed"


@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300), st.lists(st.integers(0, 400), max_size=6))
def test_a_window_reads_like_its_part_alone(data: bytes, offset: int, size: int, seeks: list[int]) -> None:
    part = data[offset : offset + size]
    window, alone = FileWindow.opened(io.BytesIO(data), offset, size), io.BytesIO(part)
    assert window.read() == part
    for at in seeks:
        assert window.seek(at) == alone.seek(at)
        assert window.read(at % 7) == alone.read(at % 7)
        assert window.tell() == alone.tell()
    if len(part) == size:
        assert window.seek(-min(3, size), io.SEEK_END) == max(0, size - 3)
        assert window.read() == part[-3:]


def test_a_window_closes_what_it_looks_into() -> None:
    file = io.BytesIO(b"abc")
    window = FileWindow.opened(file, 1, 1)
    with window:
        assert window.read() == b"b"
        assert window.seek(0) == 0
        with pytest.raises(OSError, match="before the beginning"):
            window.seek(-1)
    assert file.closed
