import builtins
from fractions import Fraction

import av
import numpy as np
import pytest

from schemas.clips import clip_times
from stages.media import decord_backend, video
from stages.media.errors import MediaError

BITS = 8


def write_video(path, stamps, time_base, rotation=0, codec="libx264"):
    """Frames that carry their number as eight black and white blocks."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=25, options={"g": "10", "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = 128, 64, "yuv420p"
        stream.codec_context.time_base = time_base
        if rotation:
            stream.set_display_rotation(rotation)
        for number, stamp in enumerate(stamps):
            bits = [255 * (number >> bit & 1) for bit in range(BITS)]
            row = np.repeat(np.array(bits, np.uint8), 16)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.broadcast_to(row[None, :, None], (64, 128, 3))))
            frame.pts, frame.time_base = stamp, time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def number_of(frame):
    if frame.shape[0] > frame.shape[1]:
        frame = np.rot90(frame, -1)
    return sum(int(frame[8:56, bit * 16 + 4 : bit * 16 + 12].mean() > 128) << bit for bit in range(BITS))


@pytest.fixture
def without_decord(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name == "decord":
            raise ImportError("No module named 'decord'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_decord_the_error_names_the_other_decoder(tmp_path, without_decord):
    path = write_video(tmp_path / "a.mp4", range(5), Fraction(1, 25))
    with pytest.raises(ValueError, match=r"choose 'pyav'.*pip install decord"):
        list(decord_backend.read_frames(path, [0.0]))


@pytest.mark.parametrize(("suffix", "rotation"), [("mp4", 0), ("mp4", 90), ("mkv", 0)])
def test_both_decoders_give_the_same_frames_of_a_constant_rate(tmp_path, suffix, rotation):
    pytest.importorskip("decord")
    path = write_video(tmp_path / f"a.{suffix}", range(60), Fraction(1, 25), rotation)
    for start, rate, count in ((0, 25, 60), (0, 24, 57), (0.7, 25, 42), (0, 60, 140), (1.1, 8, 9)):
        times = clip_times(start, rate, count)
        ours, theirs = list(video.read_frames(path, times)), list(decord_backend.read_frames(path, times))
        assert [number_of(frame) for frame in ours] == [int(25 * time + 1e-6) for time in times]
        assert [number_of(frame) for frame in theirs] == [number_of(frame) for frame in ours]
        # Grey pictures: what differs is rounding, not the chroma's filter.
        assert max(np.abs(a.astype(int) - b).max() for a, b in zip(ours, theirs, strict=True)) <= 3


def test_a_variable_rate_is_refused(tmp_path):
    pytest.importorskip("decord")
    path = write_video(tmp_path / "vfr.mkv", [0, 40, 47, 300, 301, 620, 900], Fraction(1, 1000))
    with pytest.raises(MediaError, match="use the decoder pyav") as caught:
        list(decord_backend.read_frames(path, [0.0]))
    assert caught.value.reason == "variable-rate"


def test_a_container_that_decord_misreads_is_refused(tmp_path):
    pytest.importorskip("decord")
    path = write_video(tmp_path / "a.ts", range(60), Fraction(1, 25))
    with pytest.raises(MediaError, match="use the decoder pyav"):
        list(decord_backend.read_frames(path, [0.0]))


def test_bad_files_and_late_times_are_media_errors(tmp_path):
    pytest.importorskip("decord")
    path = write_video(tmp_path / "a.mp4", range(60), Fraction(1, 25))
    for bad, reason in (("empty.mp4", "empty-file"), ("text.mp4", "not-a-video")):
        (tmp_path / bad).write_text("" if "empty" in bad else "no video" * 99)
        with pytest.raises(MediaError) as caught:
            list(decord_backend.read_frames(tmp_path / bad, [0.0]))
        assert caught.value.reason == reason
    with pytest.raises(MediaError) as caught:
        list(decord_backend.read_frames(path, [3.0]))
    assert caught.value.reason == "truncated"
    assert list(decord_backend.read_frames(path, [])) == []
