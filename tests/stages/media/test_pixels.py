import numpy as np
import pytest
from diffusers import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from PIL import Image

from schemas.geometry import Bucket, Crop, cover_crop
from stages.media.errors import MediaError
from stages.media.sample_reader import normalise_pixels, resize_and_crop


def noise(width, height, frames=1):
    shape = (frames, height, width, 3)
    pictures = np.random.default_rng(width).integers(0, 256, shape, dtype=np.uint8)
    return [Image.fromarray(picture) for picture in pictures]


@pytest.mark.parametrize("size", [(64, 48), (200, 150), (32, 24), (160, 90)])
def test_an_image_of_the_same_shape_equals_the_pipelines_preprocessing(size):
    """Kandinsky i2i and Sana use VaeImageProcessor, i2v VideoProcessor, all with their defaults."""
    bucket = Bucket(64, 48)
    (image,) = noise(*size)
    ours = normalise_pixels(resize_and_crop(image, Crop(bucket.width, bucket.height, 0, 0), bucket))
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
    np.testing.assert_array_equal(normalise_pixels(resize_and_crop(image, crop, bucket)), theirs)


def test_a_video_equals_the_pipelines_preprocessing():
    bucket = Bucket(48, 32, 5)
    frames = noise(96, 64, frames=5)
    crop = cover_crop(96, 64, bucket.width, bucket.height)
    ours = normalise_pixels(np.stack([resize_and_crop(frame, crop, bucket) for frame in frames]))
    theirs = VideoProcessor(vae_scale_factor=8).preprocess_video(frames, height=32, width=48)[0].numpy()
    assert ours.shape == (3, 5, 32, 48)
    np.testing.assert_array_equal(ours, theirs)


def test_every_level_is_in_the_range():
    levels = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    scaled = normalise_pixels(levels)
    assert scaled.min() == -1.0 and scaled.max() == 1.0
    np.testing.assert_array_equal(np.round((scaled[0] + 1) * 127.5).astype(np.uint8), levels[..., 0])


def test_the_crop_is_cut_where_it_says():
    picture = np.zeros((10, 30, 3), np.uint8)
    picture[:, 10:20] = 255
    cut = resize_and_crop(Image.fromarray(picture), Crop(30, 10, 10, 0), Bucket(10, 10))
    assert cut.shape == (10, 10, 3) and cut.min() == 255


def test_a_sliver_is_refused_instead_of_filling_the_memory():
    crop = cover_crop(1, 20_000, 512, 512)
    with pytest.raises(MediaError, match=r"sliver\.png.*512x10240000") as caught:
        resize_and_crop(Image.new("RGB", (1, 20_000)), crop, Bucket(512, 512), path="sliver.png")
    assert caught.value.reason == "too-large"
