"""A plan's samples as pixels: which frames, cut how."""

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from schemas.clips import clip_times
from schemas.geometry import Bucket, Crop
from stages.media import animation, decord_backend, pixels, video
from stages.media.files import Media
from stages.media.image import load_image


def crop_of(geometry: dict) -> tuple[Crop, Bucket]:
    crop = Crop(geometry["resize_w"], geometry["resize_h"], geometry["x"], geometry["y"])
    return crop, Bucket.parse(geometry["bucket"])


def fit_image(path: Media, geometry: dict) -> np.ndarray:
    """uint8 (H, W, 3): the image cut to its bucket."""
    return pixels.fit(load_image(path), *crop_of(geometry), path=path)


def read_frames(path: Media, sample: dict, decoder: str) -> np.ndarray:
    """uint8 (T, H, W, 3): the sample's chosen frames cut to its bucket; T = 1 for an image."""
    if sample["kind"] == "image":
        return fit_image(path, sample["geometry"])[None]
    crop, bucket = crop_of(sample["geometry"])
    times = clip_times(sample["start"], sample["rate"], bucket.frames)
    frames = _frames(path, times, decoder)
    return np.stack([pixels.fit(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])


def read_mask(path: Media, kind: str, geometry: dict, times: Sequence[float]) -> np.ndarray:
    """uint8 (T, H, W): a mask as grey, cut as its sample is; 255 is trained, what is transparent is not.

    times: those of the sample's frames, in seconds, T of them; a video mask is read at the same ones, an image is
    repeated (T = 1 where there are none).
    """
    crop, bucket = crop_of(geometry)
    if kind == "image":
        image = load_image(path, background="black")
        return pixels.fit_mask(image, crop, bucket, path=path)[None].repeat(max(1, len(times)), axis=0)
    frames = _frames(path, times, "pyav")
    return np.stack([pixels.fit_mask(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])


def _frames(path: Media, times: Sequence[float], decoder: str) -> Iterator[np.ndarray]:
    if animation.is_animation(path):
        return animation.read_frames(path, times)
    backend = decord_backend if decoder == "decord" else video
    return backend.read_frames(path, times)
