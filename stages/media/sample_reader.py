"""Reads the frames of a plan's samples, and resizes, crops and scales them in the same way as diffusers' pipelines."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from PIL import Image

from schemas.clips import clip_times
from schemas.geometry import Bucket, Crop
from schemas.tables import MADE
from stages.media import animation, decord_backend, video
from stages.media.files import MediaError, MediaPath, out_of_memory_error
from stages.media.image import MAX_PIXELS, load_image

FRAME_S = 0.02  # per frame of a made mask: Pillow joins equal frames into one, which lasts at most 65 s
LARGEST_SYMMETRIC = 16  # pixels: images with a side up to this length are mirrored with the pixels of their edge


def resize_and_crop(image: Image.Image, crop: Crop, bucket: Bucket, *, path: MediaPath = "image") -> np.ndarray:
    """Resize with Lanczos, as diffusers' VaeImageProcessor and VideoProcessor do, and crop. Returns uint8
    (bucket.height, bucket.width, 3).

    If the crop was computed from the display size, the resize also corrects pixels that are not square. Raises
    MediaError for `path` if the resized picture would have more than MAX_PIXELS pixels.
    """
    return np.asarray(_resize_and_crop(image, crop, bucket, Image.Resampling.LANCZOS, path).convert("RGB"))


def resize_and_crop_mask(image: Image.Image, crop: Crop, bucket: Bucket, *, path: MediaPath = "mask") -> np.ndarray:
    """Resize and crop a mask in gray. Returns uint8 (bucket.height, bucket.width).

    The filter is bilinear: Lanczos would ring beyond the mask's edges, so that masked pixels would have a small weight.
    """
    return np.asarray(_resize_and_crop(image.convert("L"), crop, bucket, Image.Resampling.BILINEAR, path))


def _resize_and_crop(
    image: Image.Image, crop: Crop, bucket: Bucket, resample: Image.Resampling, path: MediaPath
) -> Image.Image:
    if crop.resize_width * crop.resize_height > MAX_PIXELS:
        problem = f"is so narrow that covering {bucket} takes {crop.resize_width}x{crop.resize_height} pixels"
        raise MediaError("too-large", path, problem, "crop it to a less extreme aspect, or remove it")
    try:
        resized = image.resize((crop.resize_width, crop.resize_height), resample=resample)
    except MemoryError as error:
        raise out_of_memory_error(path, error) from error
    if resized.width < bucket.width or resized.height < bucket.height:
        return _pad(resized, -crop.x, -crop.y, bucket)
    box = (crop.x, crop.y, crop.x + bucket.width, crop.y + bucket.height)
    assert box[2] <= resized.width and box[3] <= resized.height, f"{crop} is smaller than {bucket}"
    return resized.crop(box)


def _pad(image: Image.Image, left: int, top: int, bucket: Bucket) -> Image.Image:
    """The image in RGB, padded to the bucket's size with its mirror image, which repeats the edge pixels
    of a tiny image."""
    right, bottom = bucket.width - image.width - left, bucket.height - image.height - top
    assert min(left, top, right, bottom) >= 0, f"{image.size} is larger than {bucket}"
    mode: Literal["reflect", "symmetric"] = "reflect" if min(image.size) > LARGEST_SYMMETRIC else "symmetric"
    padding = ((top, bottom), (left, right), (0, 0))
    return Image.fromarray(np.pad(np.asarray(image.convert("RGB")), padding, mode=mode))


def normalize_pixels(pixels: np.ndarray) -> np.ndarray:
    """Convert uint8 (H, W, 3) or (T, H, W, 3) to float32 in [-1, 1], (3, H, W) or (3, T, H, W), contiguous. The same
    operations in the same order as in VaeImageProcessor, so that results are equal in every bit."""
    assert pixels.dtype == np.uint8 and pixels.ndim in (3, 4) and pixels.shape[-1] == 3, pixels.shape
    scaled = np.float32(2.0) * (pixels.astype(np.float32) / np.float32(255.0)) - np.float32(1.0)
    return np.ascontiguousarray(np.moveaxis(scaled, -1, 0))


def parse_crop(geometry: dict) -> tuple[Crop, Bucket]:
    crop = Crop(geometry["resize_w"], geometry["resize_h"], geometry["x"], geometry["y"])
    return crop, Bucket.parse(geometry["bucket"])


def read_cropped_image(path: MediaPath, geometry: dict) -> np.ndarray:
    """uint8 (H, W, 3): the image, resized and cropped to its bucket."""
    return resize_and_crop(load_image(path), *parse_crop(geometry), path=path)


def read_sample_frames(path: MediaPath, sample: dict, decoder: str) -> np.ndarray:
    """uint8 (T, H, W, 3): the sample's frames, resized and cropped to its bucket. T = 1 for an image."""
    if sample["kind"] == "image":
        return read_cropped_image(path, sample["geometry"])[None]
    crop, bucket = parse_crop(sample["geometry"])
    times = clip_times(sample["start"], sample["rate"], bucket.frames)
    frames = _iter_frames(path, times, decoder)
    return np.stack([resize_and_crop(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])


def read_sample_mask(path: MediaPath, kind: str, geometry: dict, times: Sequence[float]) -> np.ndarray:
    """uint8 (T, H, W): a mask in gray with its sample's crop. Pixels of 255 are trained, transparent pixels are not.

    times: times of the sample's T frames in seconds, at which a video mask is read; for a made mask, the numbers of the
    frames. An image mask is repeated T times (once if `times` is empty).
    """
    crop, bucket = parse_crop(geometry)
    if kind == MADE:
        kind = "video" if animation.probe_animation(path).frames > 1 else "image"
        times = [FRAME_S * number for number in times]
    if kind == "image":
        image = load_image(path, background="black")
        return resize_and_crop_mask(image, crop, bucket, path=path)[None].repeat(max(1, len(times)), axis=0)
    frames = _iter_frames(path, times, "pyav", background="black")
    return np.stack([resize_and_crop_mask(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])


def _iter_frames(
    path: MediaPath, times: Sequence[float], decoder: str, background: str = "white"
) -> Iterator[np.ndarray]:
    if animation.is_animation(path):
        return animation.read_frames(path, times, background=background)
    if decoder == "decord":
        return decord_backend.read_frames(path, times)
    return video.read_frames(path, times, background=background)
