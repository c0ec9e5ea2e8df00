"""Frames with transparency, with samples of more than 8 bits, of another size than in the header, and of one of several
tracks: each is read as players show it, or gives a MediaError with the reason."""

from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from schemas.geometry import Bucket
from stages.discovery.item_reader import probe_media
from stages.media import decord_backend, video
from stages.media.files import MediaError
from stages.media.sample_reader import read_sample_mask
from stages.media.video import probe_video, read_frames
from tests.forms import in_turn, long
from tests.stages import media_files
from tests.stages.media.test_image_samples import rounded
from tests.stages.media.test_sample_reader import geometry
from tests.stages.media.test_video_formats import FAST, first_frame, numbers
from tests.stages.media_files import RED, number_of, numbered, refusal

RATE = 25
VP9, H264 = ("libvpx-vp9", "yuv420p", {"cpu-used": "8", "deadline": "realtime"}), ("libx264", "yuv420p", FAST)


# -- transparency ----------------------------------------------------------------------------------------------------


def see_through(path, codec, *, frames=30, hidden=0):
    """Red on the left; on the right, all channels including alpha are `hidden`."""
    pixels = np.full((64, 96, 4), (*RED, 255), np.uint8)
    pixels[:, 48:] = hidden
    return media_files.video(
        path,
        (av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=codec[1]) for _ in range(frames)),
        codec,
        rate=RATE,
    )


TRANSPARENT = {
    "vp8.webm": ("libvpx", "yuva420p", {"auto-alt-ref": "0", "b": "2M"}),
    "vp9.webm": ("libvpx-vp9", "yuva420p", {"cpu-used": "8", "deadline": "realtime"}),
    "prores.mov": ("prores_ks", "yuva444p10le", {"profile": "4444"}),
    "animation.mov": ("qtrle", "argb", {}),
    "ffv1.mkv": ("ffv1", "yuva420p", {}),
    "deep.mkv": ("ffv1", "rgba64le", {}),
    "gray.mkv": ("ffv1", "ya8", {}),
    "png.avi": ("png", "rgba", {}),
    "raw.avi": ("rawvideo", "bgra", {}),
}
LIKE_OTHERS = ("vp9.webm", "ffv1.mkv", "animation.mov")  # in their decoder, or in their layout of pixels


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) if name in LIKE_OTHERS else name for name in TRANSPARENT])
def test_transparent_parts_of_a_video_are_white_and_in_a_mask_black(tmp_path, name):
    path = see_through(tmp_path / name, TRANSPARENT[name])
    assert probe_video(path).frames == 30
    gray = round(0.299 * RED[0] + 0.587 * RED[1] + 0.114 * RED[2])
    for frame in read_frames(path, [0.0, 0.04, 0.8]):  # the last one is found by a seek
        assert np.abs(frame[8:56, 8:40].astype(int) - (gray if name == "gray.mkv" else RED)).max() < 12
        assert frame[8:56, 56:].min() >= 254
    (frame,) = read_frames(path, [1.16])
    assert frame[8:56, 56:].min() >= 254
    mask = read_sample_mask(path, "video", geometry(Bucket(96, 64, 2), 96, 64), [0.0, 0.04])
    assert mask[:, 8:56, 8:40].min() > 50 and mask[:, 8:56, 56:].max() <= 1
    pytest.importorskip("decord")
    error = refusal(lambda p: numbers(p, [0.0], decord_backend), path)
    assert error.reason in ("unreadable", "variable-rate") and "use the decoder pyav" in error.advice


def test_transparency_that_no_decoder_gives_is_refused_by_name(tmp_path, monkeypatch):
    path = see_through(tmp_path / "a.webm", TRANSPARENT["vp9.webm"], frames=3)
    monkeypatch.setattr("av.codecs_available", {"vp9"})
    for action in (probe_video, first_frame):
        error = refusal(action, path)
        assert error.reason == "unsupported-alpha" and "vp9" in error.problem and "ProRes 4444" in error.advice


def test_an_uncompressed_avi_whose_fourth_bytes_are_all_zero_is_opaque(tmp_path):
    pixels = np.full((64, 96, 4), (*RED, 0), np.uint8)
    frames = (av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format="bgra") for _ in range(3))
    path = media_files.video(tmp_path / "a.avi", frames, ("rawvideo", "bgra", {}), rate=RATE)
    assert (first_frame(path) == RED).all()


@pytest.mark.parametrize("suffix", ["webp", "png", "gif"])
def test_transparent_parts_of_an_animated_mask_are_black(tmp_path, suffix):
    clear = Image.new("RGBA", (16, 8), (255, 255, 255, 0))
    clear.paste((255, 255, 255, 255), (0, 0, 4, 8))
    options = {"lossless": True} if suffix == "webp" else {}
    path = tmp_path / f"mask.{suffix}"
    later = clear.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    clear.save(path, save_all=True, append_images=[later], duration=100, disposal=2, **options)
    mask = read_sample_mask(path, "video", geometry(Bucket(16, 8, 2), 16, 8), [0.0, 0.1])
    assert [(frame > 127).sum() for frame in mask] == [32, 32] and mask[1, 0, -1] == 255


# -- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "bits"),
    [("png", "rgb48be", 16), ("ffv1", "gbrp16le", 16), ("ffv1", "gbrp10le", 10), ("ffv1", "gray16le", 16)],
)
def test_rgb_and_gray_of_more_than_8_bits_are_rounded(tmp_path, name, layout, bits):
    samples = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1).repeat(3, 2)
    deep = av.VideoFrame.from_ndarray(samples, format="rgb48le")
    gray = layout.startswith("gray")
    deep = av.VideoFrame.from_ndarray(samples[..., 0], format=layout) if gray else deep.reformat(format=layout)
    path = media_files.video(tmp_path / f"a.{'mov' if name == 'png' else 'mkv'}", [deep, deep], (name, layout, {}))
    expected = rounded(samples if bits == 16 else samples >> (16 - bits), bits)
    difference = first_frame(path).astype(int) - expected
    assert np.abs(difference).max() <= (bits < 16) and abs(difference.mean()) < 0.01


def test_floating_point_is_refused(tmp_path):
    frames = [av.VideoFrame(64, 64, "gbrpf32le")] * 2
    path = media_files.video(tmp_path / "a.mkv", frames, ("ffv1", "gbrpf32le", {"strict": "-2", "level": "4"}))
    for action in (probe_video, first_frame):
        assert refusal(action, path).reason == "unsupported-samples"


def test_the_profile_of_a_frame_is_converted(tmp_path):
    """MJPEG, whose frames are files: one with red and blue exchanged by its profile."""
    path = media_files.video(tmp_path / "a.mov", media_files.clip(2), ("mjpeg", "yuvj444p", {"qmin": "1", "qmax": "1"}))
    plain = first_frame(path)
    profile = media_files.swapped_profile()
    with_profile(path, tmp_path / "b.mov", profile)
    swapped = first_frame(tmp_path / "b.mov").astype(int)
    assert np.abs(swapped[..., ::-1] - plain).mean() < 6 < np.abs(swapped - plain).mean()
    with_profile(path, tmp_path / "c.mov", ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    np.testing.assert_array_equal(first_frame(tmp_path / "c.mov"), plain)
    pytest.importorskip("decord")
    assert "ICC profile" in refusal(lambda p: numbers(p, [0.0], decord_backend), tmp_path / "b.mov").problem


def with_profile(source, target, profile):
    segment = b"ICC_PROFILE\0\1\1" + profile
    marker = b"\xff\xe2" + (len(segment) + 2).to_bytes(2, "big") + segment
    with av.open(str(source)) as opened, av.open(str(target), "w") as output:
        copy = output.add_stream_from_template(opened.streams.video[0])
        for packet in opened.demux(video=0):
            if packet.size:
                changed = av.Packet(bytes(packet)[:2] + marker + bytes(packet)[2:])
                changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
                changed.is_keyframe, changed.stream, changed.duration = True, copy, packet.duration
                output.mux(changed)


# -- sizes -----------------------------------------------------------------------------------------------------------


def joined(path, name, sizes, frames=20, options=None):
    """Recordings of several sizes as one stream; frames are numbered throughout."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream(name, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *sizes[0], "yuv420p"
        stream.options, stream.time_base = options or {}, Fraction(1, RATE)
        output.start_encoding()
        for part, (width, height) in enumerate(sizes):
            encoder = av.CodecContext.create(name, "w")
            encoder.width, encoder.height, encoder.pix_fmt, encoder.options = width, height, "yuv420p", options or {}
            encoder.time_base, encoder.framerate = Fraction(1, RATE), Fraction(RATE)
            packets = []
            for index in range(frames):
                (pixels,) = numbered([part * frames + index], height)
                frame = av.VideoFrame.from_ndarray(pixels).reformat(width=width, format="yuv420p")
                frame.pts, frame.time_base = index, Fraction(1, RATE)
                packets += encoder.encode(frame)
            for packet in packets + encoder.encode(None):
                moved = av.Packet(bytes(packet))
                moved.pts = packet.pts + part * frames
                moved.dts = (packet.pts if packet.dts is None else packet.dts) + part * frames
                moved.time_base, moved.is_keyframe, moved.duration = Fraction(1, RATE), packet.is_keyframe, 1
                moved.stream = stream
                output.mux(moved)
    return path


X264 = {"preset": "ultrafast", "bf": "0", "x264-params": "repeat-headers=1"}
JOINED = {
    "turned.webm": ("libvpx-vp9", [(256, 64), (64, 256)], {"cpu-used": "8", "deadline": "realtime"}),
    "turned.mp4": ("libx264", [(256, 64), (64, 256)], X264),
    "wider.mkv": ("libx264", [(256, 64), (320, 64)], X264),
    "turned.avi": ("mjpeg", [(256, 64), (64, 256)], {"strict": "-1"}),
}


@pytest.mark.parametrize(("name", "backend"), in_turn(JOINED, [video, decord_backend]))
def test_a_frame_of_another_size_is_refused_with_its_number(tmp_path, name, backend):
    pytest.importorskip("decord")
    codec, sizes, options = JOINED[name]
    path = joined(tmp_path / name, codec, sizes, options=options)
    assert (probe_video(path).width, probe_video(path).height) == sizes[0]
    if backend is video:  # frames before the change are read
        assert numbers(path, [0.0, 0.4, 0.76], backend) == [0, 10, 19]
    for times in ([0.0, 0.8], [1.0]):
        error = refusal(lambda p, times=times: numbers(p, times, backend), path)
        expected = 20 if backend is decord_backend else round(times[-1] * RATE)
        assert error.reason == "variable-size"
        assert "{}x{} pixels in frame {}".format(*sizes[1], expected) in error.problem


def test_an_animation_whose_frames_leave_its_canvas_is_refused(tmp_path):
    first, second = (Image.new("P", size, index) for index, size in enumerate([(32, 16), (32, 16)]))
    first.putpalette([0, 0, 0, 255, 255, 255])
    second.putpalette([0, 0, 0, 255, 255, 255])
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second], duration=100)
    content = bytearray((tmp_path / "a.gif").read_bytes())
    place = content.rindex(b"\x2c")
    content[place + 1 : place + 5] = (16).to_bytes(2, "little") + (0).to_bytes(2, "little")  # 16 pixels to the right
    (tmp_path / "a.gif").write_bytes(content)
    probed = probe_media(tmp_path / "a.gif", "image", animations="video")
    assert (probed["kind"], probed["width"], probed["height"]) == ("video", 32, 16)
    mask = geometry(Bucket(32, 16, 2), 32, 16)
    with pytest.raises(MediaError, match="48x16 pixels in frame 1"):
        read_sample_mask(tmp_path / "a.gif", "video", mask, [0.0, 0.1])


# -- tracks ----------------------------------------------------------------------------------------------------------


def several(path, tracks):
    """tracks: height of frames, number of the first frame, whether it is marked as default (None: no mark)."""
    with av.open(str(path), "w") as output:
        streams = []
        for height, _, marked in tracks:
            stream = output.add_stream("libx264", rate=RATE, options=FAST)
            stream.width, stream.height, stream.pix_fmt = 256, height, "yuv420p"
            stream.disposition = av.stream.Disposition.default if marked else av.stream.Disposition(0)
            streams.append(stream)
        output.start_encoding()
        for index in range(20):
            for stream, (height, first, _) in zip(streams, tracks, strict=True):
                (pixels,) = numbered([first + index], height)
                frame = av.VideoFrame.from_ndarray(pixels)
                frame.pts, frame.time_base = index, Fraction(1, RATE)
                output.mux(stream.encode(frame))
        for stream in streams:
            output.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
@pytest.mark.parametrize(
    ("marks", "heights", "track"),
    [
        ((False, True), (128, 64), 1),  # the marked one, though it is smaller
        ((False, False, False), (64, 128, 96), 1),
        ((False,), (64,), None),
    ],
)
def test_the_default_track_is_read_or_else_the_largest(tmp_path, suffix, marks, heights, track):
    tracks = [(height, 100 * index, mark) for index, (height, mark) in enumerate(zip(heights, marks, strict=True))]
    path = several(tmp_path / f"a.{suffix}", tracks)
    if suffix == "mp4" and not any(marks):  # FFmpeg marks the first track of an MP4 if no track is marked
        track = track and 0
    columns = probe_media(path, "video")
    main = track or 0
    assert (columns["track"], columns["height"]) == (track, heights[main])
    assert [number_of(frame) for frame in read_frames(path, [0.0, 0.6])] == [100 * main, 100 * main + 15]
    pytest.importorskip("decord")
    if track is None:
        assert numbers(path, [0.6], decord_backend) == [15]
    else:
        problem = refusal(lambda p: numbers(p, [0.6], decord_backend), path).problem
        assert f"main track has number {track}" in problem
