"""Reads the samples of a plan: their frames, cropped."""

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from schemas.clips import clip_times
from schemas.geometry import Bucket, Crop
from stages.media import animation, decord_backend, pixels, video
from stages.media.files import MediaPath
from stages.media.image import load_image


def parse_crop(geometry: dict) -> tuple[Crop, Bucket]:
    crop = Crop(geometry["resize_w"], geometry["resize_h"], geometry["x"], geometry["y"])
    return crop, Bucket.parse(geometry["bucket"])


def read_cropped_image(path: MediaPath, geometry: dict) -> np.ndarray:
    """uint8 (H, W, 3): the image cropped to its bucket."""
    return pixels.resize_and_crop(load_image(path), *parse_crop(geometry), path=path)


def read_sample_frames(path: MediaPath, sample: dict, decoder: str) -> np.ndarray:
    """uint8 (T, H, W, 3): the sample's frames cropped to its bucket; T = 1 for an image."""
    if sample["kind"] == "image":
        return read_cropped_image(path, sample["geometry"])[None]
    crop, bucket = parse_crop(sample["geometry"])
    times = clip_times(sample["start"], sample["rate"], bucket.frames)
    frames = _iter_frames(path, times, decoder)
    return np.stack([pixels.resize_and_crop(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])


def read_sample_mask(path: MediaPath, kind: str, geometry: dict, times: Sequence[float]) -> np.ndarray:
    """uint8 (T, H, W): a mask in grey with its sample's crop; 255 is trained on, transparent parts are not.

    times: seconds of the sample's T frames, at which a video mask is read; an image mask is repeated (T = 1 without
    times).
    """
    crop, bucket = parse_crop(geometry)
    if kind == "image":
        image = load_image(path, background="black")
        return pixels.resize_and_crop_mask(image, crop, bucket, path=path)[None].repeat(max(1, len(times)), axis=0)
    frames = _iter_frames(path, times, "pyav")
    return np.stack([pixels.resize_and_crop_mask(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])


def _iter_frames(path: MediaPath, times: Sequence[float], decoder: str) -> Iterator[np.ndarray]:
    if animation.is_animation(path):
        return animation.read_frames(path, times)
    backend = decord_backend if decoder == "decord" else video
    return backend.read_frames(path, times)
