"""A plan's samples as pixels: which file on this machine, which frames, cut how."""

from pathlib import Path

import numpy as np
from PIL import Image

from schemas.config import Config, Dataset
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, Crop, clip_times
from stages.media import decord_backend, pixels, video
from stages.media.errors import MediaError
from stages.media.image import load_image
from stages.planning import VALIDATION


def media_file(config: Config, dataset: str, path: str) -> Path:
    """A sample's file on this machine."""
    if dataset == VALIDATION:
        prompt = next((prompt for prompt in config.validation.prompts if prompt.name == path), None)
        if prompt is None or prompt.image is None:
            raise MediaError("missing", path, "is no validation prompt with an image", "run `latentpress bucket`")
        return Path(prompt.image)
    return Path(_dataset(config, dataset).root) / path


def source_file(config: Config, dataset: str, path: str) -> Path:
    """The i2i source image of a sample on this machine; of a validation prompt it is the prompt's own image."""
    if dataset == VALIDATION:
        return media_file(config, dataset, path)
    folder = _dataset(config, dataset).conditioning_data
    if folder is None:
        raise LatentpressError(f"dataset {dataset} has no conditioning_data", "add it to the configuration")
    return Path(folder) / path


def _dataset(config: Config, name: str) -> Dataset:
    found = next((dataset for dataset in config.datasets if dataset.id == name), None)
    if found is None:
        known = ", ".join(dataset.id for dataset in config.datasets)
        raise MediaError("missing", name, f"is no dataset of this configuration ({known})", "run `latentpress bucket`")
    return found


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
