"""Reads one member for the encoding stages, in a decoding process: checks its files, chooses and crops its frames.

Needs no torch, and its results are small: 8-bit pixels, which the worker turns into the autoencoder's input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from schemas.clips import clip_times
from schemas.geometry import Bucket
from stages.media.errors import unreadable_error
from stages.media.files import MediaPath, require_unchanged
from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask


@dataclass(frozen=True)
class ReadRequest:
    """files: paths, each with its media id as planned; a mask is the last. sample: its row, None for an image alone.
    image_geometry: the crop of an image that is read in addition to the sample or alone."""

    files: tuple[tuple[MediaPath, str], ...]
    sample: dict[str, Any] | None
    image_geometry: dict[str, Any] | None
    decoder: str = "pyav"
    has_mask: bool = False


class MemberPixels(NamedTuple):
    """uint8 (T, H, W, 3) frames, (H, W, 3) image, (T, H, W) mask (T = 1 for a mask of all frames); None for what was
    not requested."""

    frames: np.ndarray | None
    image: np.ndarray | None
    mask: np.ndarray | None


def read_member(request: ReadRequest) -> MemberPixels:
    """Raises MediaError."""
    first_path, sample = request.files[0][0], request.sample
    try:
        for path, media_id in request.files:
            require_unchanged(path, media_id)
        frames = image = mask = None
        if sample is not None:
            frames = read_sample_frames(first_path, sample, request.decoder)
        if request.image_geometry is not None:
            image = read_cropped_image(request.files[0 if sample is None else 1][0], request.image_geometry)
        if request.has_mask:
            assert sample is not None
            times: Sequence[float] = ()
            if sample["mask_kind"] == "video":
                frame_count = Bucket.parse(sample["geometry"]["bucket"]).frames
                times = clip_times(sample["start"], sample["rate"], frame_count)
            mask = read_sample_mask(request.files[-1][0], sample["mask_kind"], sample["mask_geometry"], times)
        return MemberPixels(frames, image, mask)
    except OSError as error:
        raise unreadable_error(first_path, error) from error


def make_member_reader() -> Callable[[ReadRequest], MemberPixels]:
    return read_member
