"""Shown frames are counted, for any count in the header: in files trimmed without reencoding, and in other files."""

from fractions import Fraction

import av
import numpy as np
import pytest

from schemas.clips import clip_times, frames_available
from stages.media import decord_backend, video
from stages.media.video import probe_video
from tests.forms import long
from tests.stages import media_files
from tests.stages.media_files import number_of, numbered, reason

RATE, COUNT = 25, 100
PLAIN = ("libx264", "yuv420p", {"preset": "ultrafast", "bf": "0", "g": "20"})
B_FRAMES = ("libx264", "yuv420p", {"preset": "medium", "bf": "3", "g": "20"})
OPEN = (
    "libx265",
    "yuv420p",
    {"preset": "medium", "x265-params": "keyint=20:bframes=3:open-gop=1:scenecut=0:log-level=none"},
)


def coded(path, codec=B_FRAMES, *, sound=0.0, rate=RATE, **timing):
    """A hundred numbered frames. sound: seconds of it, in a file with the same pictures."""
    if not sound:
        return media_files.video(path, numbered(range(COUNT)), codec, rate=rate, **timing)
    silent = coded(path.with_name("silent.mp4"), codec, rate=rate, **timing)
    with av.open(str(silent)) as source, av.open(str(path), "w") as output:
        pictures = output.add_stream_from_template(source.streams.video[0])
        audio = output.add_stream("aac", rate=16000)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = pictures
                output.mux(packet)
        for number in range(int(sound * 16000 / 1024)):
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            noise.sample_rate, noise.pts = 16000, number * 1024
            output.mux(audio.encode(noise))
        output.mux(audio.encode(None))
    return path


def trimmed(source, path, at, **options):
    """What `ffmpeg -ss AT -i SOURCE -c copy PATH` writes: packets from the keyframe at or before that moment on, with
    the moment as zero; sound from the moment on."""
    with av.open(str(source)) as original, av.open(str(path), "w", options=options) as output:
        copies = {stream.index: output.add_stream_from_template(stream) for stream in original.streams}
        pictures, has_begun = original.streams.video[0], False
        original.seek(round(at / pictures.time_base), stream=pictures, backward=True)
        for packet in original.demux():
            has_begun = has_begun or (packet.stream is pictures and packet.is_keyframe)
            offset = round(at / packet.time_base)
            if not packet.size or (packet.stream is pictures and not has_begun):
                continue
            if packet.stream is not pictures and packet.pts < offset:
                continue
            packet.pts = packet.pts - offset
            packet.dts = packet.pts if packet.dts is None else packet.dts - offset
            packet.stream = copies[packet.stream.index]
            output.mux(packet)
    return path


def shown(path):
    """Numbers of the frames that FFmpeg shows, and whether the file begins with packets that are not shown."""
    with av.open(str(path)) as opened:
        hidden = next(opened.demux(video=0)).is_discard
    with av.open(str(path)) as opened:
        return [number_of(frame.to_ndarray(format="rgb24")) for frame in opened.decode(video=0)], hidden


def read(path, times, backend):
    return [number_of(frame) for frame in backend.read_frames(path, times)]


def require_used(path, expected, backends=(video, decord_backend)):
    """Every frame that is shown can be planned and read, from the beginning and from later on, and none more."""
    info = probe_video(path)
    assert (info.frames, info.rate) == (len(expected), pytest.approx(RATE, abs=0.01))
    assert info.duration == pytest.approx(len(expected) / RATE, abs=0.0015)
    available = frames_available(info.duration, RATE)
    assert available == len(expected)
    times = clip_times(0, RATE, available)
    for backend in backends:
        if backend is decord_backend:
            pytest.importorskip("decord")
        for first in (0, 1, available // 2, available - 1):
            assert read(path, times[first:], backend) == expected[first:]
        assert reason(lambda path, backend=backend: read(path, [available / RATE], backend), path) == "truncated"


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wholes")
    codecs = {"plain": PLAIN, "b-frames": B_FRAMES, "open": OPEN}
    return {name: coded(folder / f"{name}.mp4", codec) for name, codec in codecs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "suffix", "codec"),
    [
        (1.09, "mp4", "plain"),
        (0.04, "mov", "b-frames"),
        long(0.81, "mp4", "b-frames"),
        long(0.801, "mov", "plain"),
        (3.95, "mp4", "b-frames"),
    ],
)
def test_a_file_trimmed_without_reencoding_gives_the_clip_that_is_shown(tmp_path, wholes, suffix, at, codec):
    path = trimmed(wholes[codec], tmp_path / f"cut.{suffix}", at)
    frames, hidden = shown(path)
    assert frames == list(range(-int(-at * RATE // 1), COUNT)) and hidden  # from the first frame at or after the moment
    require_used(path, frames)


def test_where_nothing_is_shown_it_says_so(tmp_path, wholes):
    path = trimmed(wholes["b-frames"], tmp_path / "cut.mp4", 3.99)
    assert shown(path) == ([], True)
    assert reason(probe_video, path) == "zero-frames"


@pytest.mark.parametrize("suffix", ["mkv", "ts"])
def test_where_there_are_no_edit_lists_it_begins_at_the_keyframe(tmp_path, wholes, suffix):
    path = trimmed(wholes["b-frames"], tmp_path / f"cut.{suffix}", 1.09)
    frames, hidden = shown(path)
    assert frames == list(range(frames[0], COUNT)) and 0 < frames[0] < 28 and not hidden
    require_used(path, frames, (video,) if suffix == "ts" else (video, decord_backend))


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_that_refer_to_what_was_cut_off_are_not_counted(tmp_path, wholes, suffix):
    """HEVC with open groups of pictures, cut at a keyframe: some frames behind it are shown before it."""
    path = trimmed(wholes["open"], tmp_path / f"cut.{suffix}", 0.8)
    frames = shown(path)[0]
    assert frames[0] == 20 and frames[-1] == COUNT - 1
    require_used(path, frames, (video,))


@pytest.mark.parametrize("options", [{"movflags": "frag_keyframe+empty_moov"}, {"movflags": "faststart"}])
def test_fragments_and_an_index_in_front(tmp_path, wholes, options):
    path = trimmed(wholes["b-frames"], tmp_path / "cut.mp4", 1.09, **options)
    require_used(path, shown(path)[0], (video,))


@pytest.mark.parametrize("suffix", ["mp4", long("mov"), "mkv"])
def test_pictures_that_begin_after_the_sound(tmp_path, suffix):
    path = coded(tmp_path / f"late.{suffix}", stamps=range(40, 40 + COUNT), base=Fraction(1, RATE), sound=5.0)
    require_used(path, list(range(COUNT)))


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
def test_a_cut_file_that_is_really_truncated_is_rejected(tmp_path, wholes, suffix):
    path = trimmed(wholes["b-frames"], tmp_path / f"cut.{suffix}", 1.09, movflags="faststart")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])
    for action in (probe_video, lambda path: read(path, clip_times(0, RATE, 70), video)):
        assert reason(action, path) == "truncated"


@pytest.mark.parametrize(
    ("suffix", "rate"), [("mp4", Fraction(24000, 1001)), ("mkv", Fraction(30000, 1001)), ("avi", 24), ("ts", 60)]
)
def test_a_constant_rate_is_known_as_such_and_exactly(tmp_path, suffix, rate):
    info = probe_video(coded(tmp_path / f"a.{suffix}", PLAIN, rate=rate))
    assert info.constant_rate and info.rate == pytest.approx(float(rate), rel=1e-9 if suffix != "ts" else 1e-4)


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize("change", ["jitter", "gap", "slower"])
def test_a_rate_that_varies_is_known_as_such(tmp_path, suffix, change):
    """All of an average within half a percent of 25."""
    stamps = {
        "jitter": [40 * n + 7 * (n % 3 == 1) for n in range(COUNT)],
        "gap": [40 * n + 20 * (n > 50) for n in range(COUNT)],
        "slower": [40 * n + max(0, n - 50) // 3 for n in range(COUNT)],
    }[change]
    path = coded(tmp_path / f"a.{suffix}", PLAIN, stamps=stamps, base=Fraction(1, 1000))
    info = probe_video(path)
    assert not info.constant_rate and info.rate == pytest.approx(RATE, rel=0.01)


def test_a_last_frame_that_lasts_longer_does_not_change_the_rate(tmp_path):
    """Such as of a file cut behind by its duration: the header's average is then lower than the frames' rate."""
    source, path = coded(tmp_path / "a.mp4", PLAIN), tmp_path / "b.mp4"
    with av.open(str(source)) as original, av.open(str(path), "w") as output:
        copy = output.add_stream_from_template(original.streams.video[0])
        for packet in original.demux(video=0):
            if packet.dts is not None:
                packet.duration = packet.duration * (20 if packet.pts == (COUNT - 1) * packet.duration else 1)
                packet.stream = copy
                output.mux(packet)
    with av.open(str(path)) as opened:
        assert opened.streams.video[0].average_rate < 22
    info = probe_video(path)
    assert info.constant_rate and (info.frames, info.rate) == (COUNT, 25.0)
