"""What the encoding stages read of one member, in a process of its own: files checked, frames chosen and cut.

Needs no torch, and what it gives is small: 8-bit pixels, which the worker turns into the autoencoder's numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.media.errors import unreadable
from stages.media.files import Media, check
from stages.media.samples import fit_image, read_frames


@dataclass(frozen=True)
class Wanted:
    """Files with the content that they were planned with, the row of the sample (None for an image alone), and how
    the last file is cut, where it is an image beside a sample's media or an image alone."""

    files: tuple[tuple[Media, str], ...]
    sample: dict[str, Any] | None
    image_geometry: dict[str, Any] | None
    decoder: str = "pyav"


Read = tuple[np.ndarray | None, np.ndarray | None]


def read(wanted: Wanted) -> Read:
    """(uint8 (T, H, W, 3) frames, uint8 (H, W, 3) image), None for what was not asked for. Raises MediaError."""
    try:
        for path, content in wanted.files:
            check(path, content)
        frames = image = None
        if wanted.sample is not None:
            frames = read_frames(wanted.files[0][0], wanted.sample, wanted.decoder)
        if wanted.image_geometry is not None:
            image = fit_image(wanted.files[-1][0], wanted.image_geometry)
        return frames, image
    except OSError as error:
        raise unreadable(wanted.files[0][0], error) from error


def reader() -> Callable[[Wanted], Read]:
    return read
