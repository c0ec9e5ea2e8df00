"""Colours of videos: converted by the standards' matrices and light, alike by both decoders, or refused."""

import numpy as np
import pytest

from stages.media import decord_backend
from stages.media.errors import MediaError
from stages.media.video import probe_video
from tests.stages.media.test_video_formats import FAST, X265, first_frame, flat, marked, numbers, reason, tagged, write


@pytest.mark.parametrize(
    ("size", "matrix"), [((64, 592), 2), ((1280, 64), 2), ((64, 592), 1), ((64, 592), 5), ((64, 64), 2)]
)
def test_decord_gives_the_colours_of_pyav_or_refuses(tmp_path, size, matrix):
    """(200, 40, 90) as high definition that is not tagged would come 39 levels too green."""
    pytest.importorskip("decord")
    frames = flat((71, 137, 193), size, "yuv420p")
    path = write(tmp_path / "a.mp4", frames, layout="yuv420p", prepare=tagged(2, 2, matrix))
    if matrix == 2 and size != (64, 64):
        with pytest.raises(MediaError, match="use the decoder pyav") as caught:
            numbers(path, [0.0], decord_backend)
        assert caught.value.reason == "unsupported-colour"
        return
    theirs = next(iter(decord_backend.read_frames(path, [0.0])))
    assert np.abs(theirs.astype(int) - first_frame(path)).max() <= 2


def linear(values):
    return np.where(values < 0.081, values / 4.5, ((values + 0.099) / 1.099) ** (1 / 0.45))


def gamma(light):
    return np.where(light < 0.018, 4.5 * light, 1.099 * np.maximum(light, 0) ** 0.45 - 0.099)


@pytest.mark.parametrize(
    ("name", "codec", "options", "layout"),
    [
        ("a.mp4", "libx264", {"preset": "ultrafast", "qp": "1"}, "yuv420p10le"),
        ("a.mkv", "libx265", {"x265-params": "log-level=none:lossless=1"}, "yuv420p10le"),
        ("a.mov", "prores_ks", {"qscale": "1"}, "yuv422p10le"),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_10_bits_and_wide_colours_are_converted(tmp_path, name, codec, options, layout, wide):
    """Against BT.709 and BT.2020: R'G'B' from Y'CbCr; then from their light to that of BT.709 (ITU-R BT.2087)."""
    y, u, v = 401, 590, 442
    tags = tagged(1, 9, 9) if wide else tagged(1, 1, 1)
    path = write(tmp_path / name, flat((y, u, v), layout=layout), codec, options, layout=layout, prepare=tags)
    red, blue = (0.2627, 0.0593) if wide else (0.2126, 0.0722)
    light, cb, cr = (y - 64) / 876, (u - 512) / 896, (v - 512) / 896
    r, b = light + 2 * (1 - red) * cr, light + 2 * (1 - blue) * cb
    colour = np.array([r, (light - red * r - blue * b) / (1 - red - blue), b])
    if wide:
        change = [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]]
        narrow = gamma(np.clip(np.array(change) @ linear(colour), 0, 1))
        assert np.abs(narrow - colour).max() * 255 > 4
        colour = narrow
    assert np.abs(first_frame(path).reshape(-1, 3) - colour * 255).max() <= 1.6
    assert probe_video(path).wide == wide


@pytest.mark.parametrize("transfer", [16, 18])
@pytest.mark.parametrize(
    ("name", "codec", "options", "layout"),
    [
        ("a.mp4", "libx264", FAST, "yuv420p10le"),
        ("b.mkv", "libx265", X265, "yuv420p10le"),
        ("c.mp4", "libsvtav1", {"preset": "12"}, "yuv420p10le"),
        ("d.mov", "prores_ks", {}, "yuv422p10le"),
    ],
)
def test_high_dynamic_range_is_refused(tmp_path, transfer, name, codec, options, layout):
    frames = flat((401, 512, 512), layout=layout)
    path = write(tmp_path / name, frames, codec, options, layout=layout, prepare=tagged(transfer, 9, 9))
    for action in (probe_video, first_frame):
        with pytest.raises(MediaError, match="tone-map") as caught:
            action(path)
        assert caught.value.reason == "hdr"


def test_dolby_vision_without_a_standard_layer_is_refused(tmp_path):
    path = write(tmp_path / "a.mp4", map(marked, range(3)), "libx265", X265)
    assert probe_video(path).codec == "hevc"
    path.write_bytes(path.read_bytes().replace(b"hev1", b"dvhe"))
    assert reason(probe_video, path) == reason(first_frame, path) == "hdr"


def test_a_matrix_that_nobody_converts_is_refused(tmp_path):
    path = write(tmp_path / "ycgco.mp4", map(marked, range(3)), prepare=tagged(1, 1, 8))
    assert reason(probe_video, path) == reason(first_frame, path) == "unsupported-colour"
