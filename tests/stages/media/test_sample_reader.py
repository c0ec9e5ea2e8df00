import numpy as np
import pytest
from diffusers import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from PIL import Image

from schemas.clips import clip_times
from schemas.geometry import Bucket, Crop, cover_crop
from stages.encoding.masks.worker import write_png
from stages.media.files import MediaError
from stages.media.sample_reader import normalize_pixels, read_sample_frames, read_sample_mask, resize_and_crop
from tests.stages.media_files import video

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
    codec = "libx264", "yuv444p", {"qp": "0", "preset": "ultrafast"}
    return video(tmp_path_factory.mktemp("masks") / "mask.mp4", map(half, range(FRAMES)), codec, rate=25)


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
    sample_geometry = geometry(Bucket(32, 32, 5), 64, 32, x=8)
    alone = read_sample_mask(tmp_path / "mask.png", "image", sample_geometry, [])
    repeated = read_sample_mask(tmp_path / "mask.png", "image", sample_geometry, clip_times(0, 24, 5))
    assert alone.shape == (1, 32, 32) and columns(alone) == [12]
    assert repeated.shape == (5, 32, 32) and (repeated == alone).all()


@pytest.mark.parametrize("alike", [False, True])
def test_a_made_mask_has_a_frame_for_each_of_its_sample(tmp_path, alike):
    """Also if all frames are equal, which Pillow writes as one frame; some frames are read by their numbers."""
    masks = np.stack([half(10 if alike else 5 + number) for number in (0, 0, 0, 3, 4)])[..., 0]
    (tmp_path / "made").write_bytes(write_png(masks))
    sample_geometry = geometry(Bucket(64, 32, 5), 64, 32)
    expected = [20] * 5 if alike else [10, 10, 10, 16, 18]
    assert columns(read_sample_mask(tmp_path / "made", "made", sample_geometry, range(5))) == expected
    assert columns(read_sample_mask(tmp_path / "made", "made", sample_geometry, [0, 3])) == [expected[0], expected[3]]
    (tmp_path / "one").write_bytes(write_png(masks[:1]))
    assert columns(read_sample_mask(tmp_path / "one", "made", sample_geometry, range(1))) == expected[:1]


def test_a_mask_is_cut_as_its_sample_is(tmp_path):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20, 30:] = 255
    Image.fromarray(pixels).save(tmp_path / "sample.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "mask.png")
    sample_geometry = geometry(Bucket(40, 40), 120, 80, x=50, y=20)
    frames = read_sample_frames(tmp_path / "sample.png", {"kind": "image", "geometry": sample_geometry}, "pyav")
    mask = read_sample_mask(tmp_path / "mask.png", "image", sample_geometry, [])
    assert ((frames[0, ..., 0] > 127) == (mask[0] > 127)).all()
    assert mask[0, 2, 38] == 255 and mask[0, 38, 38] == 0


@pytest.mark.parametrize("decoder", ["pyav", "decord"])
def test_an_animation_is_a_video_whatever_the_decoder(tmp_path, decoder):
    first, *further = (Image.fromarray(half(number)) for number in range(FRAMES))
    first.save(tmp_path / "a.webp", save_all=True, append_images=further, duration=40, lossless=True)
    sample_geometry = geometry(Bucket(64, 32, 5), 64, 32)
    sample = {"kind": "video", "geometry": sample_geometry, "start": 0.2, "rate": 12.5}
    frames = read_sample_frames(tmp_path / "a.webp", sample, decoder)
    assert frames.shape == (5, 32, 64, 3)
    assert columns(frames[..., 0]) == [10, 14, 18, 22, 26]
    mask = read_sample_mask(tmp_path / "a.webp", "video", sample_geometry, clip_times(0.2, 12.5, 5))
    assert columns(mask) == [10, 14, 18, 22, 26]


# -- as the pipelines do -----------------------------------------------------------------------------------------------


def noise(width, height, frames=1):
    shape = (frames, height, width, 3)
    pictures = np.random.default_rng(width).integers(0, 256, shape, dtype=np.uint8)
    return [Image.fromarray(picture) for picture in pictures]


@pytest.mark.parametrize("size", [(64, 48), (200, 150), (160, 90)])
def test_an_image_of_the_same_shape_equals_the_pipelines_preprocessing(size):
    """Kandinsky i2i and Sana use VaeImageProcessor, i2v VideoProcessor, all with their defaults."""
    bucket = Bucket(64, 48)
    (image,) = noise(*size)
    ours = normalize_pixels(resize_and_crop(image, Crop(bucket.width, bucket.height, 0, 0), bucket))
    assert ours.dtype == np.float32 and ours.shape == (3, 48, 64) and ours.flags.c_contiguous
    for processor in (VaeImageProcessor(vae_scale_factor=8), VideoProcessor(vae_scale_factor=8)):
        theirs = processor.preprocess(image, height=bucket.height, width=bucket.width)[0].numpy()
        np.testing.assert_array_equal(ours, theirs)


def test_a_cropped_image_equals_the_pipelines_preprocessing_of_the_same_crop():
    bucket = Bucket(64, 64)
    (image,) = noise(200, 120)
    crop = cover_crop(*image.size, bucket.width, bucket.height)
    resized = image.resize((crop.resize_width, crop.resize_height), Image.Resampling.LANCZOS)
    box = (crop.x, crop.y, crop.x + bucket.width, crop.y + bucket.height)
    theirs = VaeImageProcessor(vae_scale_factor=8).preprocess(resized, 64, 64, crops_coords=box)[0].numpy()
    np.testing.assert_array_equal(normalize_pixels(resize_and_crop(image, crop, bucket)), theirs)


def test_a_video_equals_the_pipelines_preprocessing():
    bucket = Bucket(48, 32, 5)
    frames = noise(96, 64, frames=5)
    crop = cover_crop(96, 64, bucket.width, bucket.height)
    ours = normalize_pixels(np.stack([resize_and_crop(frame, crop, bucket) for frame in frames]))
    theirs = VideoProcessor(vae_scale_factor=8).preprocess_video(frames, height=32, width=48)[0].numpy()
    assert ours.shape == (3, 5, 32, 48)
    np.testing.assert_array_equal(ours, theirs)


def test_a_sliver_is_refused_instead_of_filling_the_memory():
    crop = cover_crop(1, 20_000, 512, 512)
    with pytest.raises(MediaError, match=r"sliver\.png.*512x10240000") as caught:
        resize_and_crop(Image.new("RGB", (1, 20_000)), crop, Bucket(512, 512), path="sliver.png")
    assert caught.value.reason == "too-large"
