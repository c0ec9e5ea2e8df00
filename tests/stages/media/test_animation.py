import io

import numpy as np
import pytest
from PIL import Image

from stages.discovery.item_reader import probe_media
from stages.media.animation import is_animation, probe_animation, read_frames
from tests.stages.media_files import reason

LASTING = [100, 40, 200, 60, 500, 30, 70]  # milliseconds; GIF counts in hundredths of a second
STARTS = np.cumsum([0, *LASTING[:-1]]) / 1000
OPTIONS = {"gif": {}, "webp": {"lossless": True}, "png": {}}


def pictures(count=7):
    """A white bar that moves down, on blue; the encoders omit unchanged regions from the file."""
    for number in range(count):
        pixels = np.full((32, 48, 3), (0, 0, 255), np.uint8)
        pixels[number * 4 : number * 4 + 4] = 255
        yield Image.fromarray(pixels)


def number_of(frame):
    rows = np.flatnonzero(frame[:, :, 0].mean(1) > 128)
    assert len(rows) == 4
    return rows[0] // 4


def write(path, lasting=LASTING, **options):
    first, *further = pictures(len(lasting))
    suffix = path.suffix[1:]
    first.save(path, save_all=True, append_images=further, duration=lasting, **OPTIONS[suffix], **options)
    return path


@pytest.mark.parametrize("suffix", OPTIONS)
def test_frames_are_chosen_by_their_own_durations(tmp_path, suffix):
    path = write(tmp_path / f"moving.{suffix}")
    info = probe_animation(path)
    assert (info.width, info.height, info.frames) == (48, 32, 7)
    assert info.duration == pytest.approx(1.0) and info.rate == pytest.approx(7.0)
    for times in ([index / 24 for index in range(24)], STARTS.tolist(), [0.35, 0.9, 0.999 - 0.0011], [0.5]):
        expected = [int(np.searchsorted(STARTS, time + 1e-3, side="right")) - 1 for time in times]
        assert [number_of(frame) for frame in read_frames(path, times)] == expected
    assert reason(lambda p: list(read_frames(p, [1.0])), path) == "truncated"
    assert list(read_frames(path, [])) == []
    with pytest.raises(ValueError, match="ascending"):
        list(read_frames(path, [0.5, 0.1]))


def test_durations_of_nothing_are_a_tenth_of_a_second_as_in_browsers(tmp_path):
    info = probe_animation(write(tmp_path / "fast.gif", lasting=[0, 10, 20]))
    assert info.duration == pytest.approx(0.22)


def test_transparent_frames_are_laid_over_white_and_replace_what_was_there(tmp_path):
    """Two frames that show one red square each, in other places, on nothing."""
    frames = []
    for offset in (0, 16):
        frame = Image.new("RGBA", (32, 16), (0, 0, 0, 0))
        frame.paste((255, 0, 0, 255), (offset, 0, offset + 16, 16))
        for corner in ((0, 0), (31, 15)):  # so that the encoders keep the whole frame, including its transparent part
            frame.putpixel(corner, (255, 0, 0, 255))
        frames.append(frame)
    for suffix, options in (("gif", {"disposal": 2}), ("webp", {"lossless": True}), ("png", {"blend": 0})):
        path = tmp_path / f"clear.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, **options)
        first, second = read_frames(path, [0.0, 0.1])
        for frame, red, white in ((first, 8, 24), (second, 24, 8)):
            assert frame[8, red].tolist() == [255, 0, 0] and frame[8, white].tolist() == [255, 255, 255]


def test_the_picture_for_readers_that_know_no_animated_png_is_left_out(tmp_path):
    first, *further = pictures(3)
    path = tmp_path / "default.png"
    Image.new("RGB", first.size, "red").save(
        path, save_all=True, append_images=[first, *further], default_image=True, duration=100
    )
    assert probe_animation(path).frames == 3
    assert [number_of(frame) for frame in read_frames(path, [0.0, 0.1, 0.2])] == [0, 1, 2]


@pytest.mark.parametrize("suffix", OPTIONS)
def test_a_cut_animation_is_a_media_error_and_gives_no_wrong_frame(tmp_path, suffix):
    path = write(tmp_path / f"cut.{suffix}")
    content = path.read_bytes()
    for share in (0.2, 0.8):
        path.write_bytes(content[: int(len(content) * share)])
        delivered = []

        def read(path, delivered=delivered):
            probe_media(path, "image", animations="video")
            for frame in read_frames(path, STARTS.tolist()):
                delivered.append(number_of(frame))

        assert reason(read, path) in ("truncated", "unreadable", "not-an-image")
        assert delivered == list(range(len(delivered)))


def test_what_is_an_animation_is_seen_by_its_first_bytes(tmp_path):
    for name, content, expected in (
        ("a.gif", b"GIF89a" + bytes(20), True),
        ("a.avi", b"RIFF\0\0\0\0AVI LIST", False),
        ("a.mp4", b"\0\0\0\x18ftypisom", False),
        ("a.jpg", b"\xff\xd8\xff\xe0", False),
    ):
        (tmp_path / name).write_bytes(content)
        assert is_animation(tmp_path / name) == expected
    buffer = io.BytesIO()
    next(pictures()).save(buffer, "JPEG")
    (tmp_path / "b.jpg").write_bytes(buffer.getvalue())
    assert reason(probe_animation, tmp_path / "b.jpg") == "not-an-image"
