"""What the encoding stages read of one member, in a process of its own: files checked, frames chosen and cut.

Needs no torch, and what it gives is small: 8-bit pixels, which the worker turns into the autoencoder's numbers.
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
    """Files with the content that they were planned with, the row of the sample (None for an image alone), and how
    the image is cut that stands beside a sample's media or alone. A sample's mask is the last file."""

    files: tuple[tuple[MediaPath, str], ...]
    sample: dict[str, Any] | None
    image_geometry: dict[str, Any] | None
    decoder: str = "pyav"
    has_mask: bool = False


class MemberPixels(NamedTuple):
    """uint8 (T, H, W, 3) frames, (H, W, 3) image, (T, H, W) mask (T = 1 for a mask of all frames alike); None for what
    was not asked for."""

    frames: np.ndarray | None
    image: np.ndarray | None
    mask: np.ndarray | None


def read_member(wanted: ReadRequest) -> MemberPixels:
    """Raises MediaError."""
    try:
        for path, content in wanted.files:
            require_unchanged(path, content)
        frames = image = mask = None
        if wanted.sample is not None:
            frames = read_sample_frames(wanted.files[0][0], wanted.sample, wanted.decoder)
        if wanted.image_geometry is not None:
            image = read_cropped_image(wanted.files[0 if wanted.sample is None else 1][0], wanted.image_geometry)
        if wanted.has_mask:
            mask = _read_mask(wanted)
        return MemberPixels(frames, image, mask)
    except OSError as error:
        raise unreadable_error(wanted.files[0][0], error) from error


def _read_mask(wanted: ReadRequest) -> np.ndarray:
    sample = wanted.sample
    assert sample is not None
    times: Sequence[float] = ()
    if sample["mask_kind"] == "video":
        times = clip_times(sample["start"], sample["rate"], Bucket.parse(sample["geometry"]["bucket"]).frames)
    return read_sample_mask(wanted.files[-1][0], sample["mask_kind"], sample["mask_geometry"], times)


def make_member_reader() -> Callable[[ReadRequest], MemberPixels]:
    return read_member
