import av
import numpy as np
import pytest
from PIL import Image

from schemas.clips import clip_times
from schemas.geometry import Bucket
from stages.media.sample_reader import read_sample_frames, read_sample_mask

FRAMES = 20


def geometry(bucket, resize_w, resize_h, x=0, y=0):
    return {"bucket": str(bucket), "resize_w": resize_w, "resize_h": resize_h, "x": x, "y": y}


def half(number, width=64, height=32):
    """White on the left up to a column that moves by two pixels a frame."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : 2 * number] = 255
    return pixels


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    path = tmp_path_factory.mktemp("masks") / "mask.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25, options={"qp": "0", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv444p"
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(half(number))
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def columns(mask_THW):
    """How many columns of each frame are trained on."""
    return (mask_THW[:, 0] > 127).sum(axis=1).tolist()


def test_a_video_mask_is_read_at_the_times_of_its_sample(moving):
    times = clip_times(0.2, 12.5, 5)
    mask = read_sample_mask(moving, "video", geometry(Bucket(64, 32, 5), 64, 32), times)
    assert mask.shape == (5, 32, 64) and mask.dtype == np.uint8
    assert columns(mask) == [2 * number for number in (5, 7, 9, 11, 13)]


def test_an_image_mask_applies_to_all_frames(tmp_path):
    Image.fromarray(half(10)).save(tmp_path / "mask.png")
    where = geometry(Bucket(32, 32, 5), 64, 32, x=8)
    alone = read_sample_mask(tmp_path / "mask.png", "image", where, [])
    repeated = read_sample_mask(tmp_path / "mask.png", "image", where, clip_times(0, 24, 5))
    assert alone.shape == (1, 32, 32) and columns(alone) == [12]
    assert repeated.shape == (5, 32, 32) and (repeated == alone).all()


def test_a_mask_is_cut_as_its_sample_is(tmp_path):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20, 30:] = 255
    Image.fromarray(pixels).save(tmp_path / "sample.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "mask.png")
    where = geometry(Bucket(40, 40), 120, 80, x=50, y=20)
    frames = read_sample_frames(tmp_path / "sample.png", {"kind": "image", "geometry": where}, "pyav")
    mask = read_sample_mask(tmp_path / "mask.png", "image", where, [])
    assert ((frames[0, ..., 0] > 127) == (mask[0] > 127)).all()
    assert mask[0, 2, 38] == 255 and mask[0, 38, 38] == 0


def test_masks_do_not_ring(tmp_path):
    Image.fromarray(half(16)[..., 0]).save(tmp_path / "mask.png")
    enlarged = read_sample_mask(tmp_path / "mask.png", "image", geometry(Bucket(640, 320), 640, 320), [])[0, 0]
    assert (np.diff(enlarged.astype(int)) <= 0).all()
    assert set(enlarged[:310]) == {255} and set(enlarged[330:]) == {0}


def test_what_is_transparent_in_a_mask_is_not_trained_on(tmp_path):
    painted = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    painted.paste((255, 255, 255, 255), (0, 0, 4, 8))
    painted.save(tmp_path / "mask.png")
    assert columns(read_sample_mask(tmp_path / "mask.png", "image", geometry(Bucket(8, 8), 8, 8), [])) == [4]


@pytest.mark.parametrize("decoder", ["pyav", "decord"])
def test_an_animation_is_a_video_whatever_the_decoder(tmp_path, decoder):
    first, *others = (Image.fromarray(half(number)) for number in range(FRAMES))
    first.save(tmp_path / "a.webp", save_all=True, append_images=others, duration=40, lossless=True)
    where = geometry(Bucket(64, 32, 5), 64, 32)
    sample = {"kind": "video", "geometry": where, "start": 0.2, "rate": 12.5}
    frames = read_sample_frames(tmp_path / "a.webp", sample, decoder)
    assert frames.shape == (5, 32, 64, 3)
    assert columns(frames[..., 0]) == [10, 14, 18, 22, 26]
    mask = read_sample_mask(tmp_path / "a.webp", "video", where, clip_times(0.2, 12.5, 5))
    assert columns(mask) == [10, 14, 18, 22, 26]
