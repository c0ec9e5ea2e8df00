"""Videos as in collections, for both decoders: each gives the expected frames, or a MediaError with the reason."""

import sys
from fractions import Fraction

import numpy as np
import pytest

from schemas.clips import clip_times
from stages.media import decord_backend, video
from stages.media.video import probe_video, read_frames
from tests.stages import media_files
from tests.stages.media_files import number_of, numbered, reason

WIDTH, HEIGHT = 256, 64
FAST = {"preset": "ultrafast", "g": "10"}
X265 = ("libx265", "yuv420p", {"preset": "ultrafast", "x265-params": "log-level=none:keyint=10"})
H264 = ("libx264", "yuv420p", FAST)
PRORES = ("prores_ks", "yuv422p10le", {})


def numbers(path, times, backend=video):
    return [number_of(frame) for frame in backend.read_frames(path, times)]


def write(path, count=3, codec=H264, **options):
    return media_files.video(path, numbered(range(count)), codec, rate=25, **options)


def first_frame(path):
    return next(iter(read_frames(path, [0.0])))


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("open.mp4", "libx264", {"preset": "medium", "x264-params": "open-gop=1:keyint=10:bframes=3:scenecut=0"}),
        pytest.param(
            "open.mkv",
            "libx265",
            {"x265-params": "log-level=none:keyint=10:open-gop=1:bframes=3"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "closed.mp4",
            "libx265",
            {"x265-params": "log-level=none:keyint=10:open-gop=0:bframes=3"},
            marks=pytest.mark.long,
        ),
        ("refresh.mp4", "libx264", {"preset": "medium", "x264-params": "intra-refresh=1:keyint=10"}),
        pytest.param(
            "refresh.mkv",
            "libx264",
            {"preset": "medium", "x264-params": "intra-refresh=1:keyint=10:bframes=0"},
            marks=pytest.mark.long,
        ),
        pytest.param("b-frames.mp4", "mpeg4", {"g": "10", "bf": "2"}, marks=pytest.mark.long),
        pytest.param(
            "hidden.webm", "libvpx-vp9", {"g": "10", "auto-alt-ref": "1", "lag-in-frames": "16"}, marks=pytest.mark.long
        ),
    ],
)
def test_keyframes_of_every_kind_lead_both_decoders_to_the_same_frames(tmp_path, name, codec, options):
    pytest.importorskip("decord")
    path = write(tmp_path / name, 80, (codec, "yuv420p", options))
    draw = np.random.default_rng(0)
    for start, rate in zip(draw.integers(0, 55, 12).tolist(), draw.choice([25, 24, 12.5, 8, 5], 12), strict=True):
        times = [time for time in clip_times(start / 25, float(rate), 6) if time < 3.2]
        expected = [int(25 * time + 1e-6) for time in times]
        assert numbers(path, times) == expected
        assert numbers(path, times, decord_backend) == expected


def test_without_decord_the_error_names_the_other_decoder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(ValueError, match=r"choose 'pyav'.*pip install decord"):
        numbers(write(tmp_path / "a.mp4"), [0.0], decord_backend)


MIRROR = [-1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("a.ts", {}, "unreadable"),
        ("vfr.mkv", {"stamps": [0, 40, 47, 300, 301, 620, 900], "base": Fraction(1, 1000)}, "variable-rate"),
        ("mirrored.mp4", {"prepare": lambda stream: stream.set_display_matrix(MIRROR)}, "unreadable"),
        ("wide.mp4", {"prepare": media_files.colors(1, 9, 9)}, "unreadable"),
    ],
)
def test_what_decord_misreads_is_refused_with_the_other_decoder(tmp_path, name, options, expected):
    pytest.importorskip("decord")
    error = media_files.refusal(lambda path: numbers(path, [0.0], decord_backend), write(tmp_path / name, 7, **options))
    assert error.reason == expected and "use the decoder pyav" in error.advice


@pytest.mark.parametrize("backend", [video, decord_backend])
def test_files_that_are_no_videos_and_late_times_are_media_errors(tmp_path, backend):
    pytest.importorskip("decord")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("this is a text, whatever its name says\n" * 20)
    expected = {"empty.mp4": "empty-file", "text.mp4": "not-a-video", "absent.mp4": "missing"}
    for name, code in expected.items():
        assert reason(lambda path: numbers(path, [0.0], backend), tmp_path / name) == code
    path = write(tmp_path / "a.mp4", 60)
    assert reason(lambda path: numbers(path, [3.0], backend), path) == "truncated"
    assert numbers(path, [], backend) == []


MATRICES = {
    (1, 0, 0, 1): lambda p: p,
    (-1, 0, 0, 1): lambda p: p[:, ::-1],
    (-1, 0, 0, -1): lambda p: p[::-1, ::-1],
    (1, 0, 0, -1): lambda p: p[::-1],
    (0, 1, 1, 0): lambda p: p.swapaxes(0, 1),
    (0, 1, -1, 0): lambda p: np.rot90(p, -1),
    (0, -1, -1, 0): lambda p: p[::-1, ::-1].swapaxes(0, 1),
    (0, -1, 1, 0): lambda p: np.rot90(p),
}
# FFmpeg writes no mirroring to Matroska.
TURNS = [*((matrix, "mp4") for matrix in MATRICES), ((0, 1, -1, 0), "mkv")]


@pytest.mark.parametrize(("matrix", "suffix"), TURNS)
def test_turned_and_mirrored_videos_come_as_they_are_shown(tmp_path, matrix, suffix):
    """(a, b, c, d) takes a stored pixel (p, q) to (a p + c q, b p + d q)."""
    a, b, c, d = matrix
    plain = first_frame(media_files.video(tmp_path / f"plain.{suffix}", media_files.clip(2)))
    turn = media_files.matrix(*matrix)
    path = media_files.video(tmp_path / f"turned.{suffix}", media_files.clip(2), prepare=turn)
    info, first_picture = probe_video(path), first_frame(path)
    assert first_picture.shape == (info.height, info.width, 3)
    np.testing.assert_array_equal(first_picture, MATRICES[matrix](plain))
    assert info.mirrored == (a * d - b * c < 0)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("h264.mp4", ("libx264", "yuv420p", {"x264-params": "tff=1"})),
        ("dvd.mkv", ("mpeg2video", "yuv420p", {"flags": "+ildct+ilme"})),
        ("prores.mov", ("prores_ks", "yuv422p10le", {"flags": "+ildct"})),
    ],
)
def test_interlaced_videos_are_refused(tmp_path, name, codec):
    path = write(tmp_path / name, 6, codec)
    for action in (probe_video, first_frame):
        error = media_files.refusal(action, path)
        assert error.reason == "interlaced" and "bwdif" in error.advice


@pytest.mark.parametrize(
    ("name", "codec", "layout", "size"),
    [
        ("a.mp4", "libx264", "yuv444p", (127, 65)),
        ("a.webm", "libvpx-vp9", "yuv420p", (1, 1)),
        ("a.avi", "mpeg4", "yuv420p", (3, 2)),
    ],
)
def test_odd_sides(tmp_path, name, codec, layout, size):
    frame = np.full((size[1], size[0], 3), (200, 60, 90), np.uint8)
    path = media_files.video(tmp_path / name, [frame, frame], (codec, layout, {}), rate=25)
    info, picture = probe_video(path), first_frame(path)
    assert (info.width, info.height) == picture.shape[1::-1] == size
    assert np.abs(picture.reshape(-1, 3).mean(0) - (200, 60, 90)).max() < 6
