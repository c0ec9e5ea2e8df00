"""A plan's samples as pixels: which frames, cut how."""

from pathlib import Path

import numpy as np
from PIL import Image

from schemas.geometry import Bucket, Crop, clip_times
from stages.media import decord_backend, pixels, video
from stages.media.image import load_image


def crop_of(geometry: dict) -> tuple[Crop, Bucket]:
    crop = Crop(geometry["resize_w"], geometry["resize_h"], geometry["x"], geometry["y"])
    return crop, Bucket.parse(geometry["bucket"])


def fit_image(path: Path, geometry: dict) -> np.ndarray:
    """uint8 (H, W, 3): the image cut to its bucket."""
    return pixels.fit(load_image(path), *crop_of(geometry), path=path)


def read_frames(path: Path, sample: dict, decoder: str) -> np.ndarray:
    """uint8 (T, H, W, 3): the sample's chosen frames cut to its bucket; T = 1 for an image."""
    if sample["kind"] == "image":
        return fit_image(path, sample["geometry"])[None]
    backend = decord_backend if decoder == "decord" else video
    crop, bucket = crop_of(sample["geometry"])
    times = clip_times(sample["start"], sample["rate"], bucket.frames)
    frames = backend.read_frames(path, times)
    return np.stack([pixels.fit(Image.fromarray(frame), crop, bucket, path=path) for frame in frames])
