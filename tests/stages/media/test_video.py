"""Frames of videos by their times, whatever the container; damage is found and costs one item."""

import os
import random
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest

from schemas.clips import clip_times, frames_available
from stages.media.files import MediaError
from stages.media.video import probe_video, read_frames
from tests.forms import long
from tests.stages import media_files
from tests.stages.media_files import number_of, reason

WIDTH, HEIGHT = 256, 64


def numbers(path, times, **options):
    return [number_of(frame) for frame in read_frames(path, times, **options)]


def write_video(path, frames=50, rate=25, codec="libx264", container=None, stamps=None, prepare=None, **options):
    """Numbered frames above noise; `stamps` are in milliseconds if the rate varies."""
    draw = np.random.default_rng(0)
    options = {"g": "10", "preset": "ultrafast", **options} if codec == "libx264" else options

    def noisy():
        for frame in media_files.numbered(range(len(stamps or range(frames)))):
            frame[HEIGHT // 2 :] = draw.integers(0, 256, (HEIGHT // 2, WIDTH, 3))
            yield frame

    coding = codec, "yuv420p", options
    return media_files.video(path, noisy(), coding, rate=rate, stamps=stamps, prepare=prepare, **container or {})


KINDS = {
    "b-frames.mp4": {"preset": "veryfast", "bf": "3"},
    "plain.mp4": {"bf": "0"},
    "fast.mov": {"container": {"movflags": "faststart"}},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}, "preset": "veryfast"},
    "b-frames.mkv": {"preset": "veryfast", "bf": "3"},
    "vp9.webm": {"codec": "libvpx-vp9", "cpu-used": "8", "deadline": "realtime", "g": "10"},
    "mpeg4.avi": {"codec": "mpeg4", "g": "10"},
    "b-frames.avi": {"preset": "veryfast", "bf": "3"},
    "open-groups.mp4": {"preset": "veryfast", "x264-params": "open-gop=1:keyint=10:bframes=3:scenecut=0"},
    "open-groups.mkv": {"preset": "veryfast", "x264-params": "open-gop=1:keyint=10:bframes=3"},
    "refresh.mp4": {"preset": "veryfast", "x264-params": "intra-refresh=1:keyint=10"},
    "hevc.mp4": {"codec": "libx265", "preset": "ultrafast", "x265-params": "keyint=10:log-level=none"},
    "broadcast.ts": {"preset": "veryfast", "bf": "3"},
}
LIKE_OTHERS = ("plain.mp4", "b-frames.mp4", "fast.mov", "open-groups.mkv")


class Videos(dict):
    """Each is written when a test first asks for it."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, name):
        self[name] = write_video(self.folder / name, **KINDS[name])
        return self[name]


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return Videos(tmp_path_factory.mktemp("videos"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) if name in LIKE_OTHERS else name for name in KINDS])
def test_every_container_gives_its_facts_and_the_same_frames_from_wherever_it_is_read(videos, is_long, name):
    info, times = probe_video(videos[name]), clip_times(0, 25, 50)
    assert (info.width, info.height, info.rotation, info.frames) == (WIDTH, HEIGHT, 0, 50)
    assert info.rate == pytest.approx(25, abs=0.01) and info.duration == pytest.approx(2, abs=0.002)
    assert frames_available(info.duration, info.rate) == 50
    full = list(read_frames(videos[name], times))
    assert [number_of(frame) for frame in full] == list(range(50))
    for first in (1, 12, 19, 20, 21, 35, 49) if is_long else (20, 49):
        late_frames = list(read_frames(videos[name], times[first:]))
        assert all(np.array_equal(one, second) for one, second in zip(full[first:], late_frames, strict=True)), first


def test_no_times_give_no_frames_and_times_that_can_not_be_are_refused(videos):
    assert list(read_frames(videos["plain.mp4"], [])) == []
    for times in ([1.0, 0.5], [float("nan")]):
        with pytest.raises(ValueError, match="ascending"):
            list(read_frames(videos["plain.mp4"], times))
    assert numbers(videos["plain.mp4"], [1.97]) == [49], "the last frame lasts its duration"
    for time in (2.0, 2.01, 9.0):
        assert reason(lambda path, time=time: list(read_frames(path, [time])), videos["plain.mp4"]) == "truncated"


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_a_variable_rate_is_followed_by_time(tmp_path, suffix):
    stamps = [0, 40, 47, 300, 301, 620, 900, 1310, 1350, 2000]
    path = write_video(tmp_path / f"vfr.{suffix}", stamps=stamps)
    info = probe_video(path)
    assert info.frames == len(stamps) and 2.0 <= info.duration < 2.5
    for start in (0.0, 0.7, 1.4):
        times = [time for time in clip_times(0, 24, 48) if time >= start]
        expected = [max(i for i, stamp in enumerate(stamps) if stamp <= 1000 * t + 1) for t in times]
        assert numbers(path, times) == expected


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), 30])
def test_timestamps_rounded_to_milliseconds_lose_no_frame(tmp_path, rate):
    path = write_video(tmp_path / "rounded.mkv", frames=60, rate=rate)
    count = frames_available(probe_video(path).duration, float(rate))
    assert numbers(path, clip_times(0, float(rate), count)) == list(range(60))


@pytest.mark.parametrize(
    ("tag", "size", "red", "blue", "full"),
    [
        (1, (64, 64), 0.2126, 0.0722, False),
        (5, (64, 64), 0.299, 0.114, True),
        (9, (64, 64), 0.2627, 0.0593, False),
        (2, (64, 64), 0.299, 0.114, False),
        (2, (64, 720), 0.2126, 0.0722, True),
        (2, (1280, 64), 0.2126, 0.0722, False),
    ],
)
def test_colours_follow_the_streams_matrix_and_range(tmp_path, tag, size, red, blue, full):
    """Against the definition: R = Y + 2 (1 - Kr) V, B = Y + 2 (1 - Kb) U, G from Y = Kr R + Kg G + Kb B."""
    y, u, v = 100, 150, 110
    frame = av.VideoFrame(*size, "yuv420p")
    for plane, value in zip(frame.planes, (y, u, v), strict=True):
        plane.update(bytes([value]) * plane.buffer_size)
    frame.colorspace, frame.color_range = tag, 2 if full else 1
    coding = "libx264", "yuv420p", {"qp": "0", "preset": "ultrafast"}
    path = media_files.video(
        tmp_path / "colour.mp4", [frame], coding, prepare=media_files.colors(2, 2, tag, 2 if full else 1)
    )
    light, chroma = (y / 255, 255) if full else ((y - 16) / 219, 224)
    r = light + 2 * (1 - red) * (v - 128) / chroma
    b = light + 2 * (1 - blue) * (u - 128) / chroma
    g = (light - red * r - blue * b) / (1 - red - blue)
    (picture,) = read_frames(path, [0.0])
    assert np.abs(picture.reshape(-1, 3) - np.array([r, g, b]) * 255).max() <= 1.0


@pytest.mark.parametrize("name", ["fast.mov", "fragments.mp4", "b-frames.mkv", long("vp9.webm"), "mpeg4.avi"])
def test_a_truncated_video_is_found_by_probing_and_by_reading(videos, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(videos[name].read_bytes()[: videos[name].stat().st_size // 2])
    assert reason(probe_video, path) == "truncated"
    delivered = []

    def read(path):
        for frame in read_frames(path, clip_times(0, 25, 50)):
            delivered.append(number_of(frame))

    assert reason(read, path) == "truncated"
    assert delivered == list(range(len(delivered))) and len(delivered) < 30


@pytest.mark.slow
def test_damage_gives_frames_or_a_media_error_and_nothing_else(videos, tmp_path):
    draw = random.Random(1)
    for name in ("b-frames.mp4", "b-frames.mkv", "broadcast.ts"):
        content, path, refused = videos[name].read_bytes(), tmp_path / name, 0
        for _ in range(4):
            damaged = bytearray(content)
            for _ in range(20):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            path.write_bytes(damaged)
            try:
                probe_video(path)
                list(read_frames(path, clip_times(0.2, 25, 40)))
            except MediaError:
                refused += 1
        assert refused > 0, name


def test_memory_does_not_grow_with_the_clip_and_files_are_closed(videos):
    before = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    tracemalloc.start()
    for frame in read_frames(videos["plain.mp4"], clip_times(0, 25, 50)):
        assert frame.nbytes == WIDTH * HEIGHT * 3
    assert tracemalloc.get_traced_memory()[1] < 8 * WIDTH * HEIGHT * 3
    tracemalloc.stop()
    unfinished = read_frames(videos["plain.mp4"], clip_times(0, 25, 50))
    next(unfinished)
    unfinished.close()
    assert before == 0 or len(os.listdir("/dev/fd")) == before


def test_frames_of_enormous_size_are_refused_before_one_is_decoded(videos, monkeypatch):
    monkeypatch.setattr("stages.media.video.MAX_PIXELS", 100)
    monkeypatch.setattr("stages.media.video.decode_packets", lambda *_: pytest.fail("decoded"))
    for action in (probe_video, lambda path: list(read_frames(path, [0.0]))):
        assert reason(action, videos["plain.mp4"]) == "too-large"
