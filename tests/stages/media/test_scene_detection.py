import sys

import numpy as np
import pytest
from PIL import Image

from stages.discovery.item_reader import find_scenes, probe_media
from stages.media.video import read_frames
from tests.stages.media_files import video

HEIGHT, WIDTH = 72, 128


def scenery(seed):
    """A large picture of soft shapes in its own colors."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (6, 16, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((WIDTH * 4, HEIGHT), Image.Resampling.BICUBIC))


def pan(seed, frames, step=2):
    picture = scenery(seed)
    for index in range(frames):
        yield np.ascontiguousarray(picture[:, index * step : index * step + WIDTH])


def write(path, frames, stamps=None):
    return video(path, frames, ("libx264", "yuv420p", {"preset": "ultrafast", "bf": "2"}), rate=25, stamps=stamps)


def scenes_of(lengths):
    for seed, length in enumerate(lengths):
        yield from pan(seed, length)


@pytest.mark.parametrize("lengths", [(30, 30), (12, 40, 25), (20, 6, 6, 20), (40, 4)])
def test_hard_cuts_are_found_to_a_frame(tmp_path, lengths):
    path = write(tmp_path / "cuts.mp4", scenes_of(lengths))
    cuts = find_scenes(path)
    assert cuts == pytest.approx([start / 25 for start in np.cumsum(lengths)[:-1]])
    # As the reader counts: the picture at a cut is another than a frame before.
    for cut in cuts:
        before, at = read_frames(path, [cut - 1 / 25, cut])
        assert np.abs(before.astype(int) - at).mean() > 20


def test_a_pan_a_still_and_a_change_of_light_are_one_scene(tmp_path):
    assert find_scenes(write(tmp_path / "pan.mp4", pan(0, 60, step=5))) == []
    assert find_scenes(write(tmp_path / "still.mp4", pan(0, 30, step=0))) == []
    brighter = (np.clip(frame.astype(int) + 2 * n, 0, 255).astype(np.uint8) for n, frame in enumerate(pan(1, 50)))
    assert find_scenes(write(tmp_path / "light.mp4", brighter)) == []
    assert find_scenes(write(tmp_path / "one.mp4", pan(0, 1))) == []


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
def test_times_are_those_of_the_reader_where_the_rate_varies_and_the_start_is_late(tmp_path, suffix):
    gaps = np.random.default_rng(0).integers(20, 90, 50)
    stamps = (3000 + np.cumsum(gaps)).tolist()
    path = write(tmp_path / f"vfr.{suffix}", scenes_of((23, 27)), stamps)
    assert find_scenes(path) == pytest.approx([(stamps[23] - stamps[0]) / 1000], abs=0.002)


def test_an_animation_has_scenes(tmp_path):
    first, *further = map(Image.fromarray, scenes_of((8, 9)))
    first.save(tmp_path / "a.webp", save_all=True, append_images=further, duration=40, lossless=True)
    assert find_scenes(tmp_path / "a.webp") == pytest.approx([0.32])


def test_without_the_library_the_error_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.mp4", pan(0, 3))
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    assert probe_media(path, "video")["frames"] == 3
    with pytest.raises(ValueError, match=r"pip install 'latentpress\[scenes\]'"):
        probe_media(path, "video", scenes=True)
