"""Videos that are not files: read by ranges of bytes with any decoder; errors affect only the item."""

import io

import numpy as np
import pytest

from schemas.clips import clip_times
from stages.media.files import Blob
from stages.media.video import probe_video, read_frames
from tests.stages.media.test_video_formats import FAST, first_frame
from tests.stages.media_files import number_of, numbered, reason, video


class Bytes(Blob):
    """A file in memory that counts the bytes read."""

    def __init__(self, content, name="clips.tar/a.mp4"):
        self.content, self.name, self.read = content, name, 0

    def size(self):
        return len(self.content)

    def open(self):
        owner = self

        class Reader(io.BytesIO):
            def read(self, size=-1):
                data = super().read(size)
                owner.read += len(data)
                return data

        return Reader(self.content)


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """4 MB: noise under the numbers, a keyframe every ten frames, the index at the end."""
    draw = np.random.default_rng(0)

    def frames():
        for frame in numbered(range(150), 128):
            frame[64:] = draw.integers(0, 256, (64, 256, 3))
            yield frame

    path = tmp_path_factory.mktemp("heavy") / "heavy.mp4"
    return video(path, frames(), ("libx264", "yuv420p", {**FAST, "qp": "12"}), rate=25).read_bytes()


def test_a_video_that_is_no_file_is_read_by_ranges(heavy):
    blob = Bytes(heavy)
    assert len(heavy) > 3_000_000
    assert probe_video(blob).frames == 150
    assert blob.read < 0.1 * len(heavy)
    for first in (140, 117):  # on a keyframe, and behind one
        blob.read = 0
        frames = read_frames(blob, clip_times(first / 25, 25, 5))
        assert [number_of(frame) for frame in frames] == list(range(first, first + 5))
        assert blob.read < 0.25 * len(heavy)


@pytest.mark.parametrize("action", [probe_video, first_frame])
def test_errors_of_what_is_no_file_are_media_errors(action, heavy):
    assert reason(action, Bytes(b"")) == "empty-file"
    assert reason(action, Bytes(b"no video, whatever its name says" * 40)) == "not-a-video"
    assert reason(action, Bytes(heavy[: len(heavy) // 2])) == "not-a-video"  # its index was at the end

    class Lost(Bytes):
        def open(self):
            class Reader(io.BytesIO):
                def read(self, _=-1):
                    raise self.error

            reader = Reader(self.content)
            reader.error = self.error
            return reader

    lost_blob = Lost(heavy)
    for lost_blob.error, expected in (
        (ConnectionResetError(104, "reset"), "unreadable"),
        (MemoryError(), "out-of-memory"),
    ):
        assert reason(action, lost_blob) == expected
