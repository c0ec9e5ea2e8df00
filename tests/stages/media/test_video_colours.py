"""Colors of videos: converted by the standards' matrices and light, alike by both decoders, or refused."""

import av
import numpy as np
import pytest

from stages.media import decord_backend
from stages.media.files import MediaError
from stages.media.video import probe_video
from tests.stages.media.test_video_formats import FAST, PRORES, X265, first_frame, numbers, write
from tests.stages.media_files import colors, reason, refusal, video

DEEP = "yuv420p10le"


def flat(path, value, codec, prepare, size=(64, 64)):
    """A video of one color, given as the numbers (Y, U, V) that are stored."""
    frames, deep = [], "10" in codec[1]
    for _ in range(2):
        frame = av.VideoFrame(*size, codec[1])
        for plane, level in zip(frame.planes, value, strict=True):
            plane.update((level.to_bytes(2, "little") if deep else bytes([level])) * (plane.buffer_size // (1 + deep)))
        frames.append(frame)
    return video(path, frames, codec, rate=25, prepare=prepare)


@pytest.mark.parametrize(
    ("size", "matrix"), [((64, 592), 2), ((1280, 64), 2), ((64, 592), 1), ((64, 592), 5), ((64, 64), 2)]
)
def test_decord_gives_the_colours_of_pyav_or_refuses(tmp_path, size, matrix):
    """(200, 40, 90) as high definition that is not tagged would come 39 levels too green."""
    pytest.importorskip("decord")
    codec = "libx264", "yuv420p", FAST
    path = flat(tmp_path / "a.mp4", (71, 137, 193), codec, colors(2, 2, matrix, 1), size)
    if matrix == 2 and size != (64, 64):
        with pytest.raises(MediaError, match="use the decoder pyav") as caught:
            numbers(path, [0.0], decord_backend)
        assert caught.value.reason == "unsupported-color"
        return
    theirs = next(iter(decord_backend.read_frames(path, [0.0])))
    assert np.abs(theirs.astype(int) - first_frame(path)).max() <= 2


def linear(values):
    return np.where(values < 0.081, values / 4.5, ((values + 0.099) / 1.099) ** (1 / 0.45))


def gamma(light):
    return np.where(light < 0.018, 4.5 * light, 1.099 * np.maximum(light, 0) ** 0.45 - 0.099)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("a.mp4", ("libx264", DEEP, {"preset": "ultrafast", "qp": "1"})),
        ("a.mkv", ("libx265", DEEP, {"x265-params": "log-level=none:bframes=0:lossless=1"})),
        ("a.mov", ("prores_ks", "yuv422p10le", {"qscale": "1"})),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_10_bits_and_wide_colours_are_converted(tmp_path, name, codec, wide):
    """Against BT.709 and BT.2020: R'G'B' from Y'CbCr; then from their light to the light of BT.709 (ITU-R BT.2087)."""
    y, u, v = 401, 590, 442
    path = flat(tmp_path / name, (y, u, v), codec, colors(1, 9, 9, 1) if wide else colors(1, 1, 1, 1))
    red, blue = (0.2627, 0.0593) if wide else (0.2126, 0.0722)
    light, cb, cr = (y - 64) / 876, (u - 512) / 896, (v - 512) / 896
    r, b = light + 2 * (1 - red) * cr, light + 2 * (1 - blue) * cb
    color = np.array([r, (light - red * r - blue * b) / (1 - red - blue), b])
    if wide:
        change = [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]]
        narrow = gamma(np.clip(np.array(change) @ linear(color), 0, 1))
        assert np.abs(narrow - color).max() * 255 > 4
        color = narrow
    assert np.abs(first_frame(path).reshape(-1, 3) - color * 255).max() <= 1.6
    assert probe_video(path).wide == wide


@pytest.mark.parametrize(
    ("name", "codec", "transfer"),
    [
        ("a.mp4", ("libx264", DEEP, FAST), 16),
        ("b.mkv", ("libx265", DEEP, X265[2]), 18),
        ("c.mp4", ("libsvtav1", DEEP, {"preset": "12"}), 16),
        ("d.mov", PRORES, 18),
    ],
)
def test_high_dynamic_range_is_refused(tmp_path, name, codec, transfer):
    path = flat(tmp_path / name, (401, 512, 512), codec, colors(transfer, 9, 9, 1))
    for action in (probe_video, first_frame):
        error = refusal(action, path)
        assert error.reason == "hdr" and "tone-map" in error.advice


def test_colours_that_nobody_converts_are_refused(tmp_path):
    """Dolby Vision without a standard layer, and an unusual matrix."""
    path = write(tmp_path / "a.mp4", codec=X265)
    assert probe_video(path).codec == "hevc"
    path.write_bytes(path.read_bytes().replace(b"hev1", b"dvhe"))
    assert reason(probe_video, path) == reason(first_frame, path) == "hdr"
    path = write(tmp_path / "ycgco.mp4", prepare=colors(1, 1, 8))
    assert reason(probe_video, path) == reason(first_frame, path) == "unsupported-color"
