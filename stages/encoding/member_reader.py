"""Reads a member for the encoding stages in a decoding process (stages/engines/sandbox.py): checks the member's files,
chooses and crops its frames. Does not need torch; results are small, since they are 8-bit pixels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from schemas.clips import clip_times
from schemas.family import ReferenceSize
from schemas.geometry import Bucket, Crop
from schemas.tables import MADE
from stages.media.files import MediaPath, require_unchanged, unreadable_error
from stages.media.image import load_image
from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask, resize_and_crop


@dataclass(frozen=True)
class ReadRequest:
    """files: paths, each with its planned media id; a mask is last. sample: the sample's row; None if only an image is
    read. image_geometry: crop of an image that is read alone or in addition to the sample. image_size: rule for the
    size of each image, if all files are reference images."""

    files: tuple[tuple[MediaPath, str], ...]
    sample: dict[str, Any] | None
    image_geometry: dict[str, Any] | None
    decoder: str = "pyav"
    has_mask: bool = False
    image_size: ReferenceSize | None = None


class MemberPixels(NamedTuple):
    """Pixels as uint8. frames: (T, H, W, 3). image: (H, W, 3). mask: (T, H, W), with T = 1 for a mask of all frames.
    references: images (H, W, 3). Parts that were not requested are None or empty."""

    frames: np.ndarray | None
    image: np.ndarray | None
    mask: np.ndarray | None
    references: tuple[np.ndarray, ...] = ()


def read_member(request: ReadRequest) -> MemberPixels:
    """Read the requested pixels. Raises MediaError."""
    first_path, sample = request.files[0][0], request.sample
    try:
        for path, media_id in request.files:
            require_unchanged(path, media_id)
        if request.image_size is not None:
            return MemberPixels(None, None, None, tuple(_read_references(request.files, request.image_size)))
        frames = image = mask = None
        if sample is not None:
            frames = read_sample_frames(first_path, sample, request.decoder)
        if request.image_geometry is not None:
            image = read_cropped_image(request.files[0 if sample is None else 1][0], request.image_geometry)
        if request.has_mask:
            assert sample is not None
            times: Sequence[float] = ()
            frame_count = Bucket.parse(sample["geometry"]["bucket"]).frames
            if sample["mask_kind"] == "video":
                times = clip_times(sample["start"], sample["rate"], frame_count)
            elif sample["mask_kind"] == MADE:
                times = range(frame_count)
            mask = read_sample_mask(request.files[-1][0], sample["mask_kind"], sample["mask_geometry"], times)
        return MemberPixels(frames, image, mask)
    except OSError as error:
        raise unreadable_error(first_path, error) from error


def _read_references(files: Sequence[tuple[MediaPath, str]], size: ReferenceSize) -> Iterator[np.ndarray]:
    for path, _ in files:
        image = load_image(path)
        width, height, crop = size.fit(*(np.array([side]) for side in image.size))
        placed = Crop(*(int(numbers[0]) for numbers in vars(crop).values()))
        yield resize_and_crop(image, placed, Bucket(int(width[0]), int(height[0])), path=path)


def make_member_reader() -> Callable[[ReadRequest], MemberPixels]:
    return read_member
