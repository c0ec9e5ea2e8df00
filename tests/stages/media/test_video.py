import os
import random
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from schemas.clips import clip_times, frames_available
from schemas.geometry import Bucket, cover_crop
from stages.media.errors import MediaError
from stages.media.sample_reader import resize_and_crop
from stages.media.video import probe_video, read_frames
from tests.stages.media_files import reason

WIDTH, HEIGHT, BITS = 128, 64, 8


def numbered(number, draw):
    """A frame that carries its number as eight black and white blocks, and noise below them."""
    pixels = draw.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    for bit in range(BITS):
        pixels[: HEIGHT // 2, bit * 16 : (bit + 1) * 16] = 255 * (number >> bit & 1)
    return pixels


def number_of(frame):
    return sum(int(frame[4:28, bit * 16 + 4 : bit * 16 + 12].mean() > 128) << bit for bit in range(BITS))


def numbers(path, times, **options):
    return [number_of(frame) for frame in read_frames(path, times, **options)]


def write_video(path, frames=50, rate=25, stamps=None, codec="libx264", prepare=None, container=None, **options):
    """Numbered frames; `stamps` are in milliseconds where the rate varies. `prepare` is given the stream."""
    time_base = Fraction(1, 1000) if stamps else 1 / Fraction(rate)
    draw = np.random.default_rng(0)
    with av.open(str(path), "w", options=container or {}) as output:
        options = {"g": "10", "preset": "ultrafast", **options} if codec == "libx264" else options
        stream = output.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        if stamps:
            stream.codec_context.time_base = time_base
        if prepare:
            prepare(stream)
        for number, stamp in enumerate(stamps or range(frames)):
            frame = av.VideoFrame.from_ndarray(numbered(number, draw))
            frame.pts, frame.time_base = stamp, time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


KINDS = {
    "b-frames.mp4": {"preset": "medium", "bf": "3"},
    "plain.mp4": {"bf": "0"},
    "fast.mov": {"container": {"movflags": "faststart"}},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}, "preset": "medium"},
    "b-frames.mkv": {"preset": "medium", "bf": "3"},
    "vp9.webm": {"codec": "libvpx-vp9", "cpu-used": "8", "deadline": "realtime", "g": "10"},
    "mpeg4.avi": {"codec": "mpeg4", "g": "10"},
    "b-frames.avi": {"preset": "medium", "bf": "3"},
    "open-groups.mp4": {"preset": "medium", "x264-params": "open-gop=1:keyint=10:bframes=3:scenecut=0"},
    "open-groups.mkv": {"preset": "medium", "x264-params": "open-gop=1:keyint=10:bframes=3"},
    "refresh.mp4": {"preset": "medium", "x264-params": "intra-refresh=1:keyint=10"},
    "hevc.mp4": {"codec": "libx265", "preset": "ultrafast", "x265-params": "keyint=10:log-level=none"},
    "broadcast.ts": {"preset": "medium", "bf": "3"},
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    return {name: write_video(folder / name, **options) for name, options in KINDS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_container_gives_its_facts_and_its_own_frames(videos, name):
    info = probe_video(videos[name])
    assert (info.width, info.height, info.rotation, info.frames) == (WIDTH, HEIGHT, 0, 50)
    assert info.rate == pytest.approx(25, abs=0.01) and info.duration == pytest.approx(2, abs=0.002)
    assert frames_available(info.duration, info.rate) == 50
    assert numbers(videos[name], clip_times(0, info.rate, 50)) == list(range(50))


@pytest.mark.parametrize("name", KINDS)
def test_starting_late_gives_the_same_frames_as_starting_early(videos, name):
    times = clip_times(0, 25, 50)
    whole = list(read_frames(videos[name], times))
    for first in (1, 12, 19, 20, 21, 35, 49):
        late = list(read_frames(videos[name], times[first:]))
        assert [number_of(frame) for frame in late] == list(range(first, 50)), first
        assert all(np.array_equal(one, other) for one, other in zip(whole[first:], late, strict=True)), first


def test_the_frame_at_or_before_each_time_at_another_rate(videos):
    for rate in (8, 10, 16, 24, 30, 60):
        count = frames_available(2.0, rate)
        expected = [int(25 * index / rate + 1e-6) for index in range(count)]
        assert numbers(videos["b-frames.mp4"], clip_times(0, rate, count)) == expected


def test_a_time_before_the_first_frame_gives_the_first(videos):
    assert numbers(videos["plain.mp4"], [-1.0, 0.0]) == [0, 0]


def test_no_times_give_no_frames_and_descending_times_are_refused(videos):
    assert list(read_frames(videos["plain.mp4"], [])) == []
    for times in ([1.0, 0.5], [float("nan")]):
        with pytest.raises(ValueError, match="ascending"):
            list(read_frames(videos["plain.mp4"], times))


def test_threads_change_nothing(videos):
    times = clip_times(0, 25, 50)
    one = list(read_frames(videos["b-frames.mp4"], times))
    two = list(read_frames(videos["b-frames.mp4"], times, threads=2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


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


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), Fraction(24000, 1001), 30])
def test_timestamps_rounded_to_milliseconds_lose_no_frame(tmp_path, rate):
    path = write_video(tmp_path / "rounded.mkv", frames=60, rate=rate)
    count = frames_available(probe_video(path).duration, float(rate))
    assert numbers(path, clip_times(0, float(rate), count)) == list(range(60))


def test_times_count_from_the_first_presented_frame(tmp_path):
    for suffix in ("mkv", "mp4", "ts"):
        path = write_video(tmp_path / f"late.{suffix}", stamps=[3000 + 40 * index for index in range(30)])
        assert probe_video(path).duration == pytest.approx(1.2, abs=0.05)
        assert numbers(path, clip_times(0, 25, 30)) == list(range(30))
        assert numbers(path, clip_times(0.8, 25, 10)) == list(range(20, 30))


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_rotation_is_applied(tmp_path, degrees):
    upright = write_video(tmp_path / "upright.mp4", frames=3)
    path = write_video(tmp_path / "turned.mp4", frames=3, prepare=lambda s: s.set_display_rotation(degrees))
    info = probe_video(path)
    assert info.rotation == degrees % 360
    assert (info.width, info.height) == ((WIDTH, HEIGHT) if degrees in (0, 180) else (HEIGHT, WIDTH))
    for stored, turned in zip(read_frames(upright, [0, 0.04]), read_frames(path, [0, 0.04]), strict=True):
        assert turned.shape == (info.height, info.width, 3)
        np.testing.assert_array_equal(turned, np.rot90(stored, degrees // 90))


def test_an_odd_rotation_is_refused(tmp_path):
    path = write_video(tmp_path / "tilted.mp4", frames=3, prepare=lambda s: s.set_display_rotation(30))
    assert reason(probe_video, path) == "odd-rotation"


def test_pixels_that_are_not_square_get_their_shape_in_the_resize(tmp_path):
    def anamorphic(stream):
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)

    path = write_video(tmp_path / "wide.mp4", frames=3, prepare=anamorphic)
    info = probe_video(path)
    assert (info.width, info.height) == (2 * WIDTH, HEIGHT)
    (frame,) = read_frames(path, [0.0])
    assert frame.shape == (HEIGHT, WIDTH, 3)
    bucket = Bucket(2 * WIDTH, HEIGHT)
    fitted = resize_and_crop(Image.fromarray(frame), cover_crop(info.width, info.height, *bucket_size(bucket)), bucket)
    assert fitted.shape == (HEIGHT, 2 * WIDTH, 3)


def bucket_size(bucket):
    return bucket.width, bucket.height


@pytest.mark.parametrize(
    ("tag", "size", "red", "blue"),
    [
        (1, (64, 64), 0.2126, 0.0722),
        (5, (64, 64), 0.299, 0.114),
        (9, (64, 64), 0.2627, 0.0593),
        (2, (64, 64), 0.299, 0.114),
        (2, (64, 720), 0.2126, 0.0722),
        (2, (1280, 64), 0.2126, 0.0722),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_colours_follow_the_streams_matrix_and_range(tmp_path, tag, size, red, blue, full):
    """Against the definition: R = Y + 2 (1 - Kr) V, B = Y + 2 (1 - Kb) U, G from Y = Kr R + Kg G + Kb B."""
    y, u, v = 100, 150, 110
    path = tmp_path / "colour.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25, options={"qp": "0", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = tag, 2 if full else 1
        frame = av.VideoFrame(*size, "yuv420p")
        for plane, value in zip(frame.planes, (y, u, v), strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        frame.colorspace, frame.color_range = tag, 2 if full else 1
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    light, chroma = (y / 255, 255) if full else ((y - 16) / 219, 224)
    r = light + 2 * (1 - red) * (v - 128) / chroma
    b = light + 2 * (1 - blue) * (u - 128) / chroma
    g = (light - red * r - blue * b) / (1 - red - blue)
    (picture,) = read_frames(path, [0.0])
    assert np.abs(picture.reshape(-1, 3) - np.array([r, g, b]) * 255).max() <= 1.0


def test_files_that_are_no_videos(tmp_path, videos):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("this is a text, whatever its name says\n" * 20)
    header_lost = tmp_path / "no moov.mp4"
    header_lost.write_bytes(videos["plain.mp4"].read_bytes()[:5000])
    for action in (probe_video, lambda path: list(read_frames(path, [0.0]))):
        assert reason(action, tmp_path / "empty.mp4") == "empty-file"
        assert reason(action, tmp_path / "text.mp4") == "not-a-video"
        assert reason(action, header_lost) == "not-a-video"
        assert reason(action, tmp_path / "absent.mp4") == "missing"


def test_a_file_with_sound_alone(tmp_path):
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        output.mux(stream.encode(sound))
        output.mux(stream.encode(None))
    assert reason(probe_video, path) == "no-video-stream"


def test_a_video_without_a_frame(tmp_path):
    path = tmp_path / "nothing.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        output.start_encoding()
    assert reason(probe_video, path) in ("zero-frames", "not-a-video", "unreadable")


@pytest.mark.parametrize("name", ["fast.mov", "fragments.mp4", "b-frames.mkv", "vp9.webm", "mpeg4.avi"])
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


def test_a_time_past_the_end_is_an_error_and_the_last_frame_lasts_its_duration(videos):
    assert numbers(videos["plain.mp4"], [1.97]) == [49]
    for time in (2.0, 2.01, 9.0):
        assert reason(lambda path, time=time: list(read_frames(path, [time])), videos["plain.mp4"]) == "truncated"


@pytest.mark.slow
def test_damage_gives_frames_or_a_media_error_and_nothing_else(videos, tmp_path):
    draw = random.Random(1)
    for name in ("b-frames.mp4", "b-frames.mkv", "vp9.webm", "broadcast.ts"):
        whole, path, refused = videos[name].read_bytes(), tmp_path / name, 0
        for _ in range(12):
            damaged = bytearray(whole)
            for _ in range(20):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            path.write_bytes(damaged)
            try:
                probe_video(path)
                list(read_frames(path, clip_times(0.2, 25, 40)))
            except MediaError:
                refused += 1
        assert refused > 0


@pytest.mark.parametrize("name", ["-dash.mp4", "a:b.mp4", "100%d.mp4", "sp ace\n'ü\".mp4", "http:x.mp4"])
def test_names_are_names(videos, tmp_path, name, monkeypatch):
    (tmp_path / name).write_bytes(videos["plain.mp4"].read_bytes())
    monkeypatch.chdir(tmp_path)
    assert probe_video(name).frames == 50
    assert numbers(name, [0.2]) == [5]


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
